"""paged_attention in general: chunks of queries with or without history, mixed with decoding (FlashAttention-2's loop).

S sequences, T rows, H heads, Hk kv heads, G = H / Hk, d key width, dv value width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moestro.kernels.gpu import pdl
from moestro.kernels.ops.attention import PagedBatch
from moestro.kernels.ops.attention.triton_tile import (
    LOG2_E,
    attend_tile,
    first_state,
    load_rows,
    load_tile,
    tile_constants,
)


def prefill_tiles(rows: int, d: int, dtype: torch.dtype) -> dict[str, int]:
    """BM rows (queries x heads of a kv head) and BN keys a block; rows: those of the longest sequence."""
    small = min(64, max(16, triton.next_power_of_2(rows)))
    if dtype == torch.float32:
        return {"BM": min(32, small), "BN": 32 if d <= 128 else 16, "STAGES": 1, "num_warps": 4}
    if d > 256:
        return {"BM": small, "BN": 32, "STAGES": 2, "num_warps": 8 if small == 64 else 4}
    if rows < 128:
        return {"BM": small, "BN": 64, "STAGES": 3 if d <= 128 else 2, "num_warps": 4}
    return {"BM": 128, "BN": 128 if d <= 64 else 64, "STAGES": 3 if d <= 128 else 2, "num_warps": 8}


def prefill_attention(
    q_THd: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: PagedBatch,
    scale: float,
    window: int | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """paged_attention where there is a sequence and a row."""
    T, H, d = q_THd.shape
    Hk, dv = k_pages.shape[1], v_pages.shape[3]
    rows = max(1, batch.max_query_len) * (H // Hk)
    tiles = prefill_tiles(rows, d, q_THd.dtype)
    out_THd = torch.empty(T, H, dv, dtype=q_THd.dtype, device=q_THd.device)
    _prefill_kernel[(triton.cdiv(rows, tiles["BM"]), Hk, batch.num_seqs + 1)](
        q_THd,
        k_pages,
        v_pages,
        batch.page_tables_SP,
        batch.q_starts_S1,
        batch.context_lens_S,
        batch.context_lens_S if sinks_H is None else sinks_H,
        out_THd,
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
        SINKS=sinks_H is not None,
        **tile_constants(k_pages, v_pages, batch.page_size),
        **tiles,
        **pdl(q_THd),
    )
    return out_THd


@triton.jit
def _clear_padding(
    out, begin, T, hk, m_block, H: tl.constexpr, G: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr
):  # fmt: skip
    """Write 0 to rows begin .. T of a kv head's heads, shared out among the blocks of the grid's first axis."""
    i = tl.arange(0, DVP)
    for r in range(begin * G + m_block, T * G, tl.num_programs(0)):
        row = r // G + tl.zeros((DVP,), tl.int64)
        to = out + (row * H + hk * G + r % G) * DV + i
        tl.store(to, tl.zeros((DVP,), out.dtype.element_ty), mask=i < DV)


@triton.jit
def _prefill_kernel(
    q, k_pages, v_pages, tables, q_starts, contexts, sinks, out, T, S, scale,
    stride_qt, stride_qh, stride_table, stride_kp, stride_kh, stride_kt, stride_vp, stride_vh, stride_vt,
    H: tl.constexpr, G: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, PAGE: tl.constexpr,
    V_IS_K: tl.constexpr, UPCAST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A block takes BM rows of one sequence and kv head: its tokens times the G heads, tokens outermost.

    The grid's last axis has one entry more than there are sequences: the padding rows. Blocks with the most keys come
    first. Tiles that every row sees whole go through a loop without masks; with a window all tiles are masked.
    """
    m_block = tl.num_programs(0) - 1 - tl.program_id(0)
    hk = tl.program_id(1)
    s = tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if s == S:
        _clear_padding(out, tl.load(q_starts + S), T, hk, m_block, H, G, DV, DVP)
        return
    start = tl.load(q_starts + s)
    queries = tl.load(q_starts + s + 1) - start
    if m_block * BM >= queries * G:
        return
    context = tl.load(contexts + s)
    r = m_block * BM + tl.arange(0, BM)
    live = r < queries * G
    token = tl.minimum(r // G, queries - 1)
    head = hk * G + r % G
    position = context - queries + token
    first_position = context - queries + m_block * BM // G
    last_position = context - queries + tl.minimum((m_block * BM + BM - 1) // G, queries - 1)

    row = (start + token).to(tl.int64)
    q_row = q + row * stride_qt + head * stride_qh
    q1 = load_rows(q_row, tl.arange(0, D1), live, D if D < D1 else D1, D1, False)
    q2 = q1
    if D2 > 0:
        q2 = load_rows(q_row + D1, tl.arange(0, D2), live, D - D1, D2, False)
    table = tables + s.to(tl.int64) * stride_table
    k_head = k_pages + hk * stride_kh
    v_head = v_pages + hk * stride_vh
    m, l, acc = first_state(sinks, head, context > 0, SINKS, BM, DVP)

    end = tl.minimum(last_position + 1, context)
    if WINDOW > 0:
        masked_from = tl.maximum(first_position - WINDOW + 1, 0) // BN * BN
    else:
        masked_from = tl.maximum(first_position + 1, 0) // BN * BN
        for first in tl.range(0, masked_from, BN, num_stages=STAGES):
            k1, k2, v = load_tile(
                k_head, v_head, table, first, end, stride_kp, stride_kt, stride_vp, stride_vt,
                D, D1, D2, DV, DVP, PAGE, V_IS_K, BN, False,
            )  # fmt: skip
            m, l, acc = attend_tile(q1, q2, k1, k2, v, live[:, None], m, l, acc, scale, D2, UPCAST, False)
    for first in tl.range(masked_from, end, BN, num_stages=STAGES):
        k1, k2, v = load_tile(
            k_head, v_head, table, first, end, stride_kp, stride_kt, stride_vp, stride_vt,
            D, D1, D2, DV, DVP, PAGE, V_IS_K, BN, True,
        )  # fmt: skip
        key = first + tl.arange(0, BN)
        visible = key[None, :] <= position[:, None]
        if WINDOW > 0:
            visible &= key[None, :] > position[:, None] - WINDOW
        m, l, acc = attend_tile(q1, q2, k1, k2, v, visible, m, l, acc, scale, D2, UPCAST, True)

    acc = acc / tl.where(l > 0, l, 1.0)[:, None]
    i = tl.arange(0, DVP)
    to = out + (row * H + head)[:, None] * DV + i[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=live[:, None] & (i < DV)[None, :])
