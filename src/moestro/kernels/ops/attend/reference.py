"""attend in plain PyTorch: one after the other."""

from __future__ import annotations

import torch

from moestro.kernels.ops.attention import PagedBatch
from moestro.kernels.ops.attention.reference import paged_attention
from moestro.kernels.ops.qkv_store import QKVPlan
from moestro.kernels.ops.qkv_store.reference import qkv_store


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
    q_THd = qkv_store(qkv_TN, plan, cos_TR, sin_TR, batch, k_pages, v_pages, q_norm, k_norm, eps)
    return paged_attention(q_THd, k_pages, v_pages, batch, scale, window, sinks_H)
