# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
"""The experts of a few to a few hundred tokens: products of a tile of an expert's weight, as the 64-row operand of the
matrix unit, with the expert's tokens.

Up to 32 tokens nothing is sorted: a block finds its expert's tokens among all ids, and leaves when there are none.
Beyond, tokens are sorted by expert first, and blocks of one weight tile run side by side, so that it is read once.

T tokens, K top-k, P = T * K pairs, R rows of a block, D width, F expert width, E experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moestro.kernels.gpu import INTERPRETED, pdl
from moestro.kernels.ops.experts import ExpertWeights
from moestro.kernels.ops.routed_mlp.triton_tile import activate, weight_tile
from moestro.kernels.ops.sort_by_expert.triton import sort_by_expert
from moestro.kernels.summands import Summands

DIRECT_TOKENS = 32


def _tiles(tokens: int, rows_an_expert: float, inputs: int) -> dict[str, int]:
    """BM tokens by BN rows of the weight a block, BK of its columns at a time."""
    if tokens <= DIRECT_TOKENS:
        BM = 16 if tokens <= 16 else 32
    else:
        BM = max(16, min(64, triton.next_power_of_2(int(rows_an_expert * 1.25) + 1)))
    BK = 128 if BM <= 32 and inputs % 128 == 0 else 64
    return {"BM": BM, "BN": 64, "BK": BK, "num_warps": 4, "num_stages": 4 if BK == 64 else 3}


def mlp(
    x_TD: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    experts: ExpertWeights,
    clamped: bool,
    limit: float,
) -> Summands:
    (T, K), (E, D, F) = ids_TK.shape, experts.down.shape
    is_sorted = T > DIRECT_TOKENS
    order_P, offsets_E1 = ids_TK, ids_TK  # not read
    if is_sorted:
        offsets_E1, order_P = sort_by_expert(ids_TK, E)
    h_PF = torch.empty(T * K, F, dtype=x_TD.dtype, device=x_TD.device)
    pairs_PD = torch.empty(T * K, D, dtype=torch.float32 if T <= 64 else x_TD.dtype, device=x_TD.device)
    common = {
        "K": K,
        "D": D,
        "F": F,
        "SORTED": is_sorted,
        "UPCAST": INTERPRETED and x_TD.dtype != torch.float32,
    } | pdl(x_TD)
    tiles = _tiles(T, T * K / E, D)
    _gate_up[_grid(T, F, E, tiles, is_sorted)](
        x_TD, experts.gate_up.data, experts.gate_up_bias_E2F, ids_TK, order_P, offsets_E1, h_PF, limit, T,
        CLAMPED=clamped, EVEN=F % tiles["BN"] == 0 and D % tiles["BK"] == 0, **tiles, **common,
    )  # fmt: skip
    tiles = _tiles(T, T * K / E, F)
    _down[_grid(T, D, E, tiles, is_sorted)](
        h_PF, experts.down.data, experts.down_bias_ED, ids_TK, order_P, offsets_E1, pairs_PD, T,
        EVEN=D % tiles["BN"] == 0 and F % tiles["BK"] == 0, **tiles, **common,
    )  # fmt: skip
    return Summands(pairs_PD.view(T, K, D).transpose(0, 1), weights_TK)


def _grid(tokens: int, outputs: int, experts: int, tiles: dict[str, int], is_sorted: bool) -> tuple[int, int, int]:
    """Blocks of tokens (fastest: they share the weight tile), of outputs, of experts. No token has an expert twice."""
    return (triton.cdiv(tokens, tiles["BM"]) if is_sorted else 1, triton.cdiv(outputs, tiles["BN"]), experts)


@triton.jit
def _rows(ids, order, offsets, T, e, K: tl.constexpr, BM: tl.constexpr, SORTED: tl.constexpr):
    """The block's pairs [BM], -1 for none, and their rows in the sorted order, or the pairs where nothing is sorted."""
    m = tl.arange(0, BM)
    if SORTED:
        row = tl.load(offsets + e) + tl.program_id(0) * BM + m
        pair = tl.load(order + row, mask=row < tl.load(offsets + e + 1), other=-1)
        return pair, row
    else:
        pair = tl.full((BM,), -1, tl.int32)
        for i in tl.static_range(K):
            found = tl.load(ids + m * K + i, mask=m < T, other=-1)
            pair = tl.where(found == e, m * K + i, pair)
        return pair, pair


