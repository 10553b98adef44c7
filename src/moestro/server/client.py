"""The server's side of the engine process: starts it, talks to it, notices its death and starts it again."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import shutil
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import zmq
import zmq.asyncio

from moestro.engine import messages as m
from moestro.engine.config import EngineConfig
from moestro.engine.request import Delta, Request
from moestro.engine.stats import EngineStats, ModelInfo
from moestro.engine.worker import MakeLoop, build_loop, run_worker
from moestro.errors import EngineDeadError, MoestroError, RequestError
from moestro.logs import logger
from moestro.server.config import ServerConfig
from moestro.settings import log_level

RESTART_WINDOW_S = 600.0
_MAX_IPC_PATH = 90  # a Unix socket's path has 107 bytes

NO_STATS = EngineStats(0, 0, 0, 0, 0.0, 0.0)

State = Literal["starting", "ready", "dead", "stopped"]


class EngineClient:
    """One engine process and the requests that are open in it.

    state: "starting" until the model is loaded, "ready", "dead" when it has stopped too often, "stopped" after stop().
    num_restarts: since the server started. stats: the latest from the engine.
    """

    def __init__(
        self, config: EngineConfig, make_loop: MakeLoop = build_loop, server: ServerConfig | None = None
    ) -> None:
        """server: its log format and limit of restarts hold here."""
        server = server or ServerConfig()
        self._config = config
        self._log_format = server.log_format
        self._max_restarts = server.max_engine_restarts
        self._make_loop = make_loop
        self._open: dict[str, Stream] = {}
        self._stats_waiters: list[asyncio.Future[EngineStats]] = []
        self._loads_waiters: list[asyncio.Future[dict[str, Any]]] = []
        self._restarts: deque[float] = deque()
        self._process: BaseProcess | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._folder: Path | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._info: ModelInfo | None = None
        self._failure: str | None = None
        self.state: State = "starting"
        self.stats = NO_STATS
        self.generation = 0
        self.last_heard_s = time.monotonic()

    @property
    def info(self) -> ModelInfo:
        assert self._info is not None, "start() has not returned"
        return self._info

    @property
    def ready(self) -> bool:
        return self.state == "ready"

    @property
    def silent_s(self) -> float:
        """Seconds since the engine's last sign of life; it gives one twice a second, and at least after each step."""
        return time.monotonic() - self.last_heard_s

    @property
    def num_open(self) -> int:
        """Completions that the engine has not finished."""
        return sum(len(stream._to_come) for stream in self._open.values())

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self) -> ModelInfo:
        """Start the process and wait for the model. Raises MoestroError with the engine's sentence when it cannot."""
        await self._launch()
        self._supervisor = asyncio.create_task(self._supervise())
        return self.info

    async def stop(self, at_once: bool = False) -> None:
        """End the process, at_once without a chance to finish; open requests end with EngineDeadError."""
        was_ready, self.state = self.ready, "stopped"
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
        self._end_all("the server is stopping")
        self._send(m.Shutdown())
        await self._clean_up(
            patience_s=5.0 if was_ready and not at_once else 0.0
        )  # while loading, it would not hear us

    async def submit(self, request: Request) -> Stream:
        """Hand a request to the engine and wait until it takes it.

        Raises RequestError when the engine refuses it, EngineDeadError when there is no engine to take it.
        """
        if self.state != "ready":
            raise EngineDeadError(f"the engine is {self.state}")
        try:
            data = m.encode(m.Add(request))
        except (OverflowError, UnicodeEncodeError, RecursionError):
            raise RequestError(
                "the request has a number beyond 64 bits, text that is not Unicode, or is nested too deeply"
            ) from None
        stream = Stream(self, request)
        self._open[request.request_id] = stream
        self._send_bytes(data)
        try:
            await stream._accepted
        except BaseException:
            stream.abort()
            raise
        return stream

    async def generate(self, request: Request) -> AsyncIterator[Delta]:
        """The deltas of a request, which is aborted when the iteration is given up."""
        stream = await self.submit(request)
        try:
            async for delta in stream:
                yield delta
        finally:
            stream.abort()

    def abort(self, request_id: str) -> None:
        """End a request; its stream gets a last delta with reason "abort". Nothing happens for unknown ids."""
        if (stream := self._open.get(request_id)) is not None:
            stream.abort()

    async def fresh_stats(self, timeout_s: float = 1.0) -> EngineStats:
        """Stats of this moment, or the latest known when the engine is too busy to answer in time."""
        if self.state == "ready":
            future: asyncio.Future[EngineStats] = asyncio.get_running_loop().create_future()
            self._stats_waiters.append(future)
            self._send(m.AskStats())
            with contextlib.suppress(TimeoutError, EngineDeadError):
                return await asyncio.wait_for(future, timeout_s)
        return self.stats

    async def loads(self, timeout_s: float = 30.0) -> dict[str, Any]:
        """Tokens by layer and expert. Raises EngineDeadError when the engine does not answer."""
        if self.state != "ready":
            raise EngineDeadError(f"the engine is {self.state}")
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._loads_waiters.append(future)
        self._send(m.AskLoads())
        try:
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise EngineDeadError(f"the engine gives no answer in {timeout_s:.0f} s") from None

    async def _launch(self) -> None:
        self.state = "starting"
        self._failure = None
        base = None if len(tempfile.gettempdir()) < _MAX_IPC_PATH - 30 else "/tmp"
        self._folder = Path(tempfile.mkdtemp(prefix="moestro-", dir=base))  # mkdtemp makes it for this user only
        address = f"ipc://{self._folder}/engine"
        self._socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address)
        # A fresh interpreter: forking a process that has threads and event loops is not safe.
        spawn = multiprocessing.get_context("spawn")
        arguments = (address, self._config, self._make_loop, log_level(), self._log_format)
        self._process = spawn.Process(target=run_worker, args=arguments, name="moestro-engine", daemon=True)
        self._process.start()
        await self._receive(until_ready=True)
        if not self.ready:
            reason = self._failure or f"the engine process ended with exit code {self._process.exitcode} while loading"
            self.state = "dead"
            await self._clean_up(patience_s=5.0)
            raise MoestroError(reason)

    async def _supervise(self) -> None:
        """Pass on what the engine says; when it dies, end what was open and start it again."""
        while True:
            await self._receive()
            exit_code = self._process.exitcode if self._process else None
            self.state = "starting"
            reason = self._failure or f"the engine process has stopped (exit code {exit_code})"
            logger.error("%s; %d open completions end with an error", reason, self.num_open)
            self._end_all("the engine has stopped; try again in a moment")
            await self._clean_up(patience_s=1.0)
            if not self._may_restart():
                self.state = "dead"
                logger.error(
                    "the engine stopped %d times in %.0f minutes; giving up",
                    self._max_restarts + 1,
                    RESTART_WINDOW_S / 60,
                )
                return
            self.generation += 1
            try:
                await self._launch()
            except MoestroError as error:
                logger.error("the engine does not start again: %s", error)
                return
            logger.warning("the engine runs again")

    def _may_restart(self) -> bool:
        now = time.monotonic()
        while self._restarts and now - self._restarts[0] > RESTART_WINDOW_S:
            self._restarts.popleft()
        if len(self._restarts) >= self._max_restarts:
            return False
        self._restarts.append(now)
        return True

    async def _receive(self, until_ready: bool = False) -> None:
        """Handle the engine's messages until it is ready (if asked) or its process has ended."""
        assert self._process is not None
        assert self._socket is not None
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        sentinel = self._process.sentinel
        loop.add_reader(sentinel, ended.set)
        has_ended = asyncio.ensure_future(ended.wait())
        try:
            while True:
                receiving = asyncio.ensure_future(self._socket.recv())
                await asyncio.wait({receiving, has_ended}, return_when=asyncio.FIRST_COMPLETED)
                if not receiving.done():  # the process has ended; its last words may still be under way
                    await asyncio.wait({receiving}, timeout=0.2)
                if not receiving.done():
                    receiving.cancel()
                    return
                self._handle(m.decode_from_engine(receiving.result()))
                if until_ready and self.ready:
                    return
        finally:
            loop.remove_reader(sentinel)
            has_ended.cancel()

    def _handle(self, message: m.FromEngine) -> None:
        self.last_heard_s = time.monotonic()
        if isinstance(message, m.Deltas):
            for delta in message.deltas:
                if (stream := self._open.get(delta.request_id)) is not None:
                    stream._put(delta)
        elif isinstance(message, m.Accepted):
            if (stream := self._open.get(message.request_id)) is not None:
                stream._accept()
        elif isinstance(message, m.Refused):
            if (stream := self._open.pop(message.request_id, None)) is not None:
                stream._end(RequestError(message.message, message.field))
        elif isinstance(message, m.Stats):
            self.stats = message.stats
            _answer(self._stats_waiters, message.stats)
        elif isinstance(message, m.Loads):
            _answer(self._loads_waiters, message.loads)
        elif isinstance(message, m.Ready):
            self._info, self.state = message.info, "ready"
        elif isinstance(message, m.Failed):
            self._failure = message.message

    def _send(self, message: m.ToEngine) -> None:
        self._send_bytes(m.encode(message))

    def _send_bytes(self, data: bytes) -> None:
        if self._socket is not None and self._process is not None and self._process.is_alive():
            with contextlib.suppress(zmq.Again):  # the engine has gone between the check and here
                self._socket.send(data, zmq.NOBLOCK)

    def _end_all(self, reason: str) -> None:
        error = EngineDeadError(reason)
        streams, self._open = list(self._open.values()), {}
        for stream in streams:
            stream._end(error)
        for waiters in (self._stats_waiters, self._loads_waiters):
            for future in waiters:
                if not future.done():
                    future.set_exception(error)
            waiters.clear()

    async def _clean_up(self, patience_s: float) -> None:
        if self._process is not None:
            await asyncio.to_thread(self._process.join, patience_s)
            if self._process.is_alive():
                self._process.kill()
                await asyncio.to_thread(self._process.join)
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _answer(waiters: list[asyncio.Future[Any]], value: object) -> None:
    for future in waiters:
        if not future.done():
            future.set_result(value)
    waiters.clear()


