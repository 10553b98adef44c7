"""`moestro serve`"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

from moestro.cli.model import Model
from moestro.engine.config import EngineConfig
from moestro.server.config import ServerConfig


def serve(model: Model = "demo", *, engine: EngineConfig, server: ServerConfig) -> None:
    """Serve a model over HTTP with OpenAI's API."""
    from moestro.logs import setup_logging
    from moestro.server.launch import run_server
    from moestro.settings import api_key, api_key_file, log_level

    setup_logging(log_level(), server.log_format)
    server = replace(server, api_key=server.api_key or api_key(), api_key_file=server.api_key_file or api_key_file())
    code = run_server(engine, server, announce=_say)
    if code:
        raise SystemExit(code)


def _say(line: str) -> None:
    try:
        print(line, flush=True)
    except OSError:  # a full disk, or nobody at the other end, is no reason not to serve
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
