"""gated_mlp for NVIDIA GPUs: the kernels of the routed experts with one expert that every token chooses.

T tokens, D width, F intermediate width.
"""

from __future__ import annotations

import torch

from moestro.kernels.facts import Facts
from moestro.kernels.gpu import supports_plain
from moestro.kernels.ops.experts import ExpertWeights
from moestro.kernels.ops.gated_mlp import check
from moestro.kernels.ops.gated_mlp.reference import activate
from moestro.kernels.ops.linear.triton import LIBRARY_TOKENS, linear
from moestro.kernels.ops.routed_mlp.triton import routed_mlp
from moestro.quant.formats import Weight
from moestro.spec.fields import Activation


def supports(facts: Facts) -> tuple[bool, str]:
    return supports_plain(facts)


def gated_mlp(
    x_TD: torch.Tensor, gate_up: Weight, down: Weight, activation: Activation, limit: float | None
) -> torch.Tensor:
    check(x_TD, gate_up, down, activation, limit)
    T = x_TD.shape[0]
    if T >= LIBRARY_TOKENS:
        h_TF = activate(linear(x_TD, gate_up, None), activation, limit)
        return linear(h_TF.to(x_TD.dtype), down, None)
    ids_T1 = torch.zeros(T, 1, dtype=torch.int32, device=x_TD.device)
    weights_T1 = torch.ones(T, 1, dtype=torch.float32, device=x_TD.device)
    one = ExpertWeights(Weight(gate_up.data[None]), Weight(down.data[None]))
    return routed_mlp(x_TD, ids_T1, weights_T1, one, activation, limit).total(x_TD.dtype)
