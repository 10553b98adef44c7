"""From options to decisions: what the engine will really use, each with the reason, before anything large is
allocated."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from moestro import settings
from moestro.engine.config import EngineConfig, parse_bytes
from moestro.errors import CapacityError, SettingError
from moestro.kv.pool import page_bytes
from moestro.spec.fields import ModelSpec

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_AUTO_KV_SHARE = 0.3
_AUTO_MODEL_LEN = 8192


@dataclass(frozen=True)
class Decision:
    """One line of the report: the field, its value, and why it is that."""

    field: str
    value: object
    why: str


@dataclass(frozen=True)
class Resolved:
    """dtype: of weights and KV cache. activation_dtype: of everything between. num_pages: of the KV cache.

    decisions: for users to read.
    """

    dtype: torch.dtype
    activation_dtype: torch.dtype
    device: torch.device
    num_threads: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_pages: int
    decisions: tuple[Decision, ...]


def resolve(config: EngineConfig, spec: ModelSpec, *, num_params: int) -> Resolved:
    """Decide dtype, context length and KV cache size for this machine.

    num_params: of the model, which is not loaded yet. Raises SettingError or CapacityError with the numbers.
    """
    decisions: list[Decision] = []

    def decide(name: str, value: object, why: str) -> None:
        decisions.append(Decision(name, value, why))

    dtype = _dtype(config, spec)
    decide("dtype", str(dtype).removeprefix("torch."), "as asked" if config.dtype != "auto" else "the checkpoint's")
    decide("activation_dtype", "float32", "CPUs without 16-bit arithmetic are fastest and exact in float32")
    num_threads = config.num_threads or settings.num_threads()
    decide("num_threads", num_threads, "as asked" if config.num_threads else "the cores of this process")
    max_num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
    clamped = max_num_seqs < config.max_num_seqs
    decide("max_num_seqs", max_num_seqs, "max_num_batched_tokens, a token a sequence" if clamped else "as asked")

    bytes_a_page = page_bytes(spec, config.block_size, dtype)
    weight_bytes = num_params * dtype.itemsize
    free = available_memory() - weight_bytes
    if free <= 0:
        raise CapacityError(
            f"the weights need {_gib(weight_bytes)} in {str(dtype).removeprefix('torch.')}, "
            f"and {_gib(free + weight_bytes)} of memory are free"
        )
    wanted_len, why_len = _model_len(config, spec)
    if config.kv_memory is not None:
        kv_bytes, why_kv = parse_bytes("kv_memory", config.kv_memory), "as asked"
    else:
        useful = -(-wanted_len // config.block_size) * max_num_seqs * bytes_a_page
        kv_bytes, why_kv = int(_AUTO_KV_SHARE * free), f"{_AUTO_KV_SHARE:.0%} of the memory left beside the weights"
        if useful < kv_bytes:
            kv_bytes, why_kv = useful, f"{max_num_seqs} sequences of {wanted_len} tokens need no more"
    num_pages = kv_bytes // bytes_a_page
    max_model_len = wanted_len
    if num_pages * config.block_size < wanted_len:
        if config.max_model_len is not None or num_pages < 1:
            need = -(-wanted_len // config.block_size) * bytes_a_page
            raise CapacityError(
                f"a KV cache of {_gib(kv_bytes)} holds {max(0, num_pages) * config.block_size} tokens, fewer than one "
                f"sequence of max_model_len={wanted_len}, which needs {_gib(need)}; raise --kv-memory or lower "
                "--max-model-len"
            )
        max_model_len, why_len = num_pages * config.block_size, "all that the KV cache holds"
    if config.kv_memory is not None and kv_bytes > free:
        raise CapacityError(
            f"kv_memory={config.kv_memory} and {_gib(weight_bytes)} of weights do not fit in the "
            f"{_gib(free + weight_bytes)} of memory that are free"
        )
    decide("max_model_len", max_model_len, why_len)
    decide("kv_memory", _gib(num_pages * bytes_a_page), f"{why_kv}; {num_pages} pages of {config.block_size} tokens")
    return Resolved(
        dtype,
        torch.float32,
        torch.device("cpu"),
        num_threads,
        max_model_len,
        max_num_seqs,
        config.max_num_batched_tokens,
        num_pages,
        tuple(decisions),
    )


def available_memory() -> int:
    """Bytes of RAM that can be used without swapping, as the kernel estimates it."""
    try:
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _dtype(config: EngineConfig, spec: ModelSpec) -> torch.dtype:
    name = spec.dtype if config.dtype == "auto" else config.dtype
    if name is None:
        return torch.bfloat16  # published checkpoints that name no dtype hold bfloat16
    if name not in _DTYPES:
        raise SettingError(
            f"the checkpoint's dtype {name!r} is not one of {', '.join(_DTYPES)}; choose one with --dtype"
        )
    return _DTYPES[name]


def _model_len(config: EngineConfig, spec: ModelSpec) -> tuple[int, str]:
    if config.max_model_len is not None:
        if config.max_model_len > spec.max_position:
            raise SettingError(
                f"max_model_len={config.max_model_len} is more than the {spec.max_position} positions of the model"
            )
        return config.max_model_len, "as asked"
    if spec.max_position > _AUTO_MODEL_LEN:
        return _AUTO_MODEL_LEN, f"enough for most; the model could do {spec.max_position}: set --max-model-len"
    return spec.max_position, "the model's"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
