"""experts_mlp in plain PyTorch: a loop over the experts that have rows."""

from __future__ import annotations

import torch

from moestro.kernels.ops.experts import ExpertWeights, bad_offsets, check
from moestro.kernels.ops.gated_mlp.reference import activate
from moestro.spec.fields import Activation


def experts_mlp(
    x_RD: torch.Tensor, offsets_E1: torch.Tensor, experts: ExpertWeights, activation: Activation, limit: float | None
) -> torch.Tensor:
    check(x_RD, offsets_E1, experts, activation, limit)
    offsets = offsets_E1.tolist()
    if offsets[0] != 0 or offsets[-1] != x_RD.shape[0] or offsets != sorted(offsets):
        raise bad_offsets(offsets, x_RD.shape[0])
    y_RD = torch.empty_like(x_RD)
    for e in range(experts.num_experts):
        start, end = offsets[e], offsets[e + 1]
        if start == end:
            continue
        gate_up_T2F = x_RD[start:end].float() @ experts.gate_up.expert(e).unpack(torch.float32).T
        if experts.gate_up_bias_E2F is not None:
            gate_up_T2F = gate_up_T2F + experts.gate_up_bias_E2F[e].float()
        rows_TD = activate(gate_up_T2F, activation, limit) @ experts.down.expert(e).unpack(torch.float32).T
        if experts.down_bias_ED is not None:
            rows_TD = rows_TD + experts.down_bias_ED[e].float()
        y_RD[start:end] = rows_TD.to(x_RD.dtype)
    return y_RD
