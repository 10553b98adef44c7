"""`moestro serve`"""

from __future__ import annotations

from dataclasses import replace

from moestro.cli.model import Model
from moestro.engine.config import EngineConfig
from moestro.server.config import ServerConfig


def serve(model: Model = "demo", *, engine: EngineConfig, server: ServerConfig) -> None:
    """Serve a model over HTTP with OpenAI's API."""
    from moestro.server.launch import run_server
    from moestro.settings import api_key

    if server.api_key is None:
        server = replace(server, api_key=api_key())
    code = run_server(engine, server, announce=lambda line: print(line, flush=True))
    if code:
        raise SystemExit(code)