@triton.jit(do_not_specialize=["T"])
def _gate_up(
    x, w, bias, ids, order, offsets, h, limit, T,
    K: tl.constexpr, D: tl.constexpr, F: tl.constexpr, SORTED: tl.constexpr, UPCAST: tl.constexpr,
    CLAMPED: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BN numbers of the activated gate and up projection of up to BM tokens of one expert."""
    e = tl.program_id(2)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    kk = tl.arange(0, BK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    pair, row = _rows(ids, order, offsets, T, e, K, BM, SORTED)
    has = pair >= 0
    if tl.max(pair, 0) >= 0:
        gate_w = w + e.to(tl.int64) * (2 * F * D)
        token = (tl.maximum(pair, 0) // K).to(tl.int64)
        gate = tl.zeros((BN, BM), tl.float32)
        up = tl.zeros((BN, BM), tl.float32)
        for first in tl.range(0, D, BK):
            k = first + kk
            a = weight_tile(gate_w, n, k, F, D, EVEN)
            b = weight_tile(gate_w + F * D, n, k, F, D, EVEN)
            inside = has[None, :] & (k < D)[:, None] if not EVEN else has[None, :]
            v = tl.load(x + token[None, :] * D + k[:, None], mask=inside, other=0.0)
            if UPCAST:
                a, b, v = a.to(tl.float32), b.to(tl.float32), v.to(tl.float32)
            gate = tl.dot(a, v, gate, input_precision="ieee")
            up = tl.dot(b, v, up, input_precision="ieee")
        if bias is not None:
            gate += tl.load(bias + e * (2 * F) + n, mask=n < F, other=0.0)[:, None]
            up += tl.load(bias + e * (2 * F) + F + n, mask=n < F, other=0.0)[:, None]
        y = activate(gate, up, limit, CLAMPED)
        at = h + row[None, :].to(tl.int64) * F + n[:, None]
        tl.store(at, y.to(h.dtype.element_ty), mask=has[None, :] & (n < F)[:, None])


@triton.jit(do_not_specialize=["T"])
def _down(
    h, w, bias, ids, order, offsets, y, T,
    K: tl.constexpr, D: tl.constexpr, F: tl.constexpr, SORTED: tl.constexpr, UPCAST: tl.constexpr,
    EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BN numbers of the output of up to BM tokens of one expert, to the pairs' own rows."""
    e = tl.program_id(2)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    kk = tl.arange(0, BK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    pair, row = _rows(ids, order, offsets, T, e, K, BM, SORTED)
    has = pair >= 0
    if tl.max(pair, 0) >= 0:
        source = tl.maximum(row, 0).to(tl.int64)
        total = tl.zeros((BN, BM), tl.float32)
        for first in tl.range(0, F, BK):
            k = first + kk
            a = weight_tile(w + e.to(tl.int64) * (D * F), n, k, D, F, EVEN)
            inside = has[None, :] & (k < F)[:, None] if not EVEN else has[None, :]
            v = tl.load(h + source[None, :] * F + k[:, None], mask=inside, other=0.0)
            if UPCAST:
                a, v = a.to(tl.float32), v.to(tl.float32)
            total = tl.dot(a, v, total, input_precision="ieee")
        if bias is not None:
            total += tl.load(bias + e * D + n, mask=n < D, other=0.0)[:, None]
        at = y + pair[None, :].to(tl.int64) * D + n[:, None]
        tl.store(at, total.to(y.dtype.element_ty), mask=has[None, :] & (n < D)[:, None])
