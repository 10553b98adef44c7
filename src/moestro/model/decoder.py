"""The one decoder for all families: embed, then for each layer attention and MLP around a residual stream, then the
head.

T tokens, D width, R rows that need logits, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moestro.dist.collectives import Collectives
from moestro.kernels.summands import Summands
from moestro.kv.pool import KVPool
from moestro.layers.embed import Embedding, Head
from moestro.layers.mlp import GatedMLP
from moestro.layers.norm import Norm
from moestro.layers.rope import RopeTable
from moestro.model.attention import Attention
from moestro.model.inputs import StepInputs
from moestro.moe.events import EventSink
from moestro.moe.layer import MoELayer
from moestro.spec.fields import ModelSpec, RopeSpec


@dataclass(frozen=True, eq=False)
class DecoderLayer:
    """attn_norm and mlp_norm stand before attention and MLP (pre-norm)."""

    attn_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: GatedMLP | MoELayer
    rope: RopeSpec | None


class Decoder:
    """A complete model on one rank. Stateless but for its weights: the KV cache is handed in with each step."""

    def __init__(
        self,
        spec: ModelSpec,
        embedding: Embedding,
        layers: list[DecoderLayer],
        norm: Norm,
        head: Head,
        ropes: dict[RopeSpec, RopeTable],
        group: Collectives,
    ) -> None:
        self.spec = spec
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.head = head
        self.ropes = ropes
        self.group = group

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, kv: KVPool, events: EventSink | None) -> torch.Tensor:
        """Run one step: writes its keys and values into `kv`, returns logits [R, V] float32 of the rows asked for."""
        if not inputs.counted:
            events = None
        residual_TD = self._embed(inputs)
        cos_sin = {rope: table.rows(inputs.rope_rows_T) for rope, table in self.ropes.items()}
        scale = self.spec.residual_multiplier
        x_TD = self.layers[0].attn_norm(residual_TD)
        slots_T = inputs.batch.slots_T if inputs.has_padding else None
        for index, layer in enumerate(self.layers):
            rope = None if layer.rope is None else cos_sin[layer.rope]
            attended = self.group.all_reduce_(layer.attention(x_TD, rope, inputs.batch, kv.layers[index]))
            if isinstance(layer.mlp, MoELayer):
                x_TD, logits_TE = layer.mlp.score(layer.mlp_norm, residual_TD, attended, scale)
                out = layer.mlp(x_TD, logits_TE, slots_T, events)
            else:
                out = layer.mlp(layer.mlp_norm.add_(residual_TD, attended, scale))
            out = self.group.all_reduce_(out)
            if index + 1 < len(self.layers):
                x_TD = self.layers[index + 1].attn_norm.add_(residual_TD, out, scale)
        rows = inputs.logit_rows_R
        if rows is not None:
            residual_TD, out = residual_TD[rows], out.rows(rows) if isinstance(out, Summands) else out[rows]
        return self.head(self.norm.add_(residual_TD, out, scale))

    def _embed(self, inputs: StepInputs) -> torch.Tensor:
        if inputs.embeds_TD is not None:
            return inputs.embeds_TD.clone()  # the residual is written in place
        assert inputs.token_ids_T is not None
        return self.embedding(inputs.token_ids_T)
