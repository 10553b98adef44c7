"""qkv_store in plain PyTorch."""

from __future__ import annotations

import torch

from moestro.kernels.ops.attention import PagedBatch
from moestro.kernels.ops.norm.reference import rms_norm
from moestro.kernels.ops.qkv_store import QKVPlan, bad_slot, check


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
    check(qkv_TN, plan, cos_TR, sin_TR, batch, k_pages, v_pages, q_norm, k_norm)
    T, H, Hk, d, dv = qkv_TN.shape[0], plan.num_heads, plan.num_kv_heads, plan.head_dim, plan.v_head_dim
    q_TN, k_TN, v_TN = torch.split(qkv_TN.float(), [H * d, Hk * d, Hk * dv], dim=1)
    if q_norm is not None and k_norm is not None:
        q_TN = rms_norm(q_TN.reshape(-1, q_norm.numel()), q_norm, eps).view(T, H * d)
        k_TN = rms_norm(k_TN.reshape(-1, k_norm.numel()), k_norm, eps).view(T, Hk * d)
    if plan.clip is not None:
        q_TN, k_TN, v_TN = (x.clamp(-plan.clip, plan.clip) for x in (q_TN, k_TN, v_TN))
    q_THd, k_THd, v_THd = q_TN.reshape(T, H, d), k_TN.reshape(T, Hk, d), v_TN.reshape(T, Hk, dv)
    if cos_TR is not None and sin_TR is not None and plan.rotary_dim:
        q_THd = rotate(q_THd, cos_TR, sin_TR, interleaved=plan.interleaved)
        k_THd = rotate(k_THd, cos_TR, sin_TR, interleaved=plan.interleaved)
    num_slots = k_pages.shape[0] * batch.page_size
    real_T = batch.slots_T >= 0
    slots = batch.slots_T[real_T]
    if slots.numel() and int(slots.max()) >= num_slots:
        raise bad_slot(int(slots.max()), num_slots)
    page, offset = slots // batch.page_size, slots % batch.page_size
    k_pages[page, :, offset] = k_THd[real_T].to(k_pages.dtype)
    v_pages[page, :, offset] = v_THd[real_T].to(v_pages.dtype)
    return q_THd.to(qkv_TN.dtype)


def rotate(x_THd: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """Rotate the first 2R numbers of each head by pairs (2i, 2i+1) if interleaved, else (i, i+R), in place."""
    half = cos_TR.shape[1]
    rotated_THr = x_THd[..., : 2 * half]
    if interleaved:
        a, b = rotated_THr[..., 0::2], rotated_THr[..., 1::2]
    else:
        a, b = rotated_THr[..., :half], rotated_THr[..., half:]
    cos, sin = cos_TR[:, None], sin_TR[:, None]
    turned = (a * cos - b * sin, b * cos + a * sin)
    front = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return torch.cat([front, x_THd[..., 2 * half :]], dim=-1)
