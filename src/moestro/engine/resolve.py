"""From options to decisions: what the engine will really use, each with the reason, before anything large is
allocated."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch

from moestro import settings
from moestro.engine.config import EngineConfig, parse_bytes
from moestro.errors import CapacityError, SettingError
from moestro.kv.pool import page_bytes
from moestro.spec.fields import ModelSpec

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_AUTO_KV_SHARE = 0.3
_AUTO_MODEL_LEN = 8192
_CPU_LIMITS, _GPU_LIMITS = (64, 512), (256, 8192)  # sequences, tokens a step


@dataclass(frozen=True)
class Decision:
    """One line of the report: the field, its value, and why it is that."""

    field: str
    value: object
    why: str


@dataclass(frozen=True)
class Resolved:
    """dtype: of weights and KV cache. activation_dtype: of everything between. num_pages: of the KV cache; 0 until
    `with_kv_cache` has decided it.

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
    """Decide everything but the KV cache's size: device, dtype, limits.

    num_params: of the model, which is not loaded yet. Raises SettingError, or CapacityError when the weights do not
    fit, with the numbers.
    """
    decisions: list[Decision] = []

    def decide(name: str, value: object, why: str) -> None:
        decisions.append(Decision(name, value, why))

    device, why_device = _device(config)
    on_gpu = device.type == "cuda"
    decide("device", _device_name(device), why_device)
    dtype = _dtype(config, spec)
    decide("dtype", dtype_name(dtype), "as asked" if config.dtype != "auto" else "the checkpoint's")
    activation_dtype = dtype if on_gpu else torch.float32
    why_activations = "the weights'" if on_gpu else "CPUs without 16-bit arithmetic are fastest and exact in float32"
    decide("activation_dtype", dtype_name(activation_dtype), why_activations)
    num_threads = config.num_threads or settings.num_threads()
    decide("num_threads", num_threads, "as asked" if config.num_threads else "the cores of this process")
    limits = _GPU_LIMITS if on_gpu else _CPU_LIMITS
    max_tokens = config.max_num_batched_tokens or limits[1]
    asked = "as asked" if config.max_num_batched_tokens else f"the default on a {'GPU' if on_gpu else 'CPU'}"
    decide("max_num_batched_tokens", max_tokens, asked)
    wanted_seqs = config.max_num_seqs or limits[0]
    max_num_seqs = min(wanted_seqs, max_tokens)
    asked = "as asked" if config.max_num_seqs else f"the default on a {'GPU' if on_gpu else 'CPU'}"
    decide("max_num_seqs", max_num_seqs, "a token a sequence" if max_num_seqs < wanted_seqs else asked)
    weight_bytes = num_params * dtype.itemsize
    free = free_memory(device, config.gpu_memory_utilization)
    if free <= weight_bytes:
        where = f" ({config.gpu_memory_utilization:.0%} of {_device_name(device)})" if on_gpu else ""
        raise CapacityError(
            f"the weights need {_gib(weight_bytes)} in {dtype_name(dtype)}, and {_gib(free)} of memory{where} are free"
        )
    max_model_len, why_len = _model_len(config, spec)
    decide("max_model_len", max_model_len, why_len)
    return Resolved(
        dtype,
        activation_dtype,
        device,
        num_threads,
        max_model_len,
        max_num_seqs,
        max_tokens,
        0,
        tuple(decisions),
    )


def with_kv_cache(resolved: Resolved, config: EngineConfig, spec: ModelSpec, *, free: int) -> Resolved:
    """Decide the KV cache's size, and with it the longest context.

    free: bytes that are left beside weights and activations. Raises CapacityError with the numbers.
    """
    bytes_a_page = page_bytes(spec, config.block_size, resolved.dtype)
    wanted_len, on_gpu = resolved.max_model_len, resolved.device.type == "cuda"
    if config.kv_memory is not None:
        kv_bytes, why = parse_bytes("kv_memory", config.kv_memory), "as asked"
        if kv_bytes > free:
            raise CapacityError(
                f"kv_memory={config.kv_memory} does not fit beside the weights: {_gib(max(0, free))} of memory are left"
            )
    else:
        useful = -(-wanted_len // config.block_size) * resolved.max_num_seqs * bytes_a_page
        share = 1.0 if on_gpu else _AUTO_KV_SHARE
        kv_bytes = max(0, int(share * free))
        why = "what is left of the GPU's share" if on_gpu else f"{share:.0%} of the memory left beside the weights"
        if useful < kv_bytes:
            kv_bytes, why = useful, f"{resolved.max_num_seqs} sequences of {wanted_len} tokens need no more"
    num_pages = kv_bytes // bytes_a_page
    decisions, max_model_len = list(resolved.decisions), wanted_len
    if num_pages * config.block_size < wanted_len:
        if config.max_model_len is not None or num_pages < 1:
            need = -(-wanted_len // config.block_size) * bytes_a_page
            more = "--gpu-memory-utilization" if on_gpu and config.kv_memory is None else "--kv-memory"
            raise CapacityError(
                f"a KV cache of {_gib(kv_bytes)} holds {max(0, num_pages) * config.block_size} tokens, fewer than one "
                f"sequence of max_model_len={wanted_len}, which needs {_gib(need)}; raise {more} or lower "
                "--max-model-len"
            )
        max_model_len = num_pages * config.block_size
        decisions = [d for d in decisions if d.field != "max_model_len"]
        decisions.append(Decision("max_model_len", max_model_len, "all that the KV cache holds"))
    pages = f"{why}; {num_pages} pages of {config.block_size} tokens"
    decisions.append(Decision("kv_memory", _gib(num_pages * bytes_a_page), pages))
    return replace(resolved, num_pages=num_pages, max_model_len=max_model_len, decisions=tuple(decisions))


def free_memory(device: torch.device, share: float) -> int:
    """Bytes the engine may still take on a device. share: of a GPU's memory that it may hold in all."""
    if device.type != "cuda":
        return available_memory()
    free, total = torch.cuda.mem_get_info(device)
    return int(share * total) - (total - free)


def available_memory() -> int:
    """Bytes of RAM that can be used without swapping, as the kernel estimates it."""
    try:
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _device(config: EngineConfig) -> tuple[torch.device, str]:
    if config.device == "cpu":
        return torch.device("cpu"), "as asked"
    if torch.cuda.is_available():
        return torch.device(
            "cuda", torch.cuda.current_device()
        ), "as asked" if config.device == "cuda" else "it is there"
    if config.device == "cuda":
        raise SettingError("device='cuda': PyTorch finds no GPU here (`nvidia-smi` shows what the driver sees)")
    return torch.device("cpu"), "there is no GPU"


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


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
