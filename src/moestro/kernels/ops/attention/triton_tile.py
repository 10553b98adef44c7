"""What the Triton kernels of attention share: a tile of paged keys and values, and one step of the online softmax.

BM rows (queries x heads), BN keys of a tile, d key width, dv value width. A key is held in two parts, [BN, D1] and
[BN, D2], so that widths like 192 or latent attention's 512 + 64 are not padded to a power of two; where D2 is 0 the
second part is not used. Scores are kept times scale * log2(e), so that the softmax is made of exp2.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from moestro.kernels.gpu import INTERPRETED

LOG2_E = 1.4426950408889634


def tile_constants(k_pages: torch.Tensor, v_pages: torch.Tensor, page_size: int) -> dict[str, Any]:
    """The compile-time arguments of `load_tile` and `attend_tile` but for the tile size."""
    d, dv = k_pages.shape[3], v_pages.shape[3]
    D1 = max(16, triton.next_power_of_2(d + 1) // 2)
    shared = v_pages.data_ptr() == k_pages.data_ptr() and v_pages.stride() == k_pages.stride()
    return {
        "D": d,
        "D1": D1,
        "D2": 0 if d <= D1 else max(16, triton.next_power_of_2(d - D1)),
        "DV": dv,
        "DVP": max(16, triton.next_power_of_2(dv)),
        "PAGE": page_size,
        "V_IS_K": shared and dv == D1,
        "UPCAST": INTERPRETED and k_pages.dtype != torch.float32,
    }


@triton.jit
def dot(a, b, UPCAST: tl.constexpr, acc=None):
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc=acc, input_precision="ieee")


@triton.jit
def load_rows(rows, i, ok, N: tl.constexpr, W: tl.constexpr, MASKED: tl.constexpr):
    """Values i [W] at the pointers rows [BN]; 0 where a row is not ok (if MASKED) or i is not below N."""
    pointers = rows[:, None] + i[None, :]
    if MASKED:
        if N == W:
            return tl.load(pointers, mask=ok[:, None], other=0.0)
        else:
            return tl.load(pointers, mask=ok[:, None] & (i < N)[None, :], other=0.0)
    else:
        if N == W:
            return tl.load(pointers)
        else:
            return tl.load(pointers, mask=(i < N)[None, :], other=0.0)


@triton.jit
def load_tile(
    k_head, v_head, table, first, end, stride_kp, stride_kt, stride_vp, stride_vt,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, PAGE: tl.constexpr,
    V_IS_K: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Keys first .. first + BN of one kv head: both parts and the values; if MASKED 0, unread, from `end` on."""
    key = first + tl.arange(0, BN)
    ok = key < end
    if MASKED:
        page = tl.load(table + key // PAGE, mask=ok, other=0).to(tl.int64)
    else:
        page = tl.load(table + key // PAGE).to(tl.int64)
    k_row = k_head + page * stride_kp + key % PAGE * stride_kt
    k1 = load_rows(k_row, tl.arange(0, D1), ok, D if D < D1 else D1, D1, MASKED)
    if D2 > 0:
        k2 = load_rows(k_row + D1, tl.arange(0, D2), ok, D - D1, D2, MASKED)
    else:
        k2 = k1
    if V_IS_K:
        v = k1
    else:
        v_row = v_head + page * stride_vp + key % PAGE * stride_vt
        v = load_rows(v_row, tl.arange(0, DVP), ok, DV, DVP, MASKED)
    return k1, k2, v


@triton.jit
def attend_tile(
    q1, q2, k1, k2, v, visible, m, l, acc, scale, D2: tl.constexpr, UPCAST: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """One tile of keys into the state of the online softmax: maximum m [BM], sum l [BM], values acc [BM, DVP]."""
    scores = dot(q1, tl.trans(k1), UPCAST)
    if D2 > 0:
        scores = dot(q2, tl.trans(k2), UPCAST, scores)
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    m_new = tl.maximum(m, tl.max(scores, 1) * scale)
    p = tl.exp2(scores * scale - m_new[:, None])
    shrink = tl.exp2(m - m_new)
    acc = dot(p.to(v.dtype), v, UPCAST, acc * shrink[:, None])
    return m_new, l * shrink + tl.sum(p, 1), acc


@triton.jit
def first_state(sinks, head, mine, SINKS: tl.constexpr, BM: tl.constexpr, DVP: tl.constexpr):
    """The softmax before any key: empty, or where `mine` the sink of each row's head. m is finite: no inf - inf."""
    m = tl.full((BM,), -1e30, tl.float32)
    l = tl.zeros((BM,), tl.float32)
    if SINKS:
        m = tl.where(mine, tl.load(sinks + head) * 1.4426950408889634, m)
        l = tl.where(mine, 1.0, l)
    return m, l, tl.zeros((BM, DVP), tl.float32)
