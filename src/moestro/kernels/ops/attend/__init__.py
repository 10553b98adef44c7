"""attend: everything between the stacked q, k, v projection and the output projection: qkv_store, then paged_attention.

One op, because a kernel for decoding can do both at once. T tokens, H heads, dv value width.
"""

from __future__ import annotations

from typing import Protocol

import torch

from moestro.kernels.ops.attention import PagedBatch
from moestro.kernels.ops.qkv_store import QKVPlan


class Attend(Protocol):
    def __call__(
        self,
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
        """Store this step's keys and values in the pages and attend. Arguments as of qkv_store and paged_attention.

        Returns [T, H, dv] in qkv's dtype; padding rows are 0 or left over from another step. Raises KernelError when
        shapes do not fit.
        """
        ...
