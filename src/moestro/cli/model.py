"""The MODEL argument, and the model in this process with its loading shown."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from moestro.engine.config import EngineConfig

if TYPE_CHECKING:
    from moestro.engine.llm import LLM

Model = Annotated[
    str,
    typer.Argument(
        help="A folder with config.json and safetensors files, a hub id, 'demo' or 'demo-dense'.", show_default=True
    ),
]


def load(engine: EngineConfig) -> LLM:
    """The model with its options, progress on a terminal's stderr meanwhile."""
    from dataclasses import asdict

    from moestro.engine.llm import LLM

    with_bar = sys.stderr.isatty()
    try:
        return LLM(progress=_show if with_bar else None, **asdict(engine))
    finally:
        if with_bar:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()


def _show(what: str, done: int, total: int) -> None:
    share = f" {100 * done // total} %" if total else ""
    sys.stderr.write(f"\r\033[K{what}{share}")
    sys.stderr.flush()
