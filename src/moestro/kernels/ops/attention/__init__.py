"""paged_attention: causal attention of a step's queries over keys and values that lie in pages.

T tokens of the step, S sequences, H heads, Hk kv heads, P pages, d key width, dv value width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from moestro.errors import KernelError
from moestro.kernels.checks import require_dtype, require_shape


@dataclass(frozen=True, eq=False)
class PagedBatch:
    """Where the tokens of one step lie, for storing and for attention.

    page_size: tokens a page.
    q_starts_S1: int32 [S + 1], rows q_starts[s]:q_starts[s + 1] of the step belong to sequence s; rows beyond the last
    are padding.
    context_lens_S: int32 [S], keys of each sequence including this step's tokens.
    page_tables_SP: int32 [S, pages], page ids of each sequence in order; entries beyond its context are not read.
    slots_T: int64 [T], where each token's key and value go: page * page_size + offset, or -1 for padding, which writes
    nothing.
    num_seqs, num_tokens, max_query_len, max_context_len: the same facts as Python ints, so that no kernel waits for
    the device.
    """

    page_size: int
    q_starts_S1: torch.Tensor
    context_lens_S: torch.Tensor
    page_tables_SP: torch.Tensor
    slots_T: torch.Tensor
    num_seqs: int
    num_tokens: int
    max_query_len: int
    max_context_len: int

    def __post_init__(self) -> None:
        for name in ("q_starts_S1", "context_lens_S", "page_tables_SP"):
            require_dtype("PagedBatch", name, getattr(self, name), torch.int32)
        require_dtype("PagedBatch", "slots_T", self.slots_T, torch.int64)
        require_shape("PagedBatch", "q_starts_S1", self.q_starts_S1, (self.num_seqs + 1,))
        require_shape("PagedBatch", "context_lens_S", self.context_lens_S, (self.num_seqs,))
        require_shape("PagedBatch", "slots_T", self.slots_T, (self.num_tokens,))
        tables = self.page_tables_SP.shape
        if len(tables) != 2 or tables[0] != self.num_seqs or tables[1] * self.page_size < self.max_context_len:
            raise KernelError(
                f"PagedBatch: page_tables_SP has shape {list(tables)}; expected [{self.num_seqs}, pages] with pages of "
                f"{self.page_size} tokens for a context of {self.max_context_len}"
            )


class PagedAttention(Protocol):
    def __call__(
        self,
        q_THd: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        batch: PagedBatch,
        scale: float,
        window: int | None,
        sinks_H: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend from each query to the keys up to its own position.

        q_THd: [T, H, d]. k_pages: [P, Hk, page_size, d], v_pages: [P, Hk, page_size, dv]; for latent attention Hk = 1
        and v_pages is the view k_pages[..., :dv]. The step's own keys are already in the pages. scale: multiplies q.k.
        window: token at position p sees keys p-window+1..p; None sees all. sinks_H: float32 [H], a logit a head that
        joins the softmax's denominator once, unscaled and without a value (gpt-oss).
        Returns [T, H, dv] in q's dtype, computed in float32; padding rows are 0. Raises KernelError when shapes do not
        fit.
        """
        ...


def check(
    q_THd: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: PagedBatch,
    window: int | None,
    sinks_H: torch.Tensor | None,
) -> None:
    if q_THd.dim() != 3 or q_THd.shape[0] != batch.num_tokens:
        raise KernelError(f"paged_attention: q has shape {list(q_THd.shape)}; expected [{batch.num_tokens}, H, d]")
    H, d = q_THd.shape[1:]
    if k_pages.dim() != 4 or k_pages.shape[2:] != (batch.page_size, d) or H % k_pages.shape[1]:
        raise KernelError(
            f"paged_attention: k_pages has shape {list(k_pages.shape)}; expected [P, Hk, {batch.page_size}, {d}] with "
            f"Hk dividing {H} heads"
        )
    if v_pages.dim() != 4 or v_pages.shape[:3] != k_pages.shape[:3] or v_pages.dtype != k_pages.dtype:
        raise KernelError(
            f"paged_attention: v_pages is {v_pages.dtype} {list(v_pages.shape)}; expected {k_pages.dtype} "
            f"{[*k_pages.shape[:3], 'dv']}"
        )
    if window is not None and window < 1:
        raise KernelError(f"paged_attention: window={window} must be at least 1, or None")
    if sinks_H is not None:
        require_dtype("paged_attention", "sinks", sinks_H, torch.float32)
        require_shape("paged_attention", "sinks", sinks_H, (H,))
