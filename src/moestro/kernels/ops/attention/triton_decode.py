"""paged_attention for one query a sequence: the keys of a sequence are split over blocks, a second kernel joins them.

S sequences, T rows, H heads, Hk kv heads, G = H / Hk, d key width, dv value width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moestro.kernels.gpu import num_sms, pdl
from moestro.kernels.ops.attention import PagedBatch
from moestro.kernels.ops.attention.triton_tile import (
    LOG2_E,
    attend_tile,
    first_state,
    load_rows,
    load_tile,
    tile_constants,
)


def decode_tiles(group: int, d: int, dtype: torch.dtype) -> dict[str, int]:
    """BH heads and BN keys a block."""
    if dtype == torch.float32:
        return {"BH": 16, "BN": 32 if d <= 128 else 16, "STAGES": 2, "num_warps": 4}
    return {"BH": 16, "BN": 64 if d <= 256 else 32, "STAGES": 3 if d <= 128 else 2, "num_warps": 4}


def num_splits(blocks: int, max_keys: int, device: torch.device) -> int:
    """Splits of the keys, a power of two up to 32: about two blocks a multiprocessor, one if they are full anyway."""
    sms = num_sms(device)
    if 4 * blocks >= 3 * sms:
        return 1
    splits = 1
    while splits < 32 and 2 * splits * blocks <= 2 * sms and 2 * splits * 32 <= max_keys:
        splits *= 2
    return splits


class Partials:
    """Where split blocks leave their results: float32 [rows, H, splits, dv], and the log2 of their softmax's sum."""

    def __init__(self, like: torch.Tensor, rows: int, H: int, splits: int, dv: int) -> None:
        shape = (rows, H, splits, dv) if splits > 1 else (0,)
        self.values = torch.empty(shape, dtype=torch.float32, device=like.device)
        self.lse = torch.empty(shape[:3], dtype=torch.float32, device=like.device)


