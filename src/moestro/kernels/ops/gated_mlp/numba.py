"""gated_mlp for the CPU: the experts' kernel with one expert that has all rows."""

from __future__ import annotations

import torch

from moestro.kernels.facts import Facts
from moestro.kernels.jit import float32_input, supports_formats
from moestro.kernels.ops.experts.numba import run_experts
from moestro.kernels.ops.gated_mlp import check
from moestro.quant.formats import Weight
from moestro.spec.fields import Activation


def supports(facts: Facts) -> tuple[bool, str]:
    return supports_formats(facts)


def gated_mlp(
    x_TD: torch.Tensor, gate_up: Weight, down: Weight, activation: Activation, limit: float | None
) -> torch.Tensor:
    check(x_TD, gate_up, down, activation, limit)
    x_TD = float32_input("gated_mlp", "x", x_TD)
    y_TD, _ = run_experts(x_TD, 0, 1, gate_up, down, 0, 0, activation, limit)
    return y_TD
