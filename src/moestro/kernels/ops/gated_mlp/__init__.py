"""gated_mlp: down(act(gate(x), up(x))), the MLP of dense layers and shared experts.

T tokens, D width, F intermediate width.
"""

from __future__ import annotations

from typing import Protocol

import torch

from moestro.errors import KernelError
from moestro.quant.formats import Weight
from moestro.spec.fields import Activation


class GatedMLP(Protocol):
    def __call__(
        self, x_TD: torch.Tensor, gate_up: Weight, down: Weight, activation: Activation, limit: float | None
    ) -> torch.Tensor:
        """Apply one gated MLP.

        x_TD: [T, D] floating point, T may be 0. gate_up: [2F, D], gate rows then up rows. down: [D, F].
        activation: "swiglu" silu(gate) * up; "swiglu_clamped" (gpt-oss): gate = min(gate, limit), up = clamp(up,
        -limit, limit),
        (up + 1) * gate * sigmoid(1.702 * gate). limit: the clamp, required by "swiglu_clamped".
        Returns [T, D] in x's dtype, computed in float32. Raises KernelError when shapes do not fit.
        """
        ...


def check(x_TD: torch.Tensor, gate_up: Weight, down: Weight, activation: Activation, limit: float | None) -> None:
    check_activation("gated_mlp", activation, limit)
    if len(gate_up.shape) != 2 or len(down.shape) != 2:
        raise KernelError(f"gated_mlp: weights of shape {gate_up.shape} and {down.shape}; expected [2F, D] and [D, F]")
    D, F = down.shape
    if gate_up.shape != (2 * F, D):
        raise KernelError(
            f"gated_mlp: gate_up has shape {list(gate_up.shape)}; expected {[2 * F, D]} beside down {[D, F]}"
        )
    if x_TD.dim() != 2 or x_TD.shape[1] != D:
        raise KernelError(f"gated_mlp: x has shape {list(x_TD.shape)}; expected [T, {D}]")


def check_activation(op: str, activation: Activation, limit: float | None) -> None:
    if activation not in ("swiglu", "swiglu_clamped"):
        raise KernelError(f"{op}: activation {activation!r} is not known; use 'swiglu' or 'swiglu_clamped'")
    if activation == "swiglu_clamped" and limit is None:
        raise KernelError(f"{op}: activation 'swiglu_clamped' needs a limit")
