"""paged_attention in Triton: one form for decoding, one for everything else."""

from __future__ import annotations

import torch

from moestro.kernels.gpu import supports_plain
from moestro.kernels.ops.attention import PagedBatch, check
from moestro.kernels.ops.attention.triton_decode import decode_attention
from moestro.kernels.ops.attention.triton_prefill import prefill_attention

supports = supports_plain


def paged_attention(
    q_THd: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: PagedBatch,
    scale: float,
    window: int | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    check(q_THd, k_pages, v_pages, batch, window, sinks_H)
    if batch.num_seqs == 0 or batch.num_tokens == 0:
        T, H, _ = q_THd.shape
        return torch.zeros(T, H, v_pages.shape[3], dtype=q_THd.dtype, device=q_THd.device)
    form = decode_attention if batch.max_query_len <= 1 else prefill_attention
    return form(q_THd, k_pages, v_pages, batch, scale, window, sinks_H)
