"""Every environment variable that moestro reads, in one table; nothing else in the package reads os.environ."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moestro.errors import SettingError


@dataclass(frozen=True)
class Variable:
    """One environment variable: its name, how its text becomes a value, the default, and what it is for."""

    name: str
    parse: Callable[[str], Any]
    default: Any
    help: str


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


_TABLE = (
    Variable("MOESTRO_CACHE", Path, None, "folder for the demo model and compiled kernels (~/.cache/moestro)"),
    Variable("MOESTRO_LOG_LEVEL", str, "info", "debug, info, warning or error"),
    Variable("MOESTRO_NUM_THREADS", _positive_int, None, "CPU threads for kernels (all cores of this process)"),
    Variable("MOESTRO_KERNELS", str, None, "implementation to prefer in kernels/select: reference, numba, triton"),
    Variable("MOESTRO_DEMO_GGUF", Path, None, "a SmolLM2-135M-Instruct GGUF on disk, used in place of a download"),
    Variable("TRITON_INTERPRET", str, "0", "1 runs Triton's kernels on the CPU, to check them; Triton reads it too"),
    Variable("MOESTRO_API_KEY", str, None, "key that clients of `moestro serve` must send, as --api-key"),
    Variable("MOESTRO_API_KEY_FILE", str, None, "file with keys, one a line, as --api-key-file"),
)


def _read(name: str) -> Any:
    variable = next(v for v in _TABLE if v.name == name)
    text = os.environ.get(name, "")
    if not text:
        return variable.default
    try:
        return variable.parse(text)
    except ValueError:
        raise SettingError(f"environment variable {name}={text!r} is not valid: {variable.help}") from None


def variables() -> tuple[Variable, ...]:
    """The table itself, for the documentation."""
    return _TABLE


def cache_dir() -> Path:
    """Folder for everything moestro may make again: the demo model, compiled kernels."""
    path = _read("MOESTRO_CACHE")
    return path if path is not None else Path.home() / ".cache" / "moestro"


def log_level() -> str:
    level: str = _read("MOESTRO_LOG_LEVEL").lower()
    if level not in ("debug", "info", "warning", "error"):
        raise SettingError(f"environment variable MOESTRO_LOG_LEVEL={level!r}: use debug, info, warning or error")
    return level


def num_threads() -> int:
    """CPU threads that kernels may use: MOESTRO_NUM_THREADS, else the cores this process may run on."""
    return _read("MOESTRO_NUM_THREADS") or len(os.sched_getaffinity(0))


def preferred_kernels() -> str | None:
    value: str | None = _read("MOESTRO_KERNELS")
    return value


def triton_interpreter() -> bool:
    return bool(_read("TRITON_INTERPRET") == "1")


def demo_gguf() -> Path | None:
    value: Path | None = _read("MOESTRO_DEMO_GGUF")
    return value


def api_key() -> str | None:
    value: str | None = _read("MOESTRO_API_KEY")
    return value


def api_key_file() -> str | None:
    value: str | None = _read("MOESTRO_API_KEY_FILE")
    return value
