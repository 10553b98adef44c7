"""What all Numba kernels share: the compile cache, number-format tags, checks of arguments.

Kernels take addresses (`tensor.data_ptr()`) and sizes as ints: a NumPy view costs 0.8 us a tensor, an address 0.1 us
(2-core Zen 4), and a decode step passes about a thousand. Shapes, dtypes and layout are checked before, in Python.

A number format is told to a kernel by its tag, an unused argument of a type of its own, so that each format gets
machine code of its own.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
import numba.extending
import numpy as np
import torch
from llvmlite import binding

from moestro import settings
from moestro.errors import KernelError
from moestro.kernels.facts import Facts
from moestro.logs import log_once

F = TypeVar("F", bound=Callable[..., Any])

TAGS: dict[torch.dtype, Any] = {
    torch.float32: np.float32(0),
    torch.bfloat16: np.uint16(0),
    torch.float16: np.int16(0),
}
FORMATS = ("float32", "bfloat16", "float16")

# NUMBA_CPU_NAME asks for code of another machine than this one; then take the narrow registers, which any has.
_FEATURES: dict[str, bool] = {} if numba.config.CPU_NAME else dict(binding.get_host_cpu_features())
VECTOR_WIDTH = 16 if _FEATURES.get("avx512f") else 4 if _FEATURES.get("neon") else 8
WIDE_REGISTERS = bool(_FEATURES.get("avx512f") or _FEATURES.get("neon"))

# Sums may be reordered and fused; infinities and NaN keep their meaning.
_FAST_MATH = {"reassoc", "contract", "nsz", "arcp"}


def _cache_folder() -> Path:
    """Folder of compiled kernels, named by what they are made from.

    Numba sees when a kernel's own file changes, not when a function does that it calls in another file.
    """
    digest = hashlib.sha256(f"{numba.__version__} {VECTOR_WIDTH}".encode())
    here = Path(__file__).parent
    for path in [*sorted(here.glob("*.py")), *sorted(here.glob("ops/*/numba.py"))]:
        digest.update(path.read_bytes())
    return settings.cache_dir() / "numba" / digest.hexdigest()[:16]


def _keep_compiled() -> bool:
    """Point Numba's cache at our folder; False, said once, where it cannot be written."""
    folder = _cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = error.strerror or str(error)
    else:
        problem = "" if os.access(folder, os.W_OK) else "not writable"
    if problem:
        log_once(f"compiled kernels are not kept, each start compiles them again: {folder}: {problem}", logging.WARNING)
        return False
    numba.config.CACHE_DIR = str(folder)
    return True


_KEEP = _keep_compiled()


def kernel(function: F) -> F:
    """Compile a function that Python calls."""
    compiled: F = numba.njit(cache=_KEEP, nogil=True, fastmath=_FAST_MATH, error_model="numpy")(function)
    return compiled


def device(function: F) -> F:
    """Compile a function that kernels call."""
    compiled: F = numba.njit(fastmath=_FAST_MATH, error_model="numpy")(function)
    return compiled


def exact_device(function: F) -> F:
    """Compile a function that kernels call, without reordering of sums, for formulas that depend on their order."""
    compiled: F = numba.njit(fastmath={"contract", "nsz"}, error_model="numpy")(function)
    return compiled


def intrinsic(function: Callable[..., Any]) -> Any:
    """Make a function that emits LLVM code callable from kernels, without its first argument."""
    return numba.extending.intrinsic(function)


def literal_intrinsic(function: Callable[..., Any]) -> Any:
    """The same, seeing the values of arguments that are constants in the caller."""
    return numba.extending.intrinsic(prefer_literal=True)(function)


def supports_formats(facts: Facts, formats: tuple[str, ...] = FORMATS) -> tuple[bool, str]:
    """`supports` of an op on float32 activations whose weights or pages have one of these formats ("" for neither)."""
    if facts.device != "cpu":
        return False, f"runs on the CPU, not on {facts.device}"
    if facts.dtype != torch.float32:
        return False, f"takes float32 activations, not {str(facts.dtype).removeprefix('torch.')}"
    if facts.format not in formats:
        return False, f"has no code for the format {facts.format!r}"
    return True, f"compiled for this CPU, {VECTOR_WIDTH} numbers a register"


def float32_input(op: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as a kernel may read it by address: float32, on the CPU, contiguous (copied when it is not)."""
    if tensor.dtype is not torch.float32 or tensor.is_cuda:
        raise KernelError(f"{op}: {name} is {tensor.dtype} on {tensor.device}; this kernel takes float32 on the CPU")
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def float32_address(tensor: torch.Tensor | None) -> tuple[int, torch.Tensor | None]:
    """Address of a small parameter as contiguous float32, 0 for None, and the tensor that must outlive the call."""
    if tensor is None:
        return 0, None
    if tensor.dtype is not torch.float32 or not tensor.is_contiguous():
        tensor = tensor.to(torch.float32).contiguous()
    return tensor.data_ptr(), tensor
