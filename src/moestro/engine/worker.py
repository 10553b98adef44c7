"""The engine process: takes messages, runs the engine loop, sends what it gives."""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import zmq

from moestro.engine import messages as m
from moestro.engine.config import EngineConfig
from moestro.engine.request import Delta, Request
from moestro.engine.stats import EngineStats, ModelInfo
from moestro.errors import CapacityError, MoestroError, RequestError
from moestro.logs import flush_logs, logger, setup_logging

STATS_INTERVAL_S = 0.5
PROGRESS_INTERVAL_S = 2.0
# A step that fails takes its requests with it and the engine goes on; that many in a row mean that it cannot.
MAX_FAILURES_IN_A_ROW = 3


class Loop(Protocol):
    """What the worker needs of an engine loop; `engine.loop.EngineLoop` has it."""

    @property
    def info(self) -> ModelInfo: ...
    @property
    def has_work(self) -> bool: ...
    def add(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def step(self) -> list[Delta]: ...
    def fail_step(self, message: str) -> list[Delta]: ...
    def stats(self) -> EngineStats: ...
    def expert_loads(self) -> dict[str, Any]: ...


MakeLoop = Callable[[EngineConfig], Loop]


def build_loop(config: EngineConfig) -> Loop:
    """The real engine loop; imported here so that only the engine process loads torch."""
    from moestro.engine.loop import EngineLoop

    return EngineLoop(config, _LoggedProgress())


class _LoggedProgress:
    """Says how loading goes in a log line every few seconds."""

    def __init__(self) -> None:
        self._what = ""
        self._due = 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if what != self._what or now >= self._due:
            self._what, self._due = what, now + PROGRESS_INTERVAL_S
            logger.info("%s%s", what, f" {100 * done // total} %" if total else "")


def run_worker(address: str, config: EngineConfig, make_loop: MakeLoop, log_level: str, log_format: str) -> None:
    """Main function of the engine process. address: the server's ZeroMQ endpoint. Ends with the server."""
    # Ctrl-C and a service manager's SIGTERM reach all processes of the group; the server decides when the engine ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(address,), daemon=True).start()
    setup_logging(log_level, log_format)
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.connect(address)
    try:
        _Worker(socket, make_loop(config)).run()
    except MoestroError as error:
        _fail(socket, context, str(error))
    except Exception as error:  # noqa: BLE001 - the process border: whatever it was, the server has to hear of it
        logger.log(logging.ERROR, "the engine process fails", exc_info=error)
        _fail(socket, context, f"{type(error).__name__}: {error}")
    socket.close()
    context.term()


def _fail(socket: zmq.Socket[bytes], context: zmq.Context[zmq.Socket[bytes]], message: str) -> None:
    socket.send(m.encode(m.Failed(message)))
    socket.close()
    context.term()
    flush_logs()  # a process that multiprocessing has started ends without the usual goodbyes
    raise SystemExit(1)


def _end_with_parent(address: str) -> None:
    """End this process with the server, in mid-step or while loading too, and clear up the socket's folder."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        shutil.rmtree(Path(address.removeprefix("ipc://")).parent, ignore_errors=True)
        os._exit(1)


class _Worker:
    def __init__(self, socket: zmq.Socket[bytes], loop: Loop) -> None:
        self._socket = socket
        self._loop = loop
        self._failures = 0
        self._stats_due = 0.0

    def run(self) -> None:
        self._send(m.Ready(self._loop.info))
        while self._drain():
            if self._loop.has_work:
                self._step()
            self._send_stats_when_due()

    def _drain(self) -> bool:
        """Handle the messages that are there, waiting for one when there is no work. False: shut down."""
        wait_ms = 0 if self._loop.has_work else int(STATS_INTERVAL_S * 1000)
        while self._socket.poll(wait_ms):
            message = m.decode_to_engine(self._socket.recv())
            if isinstance(message, m.Shutdown):
                return False
            self._handle(message)
            wait_ms = 0
        return True

    def _handle(self, message: m.ToEngine) -> None:
        if isinstance(message, m.Add):
            request_id = message.request.request_id
            try:
                self._loop.add(message.request)
            except RequestError as error:
                self._send(m.Refused(request_id, str(error), error.field))
            else:
                self._send(m.Accepted(request_id))
        elif isinstance(message, m.Abort):
            self._loop.abort(message.request_id)
        elif isinstance(message, m.AskStats):
            self._stats_due = 0.0
            self._send_stats_when_due()
        elif isinstance(message, m.AskLoads):
            self._send(m.Loads(self._loop.expert_loads()))

    def _step(self) -> None:
        try:
            deltas = self._loop.step()
            self._failures = 0
        except Exception as error:
            # Too large a step says nothing about the next one; other failures may mean that the engine is broken.
            self._failures += not _is_out_of_memory(error)
            if self._failures >= MAX_FAILURES_IN_A_ROW:
                raise
            logger.log(logging.ERROR, "an engine step fails; its requests end with an error", exc_info=error)
            deltas = self._loop.fail_step(_reason(error))
        if deltas:
            self._send(m.Deltas(deltas))

    def _send_stats_when_due(self) -> None:
        now = time.monotonic()
        if now >= self._stats_due:
            self._stats_due = now + STATS_INTERVAL_S
            self._send(m.Stats(self._loop.stats()))

    def _send(self, message: m.FromEngine) -> None:
        self._socket.send(m.encode(message))


def _is_out_of_memory(error: Exception) -> bool:
    # By name and text: torch is loaded in the engine alone, and its CPU allocator has no exception class of its own.
    texts = ("not enough memory", "can't allocate memory")
    return isinstance(error, MemoryError | CapacityError) or (
        isinstance(error, RuntimeError)
        and (type(error).__name__ == "OutOfMemoryError" or any(text in str(error) for text in texts))
    )


def _reason(error: Exception) -> str:
    """What clients are told; the message of an unknown error may name paths."""
    if isinstance(error, MoestroError):
        return str(error)
    if _is_out_of_memory(error):
        return "out of memory in this step; try a shorter prompt, or again with fewer requests at a time"
    return f"{type(error).__name__} in the engine"
