"""How late the client itself is: the same client, against a responder on this machine that stamps every event with the
time it was sent."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import multiprocessing.connection
import time
from typing import Any

from moestro.bench.client import Outcome, Server
from moestro.bench.summary import quantiles

NUM_EVENTS = 100
EVENT_GAP_S = 0.02


async def client_overhead(concurrency: int) -> dict[str, Any]:
    """Delay from the responder's write to the client's note of it, in ms, with so many streams open at once.

    It includes the loopback and the responder's own lag: the client's share is at most this.
    """
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_respond, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        port = await asyncio.to_thread(_port, ours)
        server = Server(f"http://127.0.0.1:{port}", timeout_s=60)
        await server.stream("/completions", {}, Outcome(0))  # connection code is warm
        outcomes = await asyncio.gather(*(server.stream("/completions", {}, Outcome(i)) for i in range(concurrency)))
    finally:
        ours.close()
        process.kill()
        await asyncio.to_thread(process.join)
    delays_ms = [
        (received - float(sent)) * 1000
        for outcome in outcomes
        for received, sent in zip(outcome.event_times_s, outcome.text.split(), strict=False)
    ]
    return {"concurrency": concurrency, "events": len(delays_ms), "delay_ms": quantiles(delays_ms)}


def _port(pipe: multiprocessing.connection.Connection) -> int:
    return int(pipe.recv())


def _respond(pipe: multiprocessing.connection.Connection) -> None:
    """Main function of the responder's process; ends with the pipe."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        for _ in range(NUM_EVENTS):
            await asyncio.sleep(EVENT_GAP_S)
            chunk = {"choices": [{"text": f"{time.monotonic():.7f} ", "finish_reason": None}]}
            writer.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            await writer.drain()
        writer.write(b"data: [DONE]\n\n")
        await writer.drain()
        writer.close()

    async def serve() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=1024)
        pipe.send(server.sockets[0].getsockname()[1])
        await asyncio.to_thread(_wait_for_end, pipe)

    asyncio.run(serve())


def _wait_for_end(pipe: multiprocessing.connection.Connection) -> None:
    try:
        pipe.recv()
    except (EOFError, OSError):
        return
