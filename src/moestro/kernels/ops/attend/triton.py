"""attend in Triton: one fused kernel for decoding; else qkv_store, then paged_attention or PyTorch's own attention.

S sequences, T rows, H heads, Hk kv heads, G = H / Hk, d key width, dv value width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moestro.kernels.gpu import pdl, supports_plain
from moestro.kernels.ops.attention import PagedBatch
from moestro.kernels.ops.attention import check as check_attention
from moestro.kernels.ops.attention.triton import paged_attention
from moestro.kernels.ops.attention.triton_decode import (
    Partials,
    decode_tiles,
    find_row,
    join_splits,
    num_splits,
    split_range,
    store_result,
)
from moestro.kernels.ops.attention.triton_tile import LOG2_E, attend_tile, first_state, load_tile, tile_constants
from moestro.kernels.ops.qkv_store import QKVPlan, check
from moestro.kernels.ops.qkv_store.triton import head_constants, inverse_rms, rope_tables, store, turned

supports = supports_plain

# PyTorch's attention for fresh prompts of at least so many tokens; None leaves all of them to the Triton kernel.
SDPA_MIN_TOKENS: int | None = 256
_SDPA_BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]


def attend(
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
    scale: float,
    window: int | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    check(qkv_TN, plan, cos_TR, sin_TR, batch, k_pages, v_pages, q_norm, k_norm)
    cos_sin, pages, norms = (cos_TR, sin_TR), (k_pages, v_pages), (q_norm, k_norm)
    if batch.max_query_len == 1 and batch.num_seqs and batch.num_tokens and plan.qk_norm != "full":
        q_THd = qkv_TN[:, : plan.num_heads * plan.head_dim].unflatten(1, (plan.num_heads, plan.head_dim))
        check_attention(q_THd, k_pages, v_pages, batch, window, sinks_H)
        return _attend_decode(qkv_TN, plan, cos_sin, batch, pages, norms, eps, scale, window, sinks_H)
    if _is_fresh_prompt(qkv_TN, plan, batch, window, sinks_H):
        return _attend_prompt(qkv_TN, plan, cos_sin, batch, pages, norms, eps, scale)
    q_THd = store(qkv_TN, plan, cos_sin, batch, pages, norms, eps)
    return paged_attention(q_THd, k_pages, v_pages, batch, scale, window, sinks_H)


def _is_fresh_prompt(
    qkv_TN: torch.Tensor, plan: QKVPlan, batch: PagedBatch, window: int | None, sinks_H: torch.Tensor | None
) -> bool:
    """One long sequence without history, all of whose keys every query may see: what PyTorch's attention does fast."""
    T = batch.num_tokens
    return (
        SDPA_MIN_TOKENS is not None
        and qkv_TN.is_cuda
        and qkv_TN.dtype != torch.float32
        and batch.num_seqs == 1
        and T == batch.max_query_len == batch.max_context_len
        and T >= SDPA_MIN_TOKENS
        and (window is None or window >= T)
        and sinks_H is None
        and plan.clip is None
        and plan.head_dim == plan.v_head_dim
        and plan.head_dim in (64, 96, 128)
    )


def _attend_prompt(
    qkv_TN: torch.Tensor,
    plan: QKVPlan,
    cos_sin: tuple[torch.Tensor | None, torch.Tensor | None],
    batch: PagedBatch,
    pages: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor | None, torch.Tensor | None],
    eps: float,
    scale: float,
) -> torch.Tensor:
    """Keys come from the store kernel, values straight from the projection; both go into the pages as well."""
    T, Hk, d = qkv_TN.shape[0], plan.num_kv_heads, plan.head_dim
    k_THd = torch.empty(T, Hk, d, dtype=qkv_TN.dtype, device=qkv_TN.device)
    q_THd = store(qkv_TN, plan, cos_sin, batch, pages, norms, eps, k_THd)
    v_THd = qkv_TN[:, -Hk * d :].unflatten(1, (Hk, d))
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_THd, k_THd, v_THd))
    with sdpa_kernel(_SDPA_BACKENDS, set_priority=True):
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1).contiguous()


