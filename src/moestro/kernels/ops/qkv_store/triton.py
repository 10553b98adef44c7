"""qkv_store as one Triton kernel.

T tokens, H heads, Hk kv heads, d head width, dv value width, R rotated pairs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moestro.kernels.gpu import pdl, supports_plain
from moestro.kernels.ops.attention import PagedBatch
from moestro.kernels.ops.qkv_store import QKVPlan, check

supports = supports_plain

_NORMS: dict[str | None, int] = {None: 0, "head": 1, "full": 2}


def qkv_store(
    qkv_TN: torch.Tensor,
    plan: QKVPlan,
    cos_TR: torch.Tensor | None,
    sin_TR: torch.Tensor | None,
    batch: PagedBatch,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """As QKVStore, but a slot beyond the pages is not noticed: that would wait for the device."""
    check(qkv_TN, plan, cos_TR, sin_TR, batch, k_pages, v_pages, q_norm, k_norm)
    return store(qkv_TN, plan, (cos_TR, sin_TR), batch, (k_pages, v_pages), (q_norm, k_norm), eps)


def store(
    qkv_TN: torch.Tensor,
    plan: QKVPlan,
    cos_sin: tuple[torch.Tensor | None, torch.Tensor | None],
    batch: PagedBatch,
    pages: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor | None, torch.Tensor | None],
    eps: float,
    k_out_THd: torch.Tensor | None = None,
) -> torch.Tensor:
    """qkv_store without its checks; k_out_THd [T, Hk, d], contiguous, receives the keys once more."""
    T = qkv_TN.shape[0]
    q_THd = torch.empty(T, plan.num_heads, plan.head_dim, dtype=qkv_TN.dtype, device=qkv_TN.device)
    if T == 0:
        return q_THd
    k_pages, v_pages = pages
    q_norm, k_norm = norms
    tiles = _tiles(T)
    grid = (triton.cdiv(T, tiles["BT"]), plan.num_heads + 2 * plan.num_kv_heads)
    _qkv_store_kernel[grid](
        qkv_TN,
        q_THd,
        q_THd if k_out_THd is None else k_out_THd,
        k_pages,
        v_pages,
        batch.slots_T,
        *rope_tables(cos_sin, q_THd),
        q_THd if q_norm is None else q_norm,
        q_THd if k_norm is None else k_norm,
        T,
        eps,
        qkv_TN.stride(0),
        *k_pages.stride()[:3],
        *v_pages.stride()[:3],
        H=plan.num_heads,
        HK=plan.num_kv_heads,
        DV=plan.v_head_dim,
        DV_PAD=triton.next_power_of_2(plan.v_head_dim),
        PAGE=batch.page_size,
        K_OUT=k_out_THd is not None,
        **head_constants(plan, cos_sin[0]),
        **tiles,
        **pdl(qkv_TN),
    )
    return q_THd


def _tiles(num_tokens: int) -> dict[str, int]:
    if num_tokens <= 64:
        return {"BT": 1, "num_warps": 1}
    return {"BT": 16, "num_warps": 4}


def head_constants(plan: QKVPlan, cos_TR: torch.Tensor | None) -> dict[str, Any]:
    """The compile-time arguments of `turned` and `inverse_rms`."""
    return {
        "D": plan.head_dim,
        "D_PAD": triton.next_power_of_2(plan.head_dim),
        "R": 0 if cos_TR is None else plan.rotary_dim // 2,
        "NORM": _NORMS[plan.qk_norm],
        "CLIP": plan.clip,
        "INTERLEAVED": plan.interleaved,
    }


def rope_tables(
    cos_sin: tuple[torch.Tensor | None, torch.Tensor | None], unused: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, contiguous, or for none a tensor that the kernel does not read."""
    cos_TR, sin_TR = cos_sin
    if cos_TR is None or sin_TR is None:
        return unused, unused
    return cos_TR.contiguous(), sin_TR.contiguous()


@triton.jit
def inverse_rms(rows, N, eps, CHUNK: tl.constexpr):
    """1 / RMS of the N values at each of the pointers rows [B, 1]; [B, 1], float32."""
    i = tl.arange(0, CHUNK)[None, :]
    squares = tl.zeros((rows.shape[0], 1), tl.float32)
    for first in range(0, N, CHUNK):
        x = tl.load(rows + first + i, mask=first + i < N, other=0.0).to(tl.float32)
        squares += tl.sum(x * x, 1, keep_dims=True)
    return 1.0 / tl.sqrt_rn(squares / N + eps)


