"""Start to end of the server process: port, engine, HTTP, draining."""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from moestro.engine.config import EngineConfig
from moestro.engine.worker import MakeLoop, build_loop
from moestro.errors import SettingError
from moestro.logs import logger
from moestro.server.app import create_app, curl_line
from moestro.server.client import EngineClient
from moestro.server.config import ServerConfig
from moestro.server.keys import ApiKeys
from moestro.server.service import Service

Announce = Callable[[str], None]


def run_server(
    engine_config: EngineConfig, config: ServerConfig, announce: Announce, make_loop: MakeLoop = build_loop
) -> int:
    """Serve until a signal ends it. Returns the exit code: 0 after draining, 130 when Ctrl-C was pressed twice.

    announce: gets the lines for the user once requests are taken. Raises MoestroError when the port is taken or the
    model cannot be loaded.
    """
    return asyncio.run(_serve(engine_config, config, announce, make_loop))


async def _serve(engine_config: EngineConfig, config: ServerConfig, announce: Announce, make_loop: MakeLoop) -> int:
    listener = _bind(config)  # before the model loads: a taken port is known at once
    ApiKeys.load(config.api_key, config.api_key_file)  # a file that cannot be read, likewise
    service: Service | None = None
    server: _Server | None = None
    client = EngineClient(engine_config, make_loop, config)
    try:
        if not await _start_unless_signalled(client):
            return 0
        service = Service(client, engine_config, config)
        if not service.keys and not _is_loopback(listener):
            logger.warning(
                "listening on %s without an API key: whoever reaches the port can use the model", config.host
            )
        server = _Server(service, listener, announce)
        await server.serve(sockets=[listener])
        return 130 if server.forced else 0
    finally:
        await client.stop(at_once=server is not None and server.forced)
        listener.close()
        if service is not None:
            service.close()


async def _start_unless_signalled(client: EngineClient) -> bool:
    """Load the model; a signal meanwhile ends it in good order, so that no process or folder is left behind."""
    loop = asyncio.get_running_loop()
    starting = asyncio.ensure_future(client.start())
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, starting.cancel)
    try:
        await starting
    except asyncio.CancelledError:
        return False
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    return True


def _bind(config: ServerConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise SettingError(
            f"cannot listen on {config.host}:{config.port}: {reason}; choose another --port or --host"
        ) from None
    return listener


def _is_loopback(listener: socket.socket) -> bool:
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


class _Server(uvicorn.Server):
    """uvicorn with draining: after a signal, open requests finish while new ones are told to go elsewhere."""

    def __init__(self, service: Service, listener: socket.socket, announce: Announce) -> None:
        super().__init__(
            uvicorn.Config(
                create_app(service), log_level="warning", access_log=False, timeout_graceful_shutdown=1, lifespan="off"
            )
        )
        self._service = service
        self._announce = announce
        host, port = listener.getsockname()[:2]
        shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
        self._url = f"http://{shown}:{port}"
        self._draining: asyncio.Task[None] | None = None
        self.forced = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._announce(f"{self._service.name} is served at {self._url}")
        self._announce(f"try: {curl_line(self._service, self._url)}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._draining is None:
            self._service.draining = True
            loop = asyncio.get_running_loop()
            self._draining = loop.create_task(self._drain())
        elif sig == signal.SIGINT:
            self.forced = self.should_exit = self.force_exit = True

    async def _drain(self) -> None:
        active = self._service.num_active
        logger.info("shutting down: %d open requests get up to %.0f s", active, self._service.config.drain_timeout_s)
        deadline = asyncio.get_running_loop().time() + self._service.config.drain_timeout_s
        while self._service.num_active and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        self.should_exit = True