def decode_attention(
    q_THd: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: PagedBatch,
    scale: float,
    window: int | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """paged_attention where batch.max_query_len is at most 1 and there is a sequence and a row."""
    T, H, d = q_THd.shape
    Hk, dv = k_pages.shape[1], v_pages.shape[3]
    rows = max(batch.num_seqs, T)
    tiles = decode_tiles(H // Hk, d, q_THd.dtype)
    blocks = Hk * triton.cdiv(H // Hk, tiles["BH"])
    keys = min(batch.max_context_len, window or batch.max_context_len)
    splits = num_splits(batch.num_seqs * blocks, keys, q_THd.device)
    out_THd = torch.empty(T, H, dv, dtype=q_THd.dtype, device=q_THd.device)
    partials = Partials(q_THd, rows, H, splits, dv)
    _decode_kernel[(rows, blocks, splits)](
        q_THd,
        k_pages,
        v_pages,
        batch.page_tables_SP,
        batch.q_starts_S1,
        batch.context_lens_S,
        partials.lse if sinks_H is None else sinks_H,
        out_THd,
        partials.values,
        partials.lse,
        T,
        batch.num_seqs,
        scale * LOG2_E,
        *q_THd.stride()[:2],
        batch.page_tables_SP.stride(0),
        *k_pages.stride()[:3],
        *v_pages.stride()[:3],
        H=H,
        G=H // Hk,
        WINDOW=window or 0,
        SPLITS=splits,
        SINKS=sinks_H is not None,
        **tile_constants(k_pages, v_pages, batch.page_size),
        **tiles,
        **pdl(q_THd),
    )
    if splits > 1:
        join_splits(partials, out_THd, batch, window, tiles["BN"], new_token=0)
    return out_THd


def join_splits(
    partials: Partials, out_THd: torch.Tensor, batch: PagedBatch, window: int | None, BN: int, *, new_token: int
) -> None:
    """Join the partial results in out_THd. new_token: 1 where the newest key was not part of the split range."""
    rows, H, splits, dv = partials.values.shape
    _join_kernel[(rows, H)](
        partials.values,
        partials.lse,
        batch.q_starts_S1,
        batch.context_lens_S,
        out_THd,
        out_THd.shape[0],
        batch.num_seqs,
        H=H,
        DV=dv,
        DVP=triton.next_power_of_2(dv),
        BN=BN,
        WINDOW=window or 0,
        SPLITS=splits,
        NEW=new_token,
        num_warps=4 if dv <= 256 else 8,
        **pdl(out_THd),
    )


@triton.jit
def find_row(q_starts, contexts, p, S):
    """The row that program p answers for, and the keys it has.

    Of max(S, T) programs, p takes the query of sequence p; those whose sequence has no query, or does not exist, share
    the padding rows, which have no keys. A row can be T or more: then there is nothing to do.
    """
    start = tl.load(q_starts + tl.minimum(p, S))
    has_query = tl.load(q_starts + tl.minimum(p + 1, S)) > start
    context = tl.load(contexts + tl.minimum(p, S - 1))
    row = tl.where(has_query, start, tl.load(q_starts + S) + p - start)
    return row, tl.where(has_query, context, 0)


@triton.jit
def split_range(context, split, NEW: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr):
    """Keys low .. high of a split and how many splits there are; NEW: without the newest key."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(context - WINDOW, 0)
    end = tl.maximum(context - NEW, 0)
    each = tl.cdiv(tl.cdiv(tl.maximum(end - first, 1), SPLITS), BN) * BN
    low = first + split * each
    return low, tl.minimum(low + each, end), tl.cdiv(end - first, each)


@triton.jit
def store_result(
    out, partial, lse, p, row, head, live, split, m, l, acc,
    H: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """The softmax's result: to the output row, or as a partial one with its log-sum-exp."""
    i = tl.arange(0, DVP)
    acc = acc / tl.where(l > 0, l, 1.0)[:, None]
    ok = live[:, None] & (i < DV)[None, :]
    if SPLITS == 1:
        at = row.to(tl.int64) * H + head
        tl.store(out + at[:, None] * DV + i[None, :], acc.to(out.dtype.element_ty), mask=ok)
    else:
        at = (p.to(tl.int64) * H + head) * SPLITS + split
        tl.store(partial + at[:, None] * DV + i[None, :], acc, mask=ok)
        tl.store(lse + at, m + tl.log2(l), mask=live)


@triton.jit
def _decode_kernel(
    q, k_pages, v_pages, tables, q_starts, contexts, sinks, out, partial, lse, T, S, scale,
    stride_qt, stride_qh, stride_table, stride_kp, stride_kh, stride_kt, stride_vp, stride_vh, stride_vt,
    H: tl.constexpr, G: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr, SINKS: tl.constexpr,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, PAGE: tl.constexpr,
    V_IS_K: tl.constexpr, UPCAST: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A block takes up to BH heads of one kv head, for one sequence and one split of its keys."""
    p = tl.program_id(0)
    split = tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
    row, context = find_row(q_starts, contexts, p, S)
    if row >= T:
        return
    low, high, splits = split_range(context, split, 0, BN, WINDOW, SPLITS)
    if SPLITS > 1:
        if split >= splits:
            return
    PARTS: tl.constexpr = (G + BH - 1) // BH
    hk = tl.program_id(1) // PARTS
    r = tl.program_id(1) % PARTS * BH + tl.arange(0, BH)
    live = r < G
    head = hk * G + tl.minimum(r, G - 1)
    table = tables + tl.minimum(p, S - 1).to(tl.int64) * stride_table
    k_head = k_pages + hk * stride_kh
    v_head = v_pages + hk * stride_vh
    m, l, acc = first_state(sinks, head, (split == 0) & (context > 0), SINKS, BH, DVP)
    if PDL:
        gdc_wait()
    q_row = q + row.to(tl.int64) * stride_qt + head * stride_qh
    q1 = load_rows(q_row, tl.arange(0, D1), live, D if D < D1 else D1, D1, False)
    q2 = q1
    if D2 > 0:
        q2 = load_rows(q_row + D1, tl.arange(0, D2), live, D - D1, D2, False)
    for first in tl.range(low, high, BN, num_stages=STAGES):
        k1, k2, v = load_tile(
            k_head, v_head, table, first, high, stride_kp, stride_kt, stride_vp, stride_vt,
            D, D1, D2, DV, DVP, PAGE, V_IS_K, BN, True,
        )  # fmt: skip
        visible = (first + tl.arange(0, BN) < high)[None, :]
        m, l, acc = attend_tile(q1, q2, k1, k2, v, visible, m, l, acc, scale, D2, UPCAST, True)
    store_result(out, partial, lse, p, row, head, live, split, m, l, acc, H, DV, DVP, SPLITS)


@triton.jit
def _join_kernel(
    partial, lse, q_starts, contexts, out, T, S,
    H: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr,
    SPLITS: tl.constexpr, NEW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A block joins the splits of one row and head; without any it writes 0."""
    p = tl.program_id(0)
    head = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    row, context = find_row(q_starts, contexts, p, S)
    if row >= T:
        return
    _, _, splits = split_range(context, 0, NEW, BN, WINDOW, SPLITS)
    if NEW:
        splits = tl.maximum(splits, tl.minimum(context, 1))
    split = tl.arange(0, SPLITS)[:, None]
    i = tl.arange(0, DVP)[None, :]
    at = (p.to(tl.int64) * H + head) * SPLITS + split
    if PDL:
        gdc_wait()
    # The log-sum-exp is read once a value: this keeps one register layout for all of the block.
    weight = tl.load(lse + at + i * 0, mask=(split < splits) & (i >= 0), other=-1e30)
    weight = tl.exp2(weight - tl.max(weight, 0, keep_dims=True))
    weight = tl.where(split < splits, weight, 0.0)
    values = tl.load(partial + at * DV + i, mask=(split < splits) & (i < DV), other=0.0)
    total = tl.sum(weight, 0, keep_dims=True)
    result = tl.sum(values * weight, 0, keep_dims=True) / tl.where(total > 0, total, 1.0)
    to = out + (row.to(tl.int64) * H + head) * DV + i
    tl.store(to, result.to(out.dtype.element_ty), mask=i < DV)
