"""gated_mlp in plain PyTorch, and the activations that the experts share with it."""

from __future__ import annotations

import torch

from moestro.kernels.ops.gated_mlp import check
from moestro.quant.formats import Weight
from moestro.spec.fields import Activation


def activate(gate_up_T2F: torch.Tensor, activation: Activation, limit: float | None) -> torch.Tensor:
    """The gated activation of a stacked projection [T, 2F] (gate then up), as [T, F]."""
    gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
    if activation == "swiglu":
        return torch.nn.functional.silu(gate_TF) * up_TF
    assert limit is not None, "checked at the entry"
    gate_TF, up_TF = gate_TF.clamp(max=limit), up_TF.clamp(-limit, limit)
    return (up_TF + 1) * gate_TF * torch.sigmoid(1.702 * gate_TF)


def gated_mlp(
    x_TD: torch.Tensor, gate_up: Weight, down: Weight, activation: Activation, limit: float | None
) -> torch.Tensor:
    check(x_TD, gate_up, down, activation, limit)
    gate_up_T2F = x_TD.float() @ gate_up.unpack(torch.float32).T
    y_TD = activate(gate_up_T2F, activation, limit) @ down.unpack(torch.float32).T
    return y_TD.to(x_TD.dtype)
