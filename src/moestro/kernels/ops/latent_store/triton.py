"""latent_store as one Triton kernel.

T tokens, H heads, c latent width, r rope width, R = r / 2 rotated pairs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moestro.kernels.gpu import pdl, supports_plain
from moestro.kernels.ops.attention import PagedBatch
from moestro.kernels.ops.latent_store import check
from moestro.kernels.ops.qkv_store.triton import inverse_rms, turned

supports = supports_plain


def latent_store(
    q_rope_THr: torch.Tensor,
    latent_TN: torch.Tensor,
    cos_TR: torch.Tensor,
    sin_TR: torch.Tensor,
    interleaved: bool,
    batch: PagedBatch,
    pages: torch.Tensor,
    norm_c: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    check(q_rope_THr, latent_TN, cos_TR, sin_TR, batch, pages, norm_c)
    T, H, r = q_rope_THr.shape
    c = norm_c.shape[0]
    out_THr = torch.empty(T, H, r, dtype=q_rope_THr.dtype, device=q_rope_THr.device)
    if T == 0:
        return out_THr
    tiles = _tiles(H)
    _latent_store_kernel[(T, triton.cdiv(H, tiles["BH"]) + 1)](
        q_rope_THr,
        latent_TN,
        out_THr,
        pages,
        batch.slots_T,
        cos_TR.contiguous(),
        sin_TR.contiguous(),
        norm_c,
        eps,
        q_rope_THr.stride(0),
        q_rope_THr.stride(1),
        latent_TN.stride(0),
        pages.stride(0),
        pages.stride(2),
        H=H,
        C=c,
        C_PAD=triton.next_power_of_2(c),
        ROPE=r,
        ROPE_PAD=triton.next_power_of_2(r),
        PAGE=batch.page_size,
        INTERLEAVED=interleaved,
        **tiles,
        **pdl(latent_TN),
    )
    return out_THr


def _tiles(num_heads: int) -> dict[str, int]:
    return {"BH": min(16, triton.next_power_of_2(num_heads)), "num_warps": 4}


@triton.jit
def _latent_store_kernel(
    q_rope, latent, out, pages, slots, cos, sin, norm, eps,
    stride_qt, stride_qh, stride_lt, stride_page, stride_slot,
    H: tl.constexpr, C: tl.constexpr, C_PAD: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr,
    PAGE: tl.constexpr, INTERLEAVED: tl.constexpr, BH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A token's first block norms its latent, rotates its rope key and stores both; the others rotate BH heads each."""
    t = tl.program_id(0).to(tl.int64)
    R: tl.constexpr = ROPE // 2
    i = tl.arange(0, ROPE_PAD)[None, :]
    slot = tl.load(slots + t)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if tl.program_id(1) == 0:
        row = latent + t * stride_lt + tl.zeros((1, 1), tl.int32)
        to = pages + slot // PAGE * stride_page + slot % PAGE * stride_slot
        j = tl.arange(0, C_PAD)[None, :]
        rms = inverse_rms(row, C, eps, C_PAD)
        normed = turned(row, j, rms, norm, cos, sin, C, 0, 1, None, False)
        key = turned(row + C, i, rms, norm, cos + t * R, sin + t * R, ROPE, R, 0, None, INTERLEAVED)
        tl.store(to + j, normed.to(pages.dtype.element_ty), mask=(j < C) & (slot >= 0))
        tl.store(to + C + i, key.to(pages.dtype.element_ty), mask=(i < ROPE) & (slot >= 0))
    else:
        h = (tl.program_id(1) - 1) * BH + tl.arange(0, BH)[:, None]
        q_rows = q_rope + t * stride_qt + tl.minimum(h, H - 1) * stride_qh
        q = turned(q_rows, i, 0.0, norm, cos + t * R, sin + t * R, ROPE, R, 0, None, INTERLEAVED)
        tl.store(out + (t * H + h) * ROPE + i, q.to(out.dtype.element_ty), mask=(h < H) & (i < ROPE))
