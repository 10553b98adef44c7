"""routed_mlp for NVIDIA GPUs: three forms, chosen by the number of tokens.

T tokens, K top-k, D width.
"""

from __future__ import annotations

import torch

from moestro.kernels.facts import Facts
from moestro.kernels.gpu import supports_plain
from moestro.kernels.ops.experts import ExpertWeights
from moestro.kernels.ops.routed_mlp import check, triton_dot, triton_gemv, triton_library
from moestro.kernels.summands import Summands
from moestro.spec.fields import Activation

GEMV_TOKENS = 2
LIBRARY_TOKENS = 513  # from here on


def supports(facts: Facts) -> tuple[bool, str]:
    return supports_plain(facts)


def routed_mlp(
    x_TD: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    experts: ExpertWeights,
    activation: Activation,
    limit: float | None,
) -> Summands:
    check(x_TD, ids_TK, weights_TK, experts, activation, limit)
    T = x_TD.shape[0]
    if T == 0:
        return Summands(x_TD[None])
    if T <= GEMV_TOKENS:
        form = triton_gemv.mlp
    elif T >= LIBRARY_TOKENS and triton_library.can_run(x_TD, experts):
        form = triton_library.mlp
    else:
        form = triton_dot.mlp
    return form(x_TD.contiguous(), ids_TK, weights_TK, experts, activation == "swiglu_clamped", limit or 0.0)
