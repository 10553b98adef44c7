"""moestro: serve mixture-of-experts language models on the memory you have, and see what their experts do."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moestro.engine.config import EngineConfig
    from moestro.engine.llm import LLM
    from moestro.engine.request import GenerationResult, SamplingParams
    from moestro.errors import MoestroError
    from moestro.moe.placement import Placement

__version__ = "0.1.0"
__all__ = ["LLM", "EngineConfig", "GenerationResult", "MoestroError", "Placement", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "moestro.engine.llm",
    "EngineConfig": "moestro.engine.config",
    "GenerationResult": "moestro.engine.request",
    "SamplingParams": "moestro.engine.request",
    "MoestroError": "moestro.errors",
    "Placement": "moestro.moe.placement",
}


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that `moestro --help` does not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'moestro' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
