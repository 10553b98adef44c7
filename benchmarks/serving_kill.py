"""Kill the engine process at random moments, round after round, while streams are open.

    python benchmarks/serving_kill.py [--rounds 50]

Every request must end: with its whole answer, an error event, or a refusal. Afterwards no page is held, and no file
handle has been lost. The model is a random one of 0.3 M parameters, so that the time to recover is the engine's own:
a fresh process, torch, kernels, warm-up.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from moestro.bench.client import Outcome, Server
from moestro.bench.summary import quantiles
from served import ServerProcess, served, write_result, write_tiny

NUM_CLIENTS = 16
OPTIONS = ("--max-engine-restarts", "1000", "--max-model-len", "1024", "--num-threads", "1", "--kv-memory", "16MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    arguments = parser.parse_args()
    chance = random.Random(0)
    with (
        tempfile.TemporaryDirectory(prefix="tiny") as folder,
        served(str(write_tiny(Path(folder))), *OPTIONS, "--no-access-log") as server,
    ):
        expected = [asyncio.run(_ask(server, n)).text for n in range(NUM_CLIENTS)]
        files = server.open_files()
        ends: Counter[str] = Counter()
        recovery_s, slowest_end_s = [], 0.0
        for number in range(arguments.rounds):
            outcomes, back_s, last_s = asyncio.run(_round(server, chance.uniform(0.0, 1.0)))
            for outcome in outcomes:
                ends[_kind(outcome, expected[outcome.number])] += 1
            recovery_s.append(back_s)
            slowest_end_s = max(slowest_end_s, last_s)
            print(f"round {number + 1}: back after {back_s:.2f} s; {dict(ends)}", flush=True)
        metrics = server.wait_idle()
        time.sleep(1.0)
        result: dict[str, Any] = {
            "command": f"python benchmarks/serving_kill.py --rounds {arguments.rounds}",
            "rounds": arguments.rounds,
            "requests": sum(ends.values()),
            "ends": dict(ends),
            "seconds_from_kill_to_first_good_answer": quantiles(recovery_s),
            "slowest_end_after_kill_s": slowest_end_s,
            "kv_usage_afterwards": metrics["moestro:kv_cache_usage_perc"],
            "restarts_counted": metrics["moestro:engine_restarts_total"],
            "open_files_before_and_after": [files, server.open_files()],
        }
    write_result("serving_kill", result)
    print(result)


async def _ask(server: ServerProcess, number: int) -> Outcome:
    body = {"prompt": f"client {number}", "max_tokens": 150 + 30 * number, "temperature": 0, "stream": True}
    body["ignore_eos"] = True
    return await Server(server.url, timeout_s=60).stream("/completions", body, Outcome(number))


async def _round(server: ServerProcess, delay_s: float) -> tuple[list[Outcome], float, float]:
    """(outcomes, seconds from the kill to a good answer, seconds from the kill to the last open request's end)"""
    tasks = [asyncio.create_task(_ask(server, number)) for number in range(NUM_CLIENTS)]
    await asyncio.sleep(delay_s)
    pid = server.engine_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    killed_s = time.monotonic()
    outcomes = await asyncio.gather(*tasks)
    ended_s = max(o.ended_at_s for o in outcomes) - killed_s
    while True:
        outcome = await _ask(server, 0)
        if outcome.error is None:
            return outcomes, outcome.event_times_s[0] - killed_s, ended_s
        assert time.monotonic() - killed_s < 120, outcome
        await asyncio.sleep(0.05)


def _kind(outcome: Outcome, expected: str) -> str:
    if outcome.error is None:
        return "whole and right" if outcome.text == expected else "WRONG"
    if outcome.error in ("error event", "http 503"):
        return outcome.error if expected.startswith(outcome.text) else "WRONG"
    return f"LOST: {outcome.error} {outcome.detail}"


if __name__ == "__main__":
    main()
