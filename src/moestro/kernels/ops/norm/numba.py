"""rms_norm, add_rms_norm_ and add_rms_norm_logits_ for the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from moestro.errors import KernelError
from moestro.kernels.checks import require_shape
from moestro.kernels.facts import Facts
from moestro.kernels.jit import device, float32_address, float32_input, kernel, supports_formats
from moestro.kernels.memory import fetch_add, load, new_counter, store
from moestro.kernels.ops.linear.numba import linear
from moestro.kernels.ops.norm import check
from moestro.kernels.pool import POOL, run, worker
from moestro.kernels.summands import Summands, total
from moestro.quant.formats import Weight

# Below this many values waking the threads costs more than they save.
SERIAL_VALUES = 32 * 1024


def supports(facts: Facts) -> tuple[bool, str]:
    return supports_formats(facts, ("",))


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    check("rms_norm", x_TD, weight_D)
    x_TD = float32_input("rms_norm", "x", x_TD)
    return _norm(x_TD, 0, 0.0, weight_D, eps)


def add_rms_norm_(
    residual_TD: torch.Tensor, x: torch.Tensor | Summands, scale: float, weight_D: torch.Tensor, eps: float
) -> torch.Tensor:
    require_shape("add_rms_norm_", "x", x, residual_TD.shape)
    check("add_rms_norm_", residual_TD, weight_D)
    x_TD = float32_input("add_rms_norm_", "x", total(x, torch.float32))
    if float32_input("add_rms_norm_", "residual", residual_TD) is not residual_TD:
        raise KernelError("add_rms_norm_: the residual is written in place and must be contiguous")
    return _norm(residual_TD, x_TD.data_ptr(), scale, weight_D, eps)


def add_rms_norm_logits_(
    residual_TD: torch.Tensor,
    x: torch.Tensor | Summands,
    scale: float,
    weight_D: torch.Tensor,
    eps: float,
    router: Weight,
    router_bias_E: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    normed_TD = add_rms_norm_(residual_TD, x, scale, weight_D, eps)
    return normed_TD, linear(normed_TD, router, router_bias_E)


def _norm(x_TD: torch.Tensor, added: int, scale: float, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    T, D = x_TD.shape
    y_TD = torch.empty(T, D)
    weight, _keep = float32_address(weight_D)
    pool = POOL.address if T * D > SERIAL_VALUES else 0
    _norm_rows(pool, x_TD.data_ptr(), added, float(scale), weight, y_TD.data_ptr(), T, D, float(eps))
    return y_TD


@kernel
def _norm_rows(pool: int, x: int, added: int, scale: float, weight: int, y: int, T: int, D: int, eps: float) -> None:
    run(pool, _rows((x, added, np.float32(scale), weight, y, T, D, np.float32(eps), new_counter())))


@worker
def _rows(arguments: Any) -> None:
    x, added, scale, weight, y, T, D, eps, shared = arguments
    f32 = np.float32(0)
    while True:
        t = fetch_add(shared, 1)
        if t >= T:
            break
        row, to = x + t * D * 4, y + t * D * 4
        if added:
            source = added + t * D * 4
            for d in range(D):
                store(f32, row, d, load(f32, row, d) + scale * load(f32, source, d))
        _norm_row(row, weight, to, D, eps)


@device
def _norm_row(row: int, weight: int, to: int, D: int, eps: np.float32) -> None:
    f32 = np.float32(0)
    total = np.float32(0)
    for d in range(D):
        value = load(f32, row, d)
        total += value * value
    factor = np.float32(1) / np.sqrt(total / np.float32(D) + eps)
    for d in range(D):
        store(f32, to, d, load(f32, row, d) * factor * load(f32, weight, d))
