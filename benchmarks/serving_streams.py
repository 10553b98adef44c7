"""200 streaming clients at once, some that read slowly and some that vanish: what the others notice of it.

    python benchmarks/serving_streams.py [--rounds 3]

Three loads in turn, several rounds: the well-behaved clients alone, 200 well-behaved ones, and the well-behaved ones
with slow readers and vanishing clients. The figure is the inter-token latency of the well-behaved clients that are in
all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from moestro.bench.client import Outcome, Server
from moestro.bench.summary import quantiles
from served import ServerProcess, served, write_result, write_tiny

NUM_GOOD, NUM_SLOW, NUM_VANISHING = 180, 10, 10
MAX_TOKENS = 150
OPTIONS = ("--max-num-seqs", "256", "--max-model-len", "512", "--num-threads", "1", "--kv-memory", "64MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="tiny") as folder,
        served(str(write_tiny(Path(folder))), *OPTIONS, "--no-access-log") as server,
    ):
        asyncio.run(_load(server, NUM_GOOD, 0, 0))  # warms up
        loads = {
            "good alone": (NUM_GOOD, 0, 0),
            "200 good": (NUM_GOOD + NUM_SLOW + NUM_VANISHING, 0, 0),
            "with slow and vanishing": (NUM_GOOD, NUM_SLOW, NUM_VANISHING),
        }
        gaps_ms: dict[str, list[float]] = {name: [] for name in loads}
        failed = dict.fromkeys(loads, 0)
        for _ in range(arguments.rounds):
            for name, load in loads.items():
                outcomes = asyncio.run(_load(server, *load))
                failed[name] += sum(o.error is not None or o.output_tokens != MAX_TOKENS for o in outcomes)
                for outcome in outcomes[:NUM_GOOD]:
                    # The mean over an answer: chunks that arrive together would tell zero and twice the time in turn.
                    times = outcome.event_times_s
                    gaps_ms[name].append((times[-1] - times[0]) * 1000 / (MAX_TOKENS - 1))
                server.wait_idle()
        metrics = server.wait_idle()
    figures = {name: quantiles(values) for name, values in gaps_ms.items()}
    mean = {name: found["mean"] for name, found in figures.items() if found}
    result: dict[str, Any] = {
        "command": f"python benchmarks/serving_streams.py --rounds {arguments.rounds}",
        "clients": {"good": NUM_GOOD, "slow": NUM_SLOW, "vanishing": NUM_VANISHING},
        "inter_token_ms": figures,
        "with_over_alone": mean["with slow and vanishing"] / mean["good alone"] - 1,
        "with_over_200_good": mean["with slow and vanishing"] / mean["200 good"] - 1,
        "failed_good_requests": failed,
        "kv_usage_afterwards": metrics["moestro:kv_cache_usage_perc"],
    }
    write_result("serving_streams", result)
    print(json.dumps(result, indent=1))


def _body(number: int) -> dict[str, Any]:
    return {
        "prompt": f"client {number}",
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def _load(server: ServerProcess, num_good: int, num_slow: int, num_vanishing: int) -> list[Outcome]:
    """Outcomes of the well-behaved clients."""
    chance = random.Random(1)
    target = Server(server.url, timeout_s=300)
    slow = [asyncio.create_task(_read_slowly(server, i)) for i in range(num_slow)]
    vanishing = [
        asyncio.create_task(target.stream("/completions", _body(i), Outcome(i), abandon_after=chance.randint(1, 100)))
        for i in range(num_vanishing)
    ]
    good = [target.stream("/completions", _body(i), Outcome(i)) for i in range(num_good)]
    outcomes = await asyncio.gather(*good)
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, *vanishing, return_exceptions=True)
    return list(outcomes)


async def _read_slowly(server: ServerProcess, number: int) -> None:
    """Take 200 bytes a second through the smallest buffer there is."""
    parts = urlsplit(server.url)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    connection.setblocking(False)
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_connect(connection, (parts.hostname, parts.port))
        body = json.dumps(_body(number)).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        await loop.sock_sendall(connection, f"{head}\r\n\r\n".encode() + body)
        while await loop.sock_recv(connection, 100):
            await asyncio.sleep(0.5)
    finally:
        connection.close()


if __name__ == "__main__":
    main()
