"""A served fake model: the real server and engine process, with a loop that needs no weights.

The server answers on a free port of 127.0.0.1 from a thread of its own, so that tests can be plain functions.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import fake_loop
import httpx

from moestro.engine.config import EngineConfig
from moestro.engine.worker import MakeLoop
from moestro.server.client import EngineClient
from moestro.server.config import ServerConfig
from moestro.server.launch import _bind, _Server
from moestro.server.service import Service


def write_fake_model(folder: Path) -> Path:
    fake_loop.make_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"eos_token": "</s>", "chat_template": fake_loop.TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@dataclass
class Served:
    """url: of the server. service: its inside, to look at."""

    url: str
    service: Service
    loop: asyncio.AbstractEventLoop

    def http(self, **options: object) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=20, trust_env=False, **options)  # type: ignore[arg-type]


def serve(
    engine_config: EngineConfig, config: ServerConfig, make_loop: MakeLoop = fake_loop.make_loop
) -> Iterator[Served]:
    ready, done, served = threading.Event(), threading.Event(), []

    async def run() -> None:
        client = EngineClient(engine_config, make_loop, config)
        await client.start()
        listener = _bind(config)
        service = Service(client, engine_config, config)
        server = _Server(service, listener, lambda line: None)
        served.append(Served(server._url, service, asyncio.get_running_loop()))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        ready.set()
        await asyncio.to_thread(done.wait)
        server.should_exit = True
        await serving
        await client.stop()
        service.close()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert ready.wait(120)
    yield served[0]
    done.set()
    thread.join(20)
    assert not thread.is_alive()
