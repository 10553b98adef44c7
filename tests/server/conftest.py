"""The fixtures of the server's tests; `serving` has what they give."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from serving import Served, serve, write_fake_model

from moestro.engine.config import EngineConfig
from moestro.server.config import ServerConfig


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fake_model(tmp_path_factory.mktemp("fake-model"))


@pytest.fixture(scope="session")
def served(model_folder: Path) -> Iterator[Served]:
    engine = EngineConfig(model=str(model_folder), served_model_name="fake", max_num_seqs=4, max_queue=12)
    yield from serve(engine, ServerConfig(port=0, max_body_bytes=100_000))


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    with served.http() as client:
        yield client
