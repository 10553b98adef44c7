"""latent_store: between the projections of latent attention (MLA) and its attention: norm, rotation, cache.

T tokens, H heads, n nope width, r rope width, c latent width, R = r / 2 rotated pairs, P pages.
"""

from __future__ import annotations

from typing import Protocol

import torch

from moestro.kernels.checks import require_dtype, require_shape
from moestro.kernels.ops.attention import PagedBatch


class LatentStore(Protocol):
    def __call__(
        self,
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
        """Rotate the queries' rope part; norm the latents, rotate the shared rope key, write both into the pages.

        q_rope_THr: [T, H, r], any strides but for the last axis. latent_TN: [T, c + r], latent then rope key. cos_TR,
        sin_TR: float32 [T, r / 2]. interleaved: rotated pairs are (0, 1), (2, 3), ...; the layout is kept. pages:
        [P, 1, page_size, c + r], written in place at batch.slots_T (-1 writes nothing). norm_c: [c], of an RMS norm.
        Returns the rotated [T, H, r] in q's dtype, contiguous. Raises KernelError when shapes do not fit.
        """
        ...


def check(
    q_rope_THr: torch.Tensor,
    latent_TN: torch.Tensor,
    cos_TR: torch.Tensor,
    sin_TR: torch.Tensor,
    batch: PagedBatch,
    pages: torch.Tensor,
    norm_c: torch.Tensor,
) -> None:
    T, r, c = batch.num_tokens, q_rope_THr.shape[-1], norm_c.shape[0]
    require_shape("latent_store", "q_rope", q_rope_THr, (T, q_rope_THr.shape[1], r))
    require_shape("latent_store", "latent", latent_TN, (T, c + r))
    require_shape("latent_store", "pages", pages, (pages.shape[0], 1, batch.page_size, c + r))
    for name, table in (("cos", cos_TR), ("sin", sin_TR)):
        require_dtype("latent_store", name, table, torch.float32)
        require_shape("latent_store", name, table, (T, r // 2))
