"""qkv_store: everything between the stacked q, k, v projection and attention, in one pass.

T tokens, N = H * d + Hk * d + Hk * dv stacked outputs, H heads, Hk kv heads, d head width, R rotated pairs, P pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from moestro.errors import KernelError
from moestro.kernels.checks import require_dtype, require_shape
from moestro.kernels.ops.attention import PagedBatch


@dataclass(frozen=True)
class QKVPlan:
    """How one layer's stacked projection is taken apart; fields as in AttentionSpec and RopeSpec.

    rotary_dim: leading dimensions of a q and k head that are rotated; 0 rotates none.
    interleaved: rotated pairs are (0, 1), (2, 3), ... in place of (i, i + rotary_dim / 2).
    qk_norm: RMS norm of q and k before the rotation, a head ("head") or over all heads ("full"). clip: clamp of q, k
    and v.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    rotary_dim: int
    interleaved: bool = False
    qk_norm: Literal["head", "full"] | None = None
    clip: float | None = None

    def __post_init__(self) -> None:
        if self.rotary_dim % 2 or not 0 <= self.rotary_dim <= self.head_dim:
            raise KernelError(
                f"qkv_store: rotary_dim={self.rotary_dim} must be even and at most head_dim={self.head_dim}"
            )

    @property
    def total(self) -> int:
        """Rows of the stacked projection."""
        return (self.num_heads + self.num_kv_heads) * self.head_dim + self.num_kv_heads * self.v_head_dim

    @property
    def norm_sizes(self) -> tuple[int, int]:
        """Sizes of the q and the k norm's weights."""
        if self.qk_norm == "full":
            return self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return self.head_dim, self.head_dim


class QKVStore(Protocol):
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
    ) -> torch.Tensor:
        """Split q, k, v; norm q and k; clamp; rotate q and k; write k and v into the pages; return q.

        The order is OLMoE's, the one family with both norm and clamp: norm, clamp, rotate.
        qkv_TN: [T, N], q rows then k then v. cos_TR, sin_TR: float32 [T, rotary_dim / 2], or None to rotate nothing.
        k_pages: [P, Hk, page_size, d] and v_pages: [P, Hk, page_size, dv], written in place at batch.slots_T (-1
        writes nothing).
        q_norm, k_norm: norm weights, given exactly when plan.qk_norm is set. eps: of these norms.
        Returns q [T, H, d] in qkv's dtype. Raises KernelError when shapes or slots do not fit.
        """
        ...


def check(
    qkv_TN: torch.Tensor,
    plan: QKVPlan,
    cos_TR: torch.Tensor | None,
    sin_TR: torch.Tensor | None,
    batch: PagedBatch,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
) -> None:
    op = "qkv_store"
    require_shape(op, "qkv", qkv_TN, (batch.num_tokens, plan.total))
    for name, pages, width in (("k_pages", k_pages, plan.head_dim), ("v_pages", v_pages, plan.v_head_dim)):
        require_shape(op, name, pages, (k_pages.shape[0], plan.num_kv_heads, batch.page_size, width))
    if (cos_TR is None) != (sin_TR is None):
        raise KernelError("qkv_store: cos and sin are given together or not at all")
    if cos_TR is not None and sin_TR is not None:
        for name, table in (("cos", cos_TR), ("sin", sin_TR)):
            require_dtype(op, name, table, torch.float32)
            require_shape(op, name, table, (batch.num_tokens, plan.rotary_dim // 2))
    if (q_norm is None) != (plan.qk_norm is None) or (k_norm is None) != (plan.qk_norm is None):
        raise KernelError(f"qkv_store: qk_norm={plan.qk_norm!r} asks for q_norm and k_norm exactly when it is set")
    if q_norm is not None and k_norm is not None:
        for name, weight, size in zip(("q_norm", "k_norm"), (q_norm, k_norm), plan.norm_sizes, strict=True):
            require_shape(op, name, weight, (size,))


def bad_slot(slot: int, num_slots: int) -> KernelError:
    return KernelError(f"qkv_store: slot {slot} is beyond the {num_slots} slots of the pages; -1 marks padding")
