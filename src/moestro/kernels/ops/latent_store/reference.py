"""latent_store in plain PyTorch."""

from __future__ import annotations

import torch

from moestro.kernels.ops.attention import PagedBatch
from moestro.kernels.ops.latent_store import check
from moestro.kernels.ops.norm.reference import rms_norm
from moestro.kernels.ops.qkv_store.reference import rotate


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
    latent_Tc, k_rope_Tr = torch.split(latent_TN, [norm_c.shape[0], q_rope_THr.shape[-1]], dim=-1)
    k_rope_T1r = rotate(k_rope_Tr.unsqueeze(1).float(), cos_TR, sin_TR, interleaved=interleaved)
    row_TN = torch.cat((rms_norm(latent_Tc.float(), norm_c, eps), k_rope_T1r.squeeze(1)), dim=-1)
    real_T = batch.slots_T >= 0
    pages.view(-1, pages.shape[-1])[batch.slots_T[real_T]] = row_TN[real_T].to(pages.dtype)
    return rotate(q_rope_THr.float(), cos_TR, sin_TR, interleaved=interleaved).to(q_rope_THr.dtype)
