"""Grouped-query attention of one layer: projection, norms, rotation, cache, attention, output projection.

T tokens, D width, H heads, R rotated pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from moestro.kernels.ops.attend import Attend
from moestro.kernels.ops.attention import PagedBatch
from moestro.kernels.ops.qkv_store import QKVPlan
from moestro.kernels.select import KernelSelector
from moestro.kernels.summands import Summands
from moestro.kv.pool import LayerPages
from moestro.layers.linear import Linear
from moestro.spec.fields import AttentionSpec

CosSin = tuple[torch.Tensor, torch.Tensor]


class Attention(Protocol):
    def __call__(
        self, x_TD: torch.Tensor, cos_sin: CosSin | None, batch: PagedBatch, pages: LayerPages
    ) -> torch.Tensor | Summands:
        """Write this step's keys and values into the pages, attend, and return [T, D] or what adds up to it."""
        ...


@dataclass(frozen=True, eq=False)
class GroupedQueryAttention:
    """q_norm, k_norm: weights of the query and key norms, None where the family has none."""

    spec: AttentionSpec
    plan: QKVPlan
    eps: float
    qkv: Linear
    o: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    sinks_H: torch.Tensor | None
    attend: Attend

    @classmethod
    def build(
        cls,
        spec: AttentionSpec,
        eps: float,
        qkv: Linear,
        o: Linear,
        norms: tuple[torch.Tensor | None, torch.Tensor | None],
        sinks_H: torch.Tensor | None,
        kernels: KernelSelector,
        kv_format: str,
        dtype: torch.dtype,
    ) -> GroupedQueryAttention:
        plan = QKVPlan(
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.v_head_dim,
            spec.rope.rotary_dim if spec.rope else 0,
            spec.rope.interleaved if spec.rope else False,
            spec.qk_norm,
            spec.clip_qkv,
        )
        return cls(spec, plan, eps, qkv, o, *norms, sinks_H, kernels.attend(kv_format, dtype))

    def __call__(
        self, x_TD: torch.Tensor, cos_sin: CosSin | None, batch: PagedBatch, pages: LayerPages
    ) -> torch.Tensor | Summands:
        cos_TR, sin_TR = (None, None) if cos_sin is None else cos_sin
        out_THd = self.attend(
            self.qkv(x_TD),
            self.plan,
            cos_TR,
            sin_TR,
            batch,
            pages.k,
            pages.v,
            self.q_norm,
            self.k_norm,
            self.eps,
            self.spec.softmax_scale,
            self.spec.window,
            self.sinks_H,
        )
        return self.o.parts(out_THd.flatten(1))
