# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
"""The experts of one or two tokens: matrix-vector products, each weight read where it is used.

T tokens, K top-k, P = T * K pairs, D width, F expert width, E experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moestro.kernels.gpu import pdl
from moestro.kernels.ops.experts import ExpertWeights
from moestro.kernels.ops.linear.triton import best_chunk
from moestro.kernels.ops.routed_mlp.triton_tile import activate, weight_tile
from moestro.kernels.summands import Summands


def _tiles(outputs: int, inputs: int) -> dict[str, int]:
    """BN rows of the weight by BK of its columns at a time."""
    BK = min(2048, best_chunk(inputs))
    return {"BN": max(4, min(16, 2048 // BK)), "BK": BK, "num_warps": 4}


def mlp(
    x_TD: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    experts: ExpertWeights,
    clamped: bool,
    limit: float,
) -> Summands:
    (T, K), (D, F) = ids_TK.shape, (experts.width, experts.expert_width)
    h_PF = torch.empty(T * K, F, dtype=x_TD.dtype, device=x_TD.device)
    tiles = _tiles(F, D)
    _gate_up[(triton.cdiv(F, tiles["BN"]), T * K)](
        x_TD,
        experts.gate_up.data,
        experts.gate_up_bias_E2F,
        ids_TK,
        h_PF,
        limit,
        K=K,
        D=D,
        F=F,
        CLAMPED=clamped,
        EVEN=F % tiles["BN"] == 0 and D % tiles["BK"] == 0,
        **tiles,
        **pdl(x_TD),
    )
    y_1TD = torch.empty(1, T, D, dtype=torch.float32, device=x_TD.device)
    tiles = _tiles(D, F)
    _down[(triton.cdiv(D, tiles["BN"]), T)](
        h_PF,
        experts.down.data,
        experts.down_bias_ED,
        ids_TK,
        weights_TK,
        y_1TD,
        K=K,
        D=D,
        F=F,
        EVEN=D % tiles["BN"] == 0 and F % tiles["BK"] == 0,
        **tiles,
        **pdl(x_TD),
    )
    return Summands(y_1TD)


@triton.jit
def _gate_up(
    x,
    w,
    bias,
    ids,
    h,
    limit,
    K: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    CLAMPED: tl.constexpr,
    EVEN: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    """BN numbers of one pair's activated gate and up projection."""
    p = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    kk = tl.arange(0, BK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    e = tl.load(ids + p).to(tl.int64)
    if e >= 0:
        gate_w = w + e * (2 * F * D)
        gate = tl.zeros((BN,), tl.float32)
        up = tl.zeros((BN,), tl.float32)
        for first in tl.static_range(0, D, BK):
            k = first + kk
            a = weight_tile(gate_w, n, k, F, D, EVEN)
            b = weight_tile(gate_w + F * D, n, k, F, D, EVEN)
            v = tl.load(x + (p // K) * D + k, mask=k < D, other=0.0).to(tl.float32)
            gate += tl.sum(a.to(tl.float32) * v[None, :], 1)
            up += tl.sum(b.to(tl.float32) * v[None, :], 1)
        if bias is not None:
            gate += tl.load(bias + e * (2 * F) + n, mask=n < F, other=0.0)
            up += tl.load(bias + e * (2 * F) + F + n, mask=n < F, other=0.0)
        y = activate(gate, up, limit, CLAMPED)
        tl.store(h + p * F + n, y.to(h.dtype.element_ty), mask=n < F)


@triton.jit
def _down(
    h,
    w,
    bias,
    ids,
    weights,
    y,
    K: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    EVEN: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    """BN numbers of one token's output: all its experts, weighted and added up."""
    t = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    kk = tl.arange(0, BK)
    spread = tl.arange(0, BN)[:, None] * 0  # h is read in the weight's own layout: nothing goes through shared memory
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros((BN, BK), tl.float32)
    added = tl.zeros((BN,), tl.float32)
    if tl.load(ids + t * K) >= 0:  # a padding row has no expert at all
        for i in tl.static_range(K):
            e = tl.load(ids + t * K + i).to(tl.int64)
            has = e >= 0
            weight = tl.where(has, tl.load(weights + t * K + i), 0.0)
            e = tl.maximum(e, 0)
            for first in tl.range(0, F, BK, loop_unroll_factor=4):
                k = first + kk
                a = weight_tile(w + e * (D * F), n, k, D, F, EVEN)
                at = h + (t * K + i) * F + k[None, :] + spread
                v = tl.load(at, mask=has & (k < F)[None, :] & (spread == 0), other=0.0).to(tl.float32)
                total += a.to(tl.float32) * (v * weight)
            if bias is not None:
                added += weight * tl.load(bias + e * D + n, mask=n < D, other=0.0)
    tl.store(y + t * D + n, tl.sum(total, 1) + added, mask=n < D)