def _attend_decode(
    qkv_TN: torch.Tensor,
    plan: QKVPlan,
    cos_sin: tuple[torch.Tensor | None, torch.Tensor | None],
    batch: PagedBatch,
    pages: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor | None, torch.Tensor | None],
    eps: float,
    scale: float,
    window: int | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    k_pages, v_pages = pages
    q_norm, k_norm = norms
    T, H, Hk, dv = qkv_TN.shape[0], plan.num_heads, plan.num_kv_heads, plan.v_head_dim
    rows = max(batch.num_seqs, T)
    tiles = decode_tiles(H // Hk, plan.head_dim, qkv_TN.dtype)
    blocks = Hk * triton.cdiv(H // Hk, tiles["BH"])
    keys = min(batch.max_context_len, window or batch.max_context_len)
    splits = num_splits(batch.num_seqs * blocks, keys, qkv_TN.device)
    out_THd = torch.empty(T, H, dv, dtype=qkv_TN.dtype, device=qkv_TN.device)
    partials = Partials(qkv_TN, rows, H, splits, dv)
    _attend_kernel[(rows, blocks, splits)](
        qkv_TN,
        k_pages,
        v_pages,
        batch.slots_T,
        *rope_tables(cos_sin, out_THd),
        out_THd if q_norm is None else q_norm,
        out_THd if k_norm is None else k_norm,
        batch.page_tables_SP,
        batch.q_starts_S1,
        batch.context_lens_S,
        partials.lse if sinks_H is None else sinks_H,
        out_THd,
        partials.values,
        partials.lse,
        T,
        batch.num_seqs,
        eps,
        scale * LOG2_E,
        qkv_TN.stride(0),
        batch.page_tables_SP.stride(0),
        *k_pages.stride()[:3],
        *v_pages.stride()[:3],
        H=H,
        G=H // Hk,
        WINDOW=window or 0,
        SPLITS=splits,
        SINKS=sinks_H is not None,
        **head_constants(plan, cos_sin[0]),
        **{key: x for key, x in tile_constants(k_pages, v_pages, batch.page_size).items() if key != "D"},
        **tiles,
        **pdl(qkv_TN),
    )
    if splits > 1:
        join_splits(partials, out_THd, batch, window, tiles["BN"], new_token=1)
    return out_THd


@triton.jit
def _attend_kernel(
    qkv, k_pages, v_pages, slots, cos, sin, q_norm, k_norm, tables, q_starts, contexts, sinks, out, partial, lse,
    T, S, eps, scale,
    stride_t, stride_table, stride_kp, stride_kh, stride_kt, stride_vp, stride_vh, stride_vt,
    H: tl.constexpr, G: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr, SINKS: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr, CLIP: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, PAGE: tl.constexpr, V_IS_K: tl.constexpr,
    UPCAST: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A block takes up to BH heads of one kv head, for one sequence and one split of its older keys.

    Split 0 also takes the new key, from registers, as the start of the softmax, and stores it. The first tile of older
    keys, which earlier steps wrote, is read before the projection is complete.
    """
    p = tl.program_id(0)
    split = tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
    row, context = find_row(q_starts, contexts, p, S)
    if row >= T:
        return
    low, high, splits = split_range(context, split, 1, BN, WINDOW, SPLITS)
    if SPLITS > 1:
        if split >= tl.maximum(splits, tl.minimum(context, 1)):
            return
    HK: tl.constexpr = H // G
    PARTS: tl.constexpr = (G + BH - 1) // BH
    hk = tl.program_id(1) // PARTS
    part = tl.program_id(1) % PARTS
    r = part * BH + tl.arange(0, BH)
    live = r < G
    head = hk * G + tl.minimum(r, G - 1)
    table = tables + tl.minimum(p, S - 1).to(tl.int64) * stride_table
    k_head = k_pages + hk * stride_kh
    v_head = v_pages + hk * stride_vh
    row = row.to(tl.int64)
    slot = tl.load(slots + row)
    takes_new = (split == 0) & (context > 0)
    m, l, acc = first_state(sinks, head, takes_new, SINKS, BH, DVP)
    k1, k2, v = load_tile(
        k_head, v_head, table, low, high, stride_kp, stride_kt, stride_vp, stride_vt,
        D, D1, D2, DV, DVP, PAGE, V_IS_K, BN, True,
    )  # fmt: skip
    if PDL:
        gdc_wait()

    i1 = tl.arange(0, D1)[None, :]
    cos_row = cos + row * R
    sin_row = sin + row * R
    token = qkv + row * stride_t
    q_rows = token + head[:, None] * D
    rms = tl.zeros((BH, 1), tl.float32)
    if NORM:
        rms = inverse_rms(q_rows, D, eps, D_PAD)
    dtype = k_pages.dtype.element_ty
    q1 = turned(q_rows, i1, rms, q_norm, cos_row, sin_row, D, R, NORM, CLIP, INTERLEAVED).to(dtype)
    q2 = q1
    if D2 > 0:
        i2 = D1 + tl.arange(0, D2)[None, :]
        q2 = turned(q_rows, i2, rms, q_norm, cos_row, sin_row, D, R, NORM, CLIP, INTERLEAVED).to(dtype)

    if takes_new:
        stored = (slot >= 0) & (part == 0)
        k_row = token + (H + hk) * D + tl.zeros((1, 1), tl.int32)
        k_to = k_head + slot // PAGE * stride_kp + slot % PAGE * stride_kt
        k_rms = tl.zeros((1, 1), tl.float32)
        if NORM:
            k_rms = inverse_rms(k_row, D, eps, D_PAD)
        new1 = turned(k_row, i1, k_rms, k_norm, cos_row, sin_row, D, R, NORM, CLIP, INTERLEAVED).to(dtype)
        tl.store(k_to + i1, new1, mask=stored & (i1 < D))
        score = tl.sum(q1.to(tl.float32) * new1.to(tl.float32), 1)
        if D2 > 0:
            i2 = D1 + tl.arange(0, D2)[None, :]
            new2 = turned(k_row, i2, k_rms, k_norm, cos_row, sin_row, D, R, NORM, CLIP, INTERLEAVED).to(dtype)
            tl.store(k_to + i2, new2, mask=stored & (i2 < D))
            score += tl.sum(q2.to(tl.float32) * new2.to(tl.float32), 1)
        j = tl.arange(0, DVP)[None, :]
        new_v = tl.load(token + (H + HK) * D + hk * DV + j, mask=j < DV, other=0.0).to(tl.float32)
        if CLIP is not None:
            new_v = tl.minimum(tl.maximum(new_v, -CLIP), CLIP)
        tl.store(
            v_head + slot // PAGE * stride_vp + slot % PAGE * stride_vt + j, new_v.to(dtype), mask=stored & (j < DV)
        )
        start = tl.maximum(m, score * scale)
        weight = tl.exp2(score * scale - start)
        l = l * tl.exp2(m - start) + weight
        m = start
        acc += weight[:, None] * new_v

    visible = (low + tl.arange(0, BN) < high)[None, :]
    m, l, acc = attend_tile(q1, q2, k1, k2, v, visible, m, l, acc, scale, D2, UPCAST, True)
    for first in tl.range(low + BN, high, BN, num_stages=STAGES):
        k1, k2, v = load_tile(
            k_head, v_head, table, first, high, stride_kp, stride_kt, stride_vp, stride_vt,
            D, D1, D2, DV, DVP, PAGE, V_IS_K, BN, True,
        )  # fmt: skip
        visible = (first + tl.arange(0, BN) < high)[None, :]
        m, l, acc = attend_tile(q1, q2, k1, k2, v, visible, m, l, acc, scale, D2, UPCAST, True)
    store_result(out, partial, lse, p, row, head, live, split, m, l, acc, H, DV, DVP, SPLITS)
