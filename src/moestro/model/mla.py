"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), absorbed: the cache holds one latent a token, and
queries are brought into the latent space in place of keys and values being brought out of it. To the attention kernel
it is one kv head whose values are the first kv_lora_rank numbers of its keys.

T tokens, D width, H heads, n nope width, r rope width, c latent width, v value width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moestro.kernels.ops.attention import PagedAttention, PagedBatch
from moestro.kernels.ops.latent_store import LatentStore
from moestro.kernels.select import KernelSelector
from moestro.kernels.summands import Summands
from moestro.kv.pool import LayerPages
from moestro.layers.linear import Linear
from moestro.layers.norm import RMSNorm
from moestro.model.attention import CosSin
from moestro.spec.fields import AttentionSpec


@dataclass(frozen=True, eq=False)
class LatentAttention:
    """q: the projections to all heads' queries, through a norm when the family compresses queries.

    to_latent_Hnc and from_latent_Hcv are the two halves of kv_b in the activations' dtype.
    """

    spec: AttentionSpec
    q_a: Linear | None
    q_a_norm: RMSNorm | None
    q: Linear
    kv_a: Linear
    kv_a_norm: RMSNorm
    to_latent_Hnc: torch.Tensor
    from_latent_Hcv: torch.Tensor
    o: Linear
    store_kernel: LatentStore
    attention_kernel: PagedAttention

    @classmethod
    def build(
        cls,
        spec: AttentionSpec,
        q_path: tuple[Linear | None, RMSNorm | None, Linear],
        kv_a: Linear,
        kv_a_norm: RMSNorm,
        kv_b: torch.Tensor,
        o: Linear,
        kernels: KernelSelector,
        kv_format: str,
        dtype: torch.dtype,
    ) -> LatentAttention:
        """kv_b: [H * (n + v), c], for each head the rows that make keys, then those that make values."""
        rows = kv_b.to(dtype).view(spec.num_heads, spec.qk_nope_head_dim + spec.v_head_dim, spec.kv_lora_rank)
        to_latent = rows[:, : spec.qk_nope_head_dim].contiguous()
        from_latent = rows[:, spec.qk_nope_head_dim :].transpose(1, 2).contiguous()
        store, attention = kernels.latent_store(kv_format, dtype), kernels.paged_attention(kv_format, dtype)
        return cls(spec, *q_path, kv_a, kv_a_norm, to_latent, from_latent, o, store, attention)

    def __call__(
        self, x_TD: torch.Tensor, cos_sin: CosSin | None, batch: PagedBatch, pages: LayerPages
    ) -> torch.Tensor | Summands:
        s = self.spec
        assert s.rope is not None
        assert cos_sin is not None
        q_THd = self.q(x_TD if self.q_a is None or self.q_a_norm is None else self.q_a_norm(self.q_a(x_TD)))
        q_THd = q_THd.view(x_TD.shape[0], s.num_heads, s.head_dim)
        q_nope, q_rope = torch.split(q_THd, [s.qk_nope_head_dim, s.qk_rope_head_dim], dim=-1)
        q_rope = self.store_kernel(
            q_rope,
            self.kv_a(x_TD),
            *cos_sin,
            s.rope.interleaved,
            batch,
            pages.k,
            self.kv_a_norm.weight_D,
            self.kv_a_norm.eps,
        )
        q_THc = torch.bmm(q_nope.transpose(0, 1), self.to_latent_Hnc).transpose(0, 1)
        q_full = torch.cat((q_THc, q_rope), dim=-1)
        out_THc = self.attention_kernel(q_full, pages.k, pages.v, batch, s.softmax_scale, s.window, None)
        out_HTv = torch.bmm(out_THc.transpose(0, 1), self.from_latent_Hcv)
        return self.o.parts(out_HTv.transpose(0, 1).flatten(1))
