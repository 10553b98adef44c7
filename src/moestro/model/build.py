"""From a spec and its tensors to a decoder: every layer is put together here, and every kernel chosen."""

from __future__ import annotations

import torch

from moestro.dist.collectives import SingleRank
from moestro.dist.layout import Layout
from moestro.kernels.ops.experts import ExpertWeights
from moestro.kernels.select import KernelSelector
from moestro.layers.embed import Embedding, Head
from moestro.layers.linear import Linear
from moestro.layers.mlp import GatedMLP
from moestro.layers.norm import LayerNorm, Norm, RMSNorm
from moestro.layers.rope import RopeTable
from moestro.model.attention import Attention, GroupedQueryAttention
from moestro.model.decoder import Decoder, DecoderLayer
from moestro.model.mla import LatentAttention
from moestro.moe.dispatch import LocalDispatch
from moestro.moe.experts import FusedExperts, RoutedExperts, SortedExperts
from moestro.moe.layer import MoELayer
from moestro.moe.placement import Placement
from moestro.moe.store import ExpertStore, ResidentStore
from moestro.quant.formats import Weight
from moestro.spec.fields import Activation, AttentionSpec, ModelSpec, MoESpec

Tensors = dict[str, torch.Tensor]


class Builder:
    """Builds one rank's decoder.

    tensors: by the names of `spec.tensors.model_tensors`, on the device; entries are taken out as they are used, so
    that a tensor which has to be converted is not held twice. dtype: of the activations. kv_format: name of the KV
    cache's dtype.
    """

    def __init__(
        self,
        spec: ModelSpec,
        tensors: Tensors,
        kernels: KernelSelector,
        *,
        dtype: torch.dtype,
        kv_format: str,
        placement: Placement,
        layout: Layout,
        max_position: int,
    ) -> None:
        assert layout.is_single, "more than one rank is not built yet"
        self.spec = spec
        self.tensors = tensors
        self.kernels = kernels
        self.dtype = dtype
        self.kv_format = kv_format
        self.placement = placement
        self.max_position = max_position

    def build(self) -> Decoder:
        """Raises KernelError when an implementation asked for by name cannot run."""
        embed = self.tensors["embed.weight"]
        layers = [self._layer(i) for i in range(self.spec.num_layers)]
        head_weight = embed if self.spec.tied_head else self._take("head.weight")
        head = Linear.build(Weight(head_weight), self._take_float("head.bias"), self.kernels, self.dtype)
        ropes = {layer.attention.rope for layer in self.spec.layers if layer.attention.rope is not None}
        decoder = Decoder(
            self.spec,
            Embedding(embed, self.spec.embedding_multiplier, self.dtype),
            layers,
            self._norm("norm"),
            Head(head, self.spec.logits_divisor),
            {rope: RopeTable(rope, self.max_position, embed.device) for rope in ropes},
            SingleRank(),
        )
        del self.tensors["embed.weight"]
        assert not self.tensors, f"tensors that no layer took: {list(self.tensors)}"
        return decoder

    def _take(self, name: str) -> torch.Tensor:
        return self.tensors.pop(name)

    def _take_float(self, name: str) -> torch.Tensor | None:
        """A small tensor (bias, sinks) in float32, if the model has it."""
        tensor = self.tensors.pop(name, None)
        return None if tensor is None else tensor.float()

    def _linear(self, name: str) -> Linear:
        bias = self._take_float(f"{name}.bias")
        return Linear.build(Weight(self._take(f"{name}.weight")), bias, self.kernels, self.dtype)

    def _norm(self, name: str) -> Norm:
        weight = self._take(f"{name}.weight")
        if self.spec.norm == "layer":
            bias = self._take(f"{name}.bias")
            return LayerNorm(weight.to(self.dtype), bias.to(self.dtype), self.spec.norm_eps)
        return RMSNorm.build(weight, self.spec.norm_eps, self.kernels, self.dtype)

    def _latent_norm(self, name: str, spec: AttentionSpec) -> RMSNorm:
        return RMSNorm.build(self._take(f"{name}.weight"), spec.latent_norm_eps, self.kernels, self.dtype)

    def _layer(self, index: int) -> DecoderLayer:
        layer, name = self.spec.layers[index], f"layers.{index}"
        if isinstance(layer.mlp, MoESpec):
            mlp: GatedMLP | MoELayer = self._moe(f"{name}.moe", layer.mlp, self.spec.moe_layers.index(index))
        else:
            mlp = self._mlp(f"{name}.mlp", layer.mlp.activation, None)
        attn_norm = self._norm(f"{name}.attn_norm")
        attention = self._attention(f"{name}.attn", layer.attention)
        return DecoderLayer(attn_norm, attention, self._norm(f"{name}.mlp_norm"), mlp, layer.attention.rope)

    def _attention(self, name: str, spec: AttentionSpec) -> Attention:
        if spec.kind == "mla":
            return self._latent_attention(name, spec)
        norms = (self._norm_weight(f"{name}.q_norm.weight"), self._norm_weight(f"{name}.k_norm.weight"))
        return GroupedQueryAttention.build(
            spec,
            self.spec.norm_eps,
            self._linear(f"{name}.qkv"),
            self._linear(f"{name}.o"),
            norms,
            self._take_float(f"{name}.sinks"),
            self.kernels,
            self.kv_format,
            self.dtype,
        )

    def _norm_weight(self, name: str) -> torch.Tensor | None:
        weight = self.tensors.pop(name, None)
        return None if weight is None else weight.to(self.dtype)

    def _latent_attention(self, name: str, spec: AttentionSpec) -> LatentAttention:
        if spec.q_lora_rank is None:
            q_path: tuple[Linear | None, RMSNorm | None, Linear] = (None, None, self._linear(f"{name}.q"))
        else:
            q_path = (
                self._linear(f"{name}.q_a"),
                self._latent_norm(f"{name}.q_a_norm", spec),
                self._linear(f"{name}.q_b"),
            )
        return LatentAttention.build(
            spec,
            q_path,
            self._linear(f"{name}.kv_a"),
            self._latent_norm(f"{name}.kv_a_norm", spec),
            self._take(f"{name}.kv_b.weight"),
            self._linear(f"{name}.o"),
            self.kernels,
            self.kv_format,
            self.dtype,
        )

    def _mlp(self, name: str, activation: Activation, limit: float | None) -> GatedMLP:
        gate_up, down = Weight(self._take(f"{name}.gate_up.weight")), Weight(self._take(f"{name}.down.weight"))
        return GatedMLP.build(gate_up, down, activation, limit, self.kernels, self.dtype)

    def _moe(self, name: str, spec: MoESpec, index: int) -> MoELayer:
        return MoELayer(
            index,
            spec.router,
            self._linear(f"{name}.router"),
            self._take_float(f"{name}.selection_bias"),
            self.kernels.add_rms_norm_logits_(self.dtype),
            self.kernels.route(),
            self._experts(f"{name}.experts", spec, index),
            self._mlp(f"{name}.shared", spec.activation, spec.activation_limit) if spec.shared_width else None,
            self._linear(f"{name}.shared_gate") if spec.shared_gate else None,
        )

    def _experts(self, name: str, spec: MoESpec, index: int) -> RoutedExperts:
        store = self._store(name, index)
        if self.kernels.device == "cuda" and self.placement.is_identity:
            return FusedExperts(spec, store, self.kernels, self.dtype)
        dispatch = LocalDispatch(index, self.placement, self.kernels, self.dtype)
        return SortedExperts(spec, dispatch, store, self.kernels, self.dtype)

    def _store(self, name: str, index: int) -> ExpertStore:
        gate_up = self._to_slots(self._take(f"{name}.gate_up.weight"), index)
        down = self._to_slots(self._take(f"{name}.down.weight"), index)
        biases = [self._take_float(f"{name}.{part}.bias") for part in ("gate_up", "down")]
        biases = [None if b is None else self._to_slots(b, index) for b in biases]
        return ResidentStore(ExpertWeights(Weight(gate_up), Weight(down), biases[0], biases[1]))

    def _to_slots(self, experts: torch.Tensor, index: int) -> torch.Tensor:
        """Experts in the order of their physical slots."""
        if self.placement.is_identity:
            return experts
        return experts[torch.tensor(self.placement.physical_to_logical[index], device=experts.device)]
