"""routed_mlp in plain PyTorch: sort, the experts, and back."""

from __future__ import annotations

import torch

from moestro.kernels.ops.experts import ExpertWeights
from moestro.kernels.ops.experts.reference import experts_mlp
from moestro.kernels.ops.routed_mlp import check
from moestro.kernels.ops.sort_by_expert.reference import sort_by_expert
from moestro.kernels.summands import Summands
from moestro.spec.fields import Activation


def routed_mlp(
    x_TD: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    experts: ExpertWeights,
    activation: Activation,
    limit: float | None,
) -> Summands:
    check(x_TD, ids_TK, weights_TK, experts, activation, limit)
    (T, K), D = ids_TK.shape, x_TD.shape[1]
    offsets_E1, order_R = sort_by_expert(ids_TK, experts.num_experts)
    y_RD = experts_mlp(x_TD[order_R.long() // K], offsets_E1, experts, activation, limit)
    pairs_PD = torch.zeros(T * K, D, dtype=x_TD.dtype, device=x_TD.device)
    pairs_PD[order_R.long()] = y_RD
    return Summands(pairs_PD.view(T, K, D).transpose(0, 1), weights_TK)