class Stream:
    """The deltas of one open request. Ends by itself after the last one; abort() ends it before.

    Iteration raises EngineDeadError when the engine stops meanwhile.
    """

    def __init__(self, client: EngineClient, request: Request) -> None:
        self._client = client
        self._request = request
        self._queue: asyncio.Queue[Delta | MoestroError] = asyncio.Queue()
        self._to_come = set(range(request.params.n))  # completions whose end the engine has not told yet
        self._ended = False  # for the reader
        self._accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def abort(self) -> None:
        """Tell the engine to stop. A request that has ended already sends no useless abort."""
        if self._client._open.pop(self._request.request_id, None) is None:
            return
        self._client._send(m.Abort(self._request.request_id))
        for index in sorted(self._to_come):
            self._queue.put_nowait(Delta(self._request.request_id, index, finish_reason="abort"))
        self._to_come.clear()
        self._accept()

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Delta:
        if self._ended or (not self._to_come and self._queue.empty()):
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, MoestroError):
            self._ended = True
            raise item
        return item

    def _accept(self) -> None:
        if not self._accepted.done():
            self._accepted.set_result(None)

    def _put(self, delta: Delta) -> None:
        self._queue.put_nowait(delta)
        if delta.finish_reason is not None:
            self._to_come.discard(delta.index)
            if not self._to_come:
                self._client._open.pop(self._request.request_id, None)

    def _end(self, error: MoestroError) -> None:
        self._queue.put_nowait(error)
        if not self._accepted.done():
            self._accepted.set_exception(error)
