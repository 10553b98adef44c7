"""The engine's options: one frozen dataclass, the source of `LLM`'s keywords, of the command line's flags and of their
documentation."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import Any

from moestro.errors import SettingError

_UNITS = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30}


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Options as the user gave them. None and "auto" are decided by `engine.resolve`, which says what it chose and why.

    Raises SettingError for a value that cannot work.
    """

    model: str = _option("demo", "folder with config.json and safetensors, a hub id, 'demo' or 'demo-dense'")
    tokenizer: str | None = _option(None, "folder with tokenizer files, when they are not in the model's folder")
    served_model_name: str | None = _option(None, "name of the model in the API; the default is MODEL as given")
    dtype: str = _option("auto", "auto (the checkpoint's), float32, bfloat16 or float16")
    load_format: str = _option("auto", "auto, or dummy for random weights: only config.json is read")
    device: str = _option("auto", "auto (a GPU where there is one), cpu or cuda")
    max_model_len: int | None = _option(None, "longest prompt and answer together, in tokens")
    max_num_seqs: int | None = _option(None, "most sequences computed at the same time (64 on a CPU, 256 on a GPU)")
    max_num_batched_tokens: int | None = _option(
        None, "most tokens a step, longer prompts are computed in chunks of at most this (512 on a CPU, 8192 on a GPU)"
    )
    block_size: int = _option(16, "tokens a page of the KV cache")
    kv_memory: str | None = _option(None, "memory for the KV cache, such as 2GiB")
    gpu_memory_utilization: float = _option(0.9, "share of the GPU's memory that the engine may use")
    enforce_eager: bool = _option(False, "do not capture CUDA graphs: slower decoding, less memory")
    enable_prefix_caching: bool = _option(True, "reuse the KV cache of common prompt beginnings")
    max_queue: int = _option(1024, "most requests waiting; more are refused")
    seed: int | None = _option(None, "seed for requests that bring none; without it they differ from run to run")
    num_threads: int | None = _option(None, "CPU threads for the kernels")
    kernels: str | None = _option(None, "implementation to use where it exists: reference, numba or triton")
    placement: str | None = _option(None, "file that says which expert lies in which physical slot")

    def __post_init__(self) -> None:
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "block_size",
            "max_queue",
            "max_model_len",
            "num_threads",
        ):
            value = getattr(self, name)
            if value is None and name not in ("block_size", "max_queue"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SettingError(f"{name}={value!r} must be a whole number of at least 1")
        _one_of("dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        _one_of("load_format", self.load_format, ("auto", "dummy"))
        _one_of("device", self.device, ("auto", "cpu", "cuda"))
        if self.kernels is not None:
            _one_of("kernels", self.kernels, ("reference", "numba", "triton"))
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise SettingError(f"gpu_memory_utilization={share!r} must be more than 0 and at most 1")
        if self.kv_memory is not None:
            parse_bytes("kv_memory", self.kv_memory)
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            raise SettingError(f"seed={self.seed!r} must be a whole number")

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        """Build from keywords; a name that does not exist is refused with those that do."""
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                raise SettingError(f"there is no option {name!r}; options are {', '.join(known)}")
        return cls(**options)


def parse_bytes(name: str, text: str | int) -> int:
    """Bytes of "2GiB", "500MB", "1.5G" or a plain number."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(text))
    if match is None or match[2].lower() not in _UNITS:
        raise SettingError(f"{name}={text!r} is not a size; write it like 2GiB, 500MB or a number of bytes")
    value = int(float(match[1]) * _UNITS[match[2].lower()])
    if value < 1:
        raise SettingError(f"{name}={text!r} must be more than nothing")
    return value


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise SettingError(f"{name}={value!r} must be one of {', '.join(allowed)}")