@triton.jit
def _normed(rows, i, ok, rms, norm, NORM: tl.constexpr, CLIP: tl.constexpr):
    x = tl.load(rows + i, mask=ok, other=0.0).to(tl.float32)
    if NORM:
        x = x * rms * tl.load(norm + i, mask=ok, other=0.0).to(tl.float32)
    if CLIP is not None:
        x = tl.minimum(tl.maximum(x, -CLIP), CLIP)
    return x


@triton.jit
def turned(
    rows, i, rms, norm, cos, sin,
    D: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr, CLIP: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Values i [1, W] of heads after norm, clamp and rotation; [B, W], float32, 0 for i >= D.

    rows [B, 1]: pointers to a head's first value. rms [B, 1]: from inverse_rms. norm: the head's norm weights. cos,
    sin: pointers to the token's table rows, one or [B, 1]. Each value's partner in the rotation is read again.
    """
    zero = tl.zeros((rows.shape[0], 1), tl.int32)
    x = _normed(rows, i, i + zero < D, rms, norm, NORM, CLIP)
    if R > 0:
        if INTERLEAVED:
            partner = i ^ 1
            pair = i // 2
            first = i % 2 == 0
        else:
            partner = tl.where(i < R, i + R, i - R)
            pair = i % R
            first = i < R
        turns = i < 2 * R
        y = _normed(rows, partner, turns & (zero == 0), rms, norm, NORM, CLIP)
        c = tl.load(cos + zero + pair, mask=turns & (zero == 0), other=1.0)
        s = tl.load(sin + zero + pair, mask=turns & (zero == 0), other=0.0)
        x = x * c + tl.where(first, -y, y) * s
    return x


@triton.jit
def _qkv_store_kernel(
    qkv, q_out, k_out, k_pages, v_pages, slots, cos, sin, q_norm, k_norm, T, eps, stride_t,
    stride_kp, stride_kh, stride_kt, stride_vp, stride_vh, stride_vt,
    H: tl.constexpr, HK: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr, PAGE: tl.constexpr, K_OUT: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr, CLIP: tl.constexpr,
    INTERLEAVED: tl.constexpr, BT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A block takes one head (q, then k, then v heads) of BT tokens. Rows beyond T repeat the last one, unstored."""
    h = tl.program_id(1)
    t = tl.program_id(0) * BT + tl.arange(0, BT)[:, None]
    real = t < T
    t = tl.minimum(t, T - 1).to(tl.int64)
    i = tl.arange(0, D_PAD)[None, :]
    slot = tl.load(slots + t)
    stored = real & (slot >= 0)
    page = slot // PAGE
    offset = slot % PAGE
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = qkv + t * stride_t
    if h >= H + HK:
        hk = h - H - HK
        j = tl.arange(0, DV_PAD)[None, :]
        ok = real & (j < DV)
        v = _normed(row + (H + HK) * D + hk * DV, j, ok, 0.0, row, 0, CLIP)
        to = v_pages + page * stride_vp + hk * stride_vh + offset * stride_vt + j
        tl.store(to, v.to(v_pages.dtype.element_ty), mask=stored & (j < DV))
    elif h >= H:
        hk = h - H
        norm = k_norm
        rms = tl.zeros((BT, 1), tl.float32)
        if NORM == 1:
            rms = inverse_rms(row + h * D, D, eps, D_PAD)
        if NORM == 2:
            rms = inverse_rms(row + H * D, HK * D, eps, 1024)
            norm += hk * D
        k = turned(row + h * D, i, rms, norm, cos + t * R, sin + t * R, D, R, NORM, CLIP, INTERLEAVED)
        k = k.to(k_pages.dtype.element_ty)
        tl.store(k_pages + page * stride_kp + hk * stride_kh + offset * stride_kt + i, k, mask=stored & (i < D))
        if K_OUT:
            tl.store(k_out + (t * HK + hk) * D + i, k, mask=real & (i < D))
    else:
        norm = q_norm
        rms = tl.zeros((BT, 1), tl.float32)
        if NORM == 1:
            rms = inverse_rms(row + h * D, D, eps, D_PAD)
        if NORM == 2:
            rms = inverse_rms(row, H * D, eps, 1024)
            norm += h * D
        q = turned(row + h * D, i, rms, norm, cos + t * R, sin + t * R, D, R, NORM, CLIP, INTERLEAVED)
        tl.store(q_out + (t * H + h) * D + i, q.to(q_out.dtype.element_ty), mask=real & (i < D))
