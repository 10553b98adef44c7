"""What the Triton kernels share: where they can run, and how they are launched.

Programmatic dependent launch (PDL): a kernel's blocks may start while the kernel before it still runs. Every kernel
here takes `PDL: tl.constexpr`, reads nothing but constants (weights, page tables, lengths) before `gdc_wait()`, and in
every block either waits or exits without having touched what an earlier kernel wrote.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from moestro import settings
from moestro.kernels.facts import Facts

FORMATS = ("bfloat16", "float16", "float32")

# Triton's interpreter runs kernels on the CPU, to check their logic. It cannot multiply 16-bit numbers.
INTERPRETED = settings.triton_interpreter()


def supports_plain(facts: Facts) -> tuple[bool, str]:
    """`supports` of a Triton op for plain weights or pages (format "" for neither) in the activations' dtype."""
    if facts.device != "cuda":
        return False, f"runs on NVIDIA GPUs, not on {facts.device}"
    name = str(facts.dtype).removeprefix("torch.")
    if name not in FORMATS:
        return False, f"takes activations of {', '.join(FORMATS)}, not {name}"
    if facts.format not in ("", name):
        return False, f"has no code for the format {facts.format!r} beside activations of {name}"
    return True, "Triton"


# Off: attend's fused kernel gave other results with dependent launch than without (test_attend, on an H200).
USE_PDL = False


@functools.cache
def _has_pdl(device_index: int) -> bool:
    return USE_PDL and torch.cuda.get_device_capability(device_index) >= (9, 0)


def pdl(tensor: torch.Tensor) -> dict[str, Any]:
    """Keyword arguments of a launch on the tensor's device: PDL, and launch_pdl where it is set."""
    if tensor.is_cuda and _has_pdl(tensor.device.index or 0):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@functools.cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of a device; 8 stands for the interpreter's CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
