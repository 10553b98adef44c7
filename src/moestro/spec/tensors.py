"""The tensors a model is made of: names and shapes in moestro's own layout, derived from the spec alone.

One table serves the parameter count, the strict assembly of checkpoints, the random checkpoints of the tests and the
decoder. Projections that read the same input are stacked along their rows (q, k, v; gate, up), and the experts of a
layer are one tensor with the expert first. Linear weights are [out, in].

D width, V vocabulary, H heads, E experts, F expert width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from moestro.spec.fields import AttentionSpec, DenseSpec, LayerSpec, ModelSpec, MoESpec

Role = Literal["embedding", "head", "norm", "attention", "dense", "router", "expert", "shared"]


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the model.

    shape: as moestro holds it. rows: named blocks along the row axis (axis 0, or 1 behind the expert axis) as (name,
        size), in order; empty when the tensor is not stacked.
    role: what it counts as in memory reports.
    precision: "model" follows the chosen dtype; "float32" is kept in float32 whatever it is (selection bias, sinks).
    """

    shape: tuple[int, ...]
    role: Role
    rows: tuple[tuple[str, int], ...] = ()
    precision: Literal["model", "float32"] = "model"

    @property
    def size(self) -> int:
        return prod(self.shape)


def model_tensors(spec: ModelSpec) -> dict[str, TensorSpec]:
    """All tensors of the model by name, in the order of a forward pass. A tied head is not listed twice."""
    V, D = spec.vocab_size, spec.width
    tensors = {"embed.weight": TensorSpec((V, D), "embedding")}
    for index, layer in enumerate(spec.layers):
        for name, tensor in _layer_tensors(layer, spec):
            tensors[f"layers.{index}.{name}"] = tensor
    tensors.update(_norm("norm", D, spec))
    if not spec.tied_head:
        tensors["head.weight"] = TensorSpec((V, D), "head")
    if spec.head_bias:
        tensors["head.bias"] = TensorSpec((V,), "head")
    return tensors


def _norm(name: str, width: int, spec: ModelSpec) -> Iterator[tuple[str, TensorSpec]]:
    yield f"{name}.weight", TensorSpec((width,), "norm")
    if spec.norm == "layer":
        yield f"{name}.bias", TensorSpec((width,), "norm")


def _layer_tensors(layer: LayerSpec, spec: ModelSpec) -> Iterator[tuple[str, TensorSpec]]:
    yield from _norm("attn_norm", spec.width, spec)
    attention = layer.attention
    yield from _mla_tensors(attention, spec.width) if attention.kind == "mla" else _gqa_tensors(attention, spec.width)
    yield from _norm("mlp_norm", spec.width, spec)
    if isinstance(layer.mlp, DenseSpec):
        yield from _mlp_tensors("mlp", layer.mlp.width, spec.width, "dense")
    else:
        yield from _moe_tensors(layer.mlp, spec.width)


def _gqa_tensors(a: AttentionSpec, D: int) -> Iterator[tuple[str, TensorSpec]]:
    rows = (("q", a.num_heads * a.head_dim), ("k", a.num_kv_heads * a.head_dim), ("v", a.num_kv_heads * a.v_head_dim))
    total = sum(size for _, size in rows)
    yield "attn.qkv.weight", TensorSpec((total, D), "attention", rows)
    if a.qkv_bias:
        yield "attn.qkv.bias", TensorSpec((total,), "attention", rows)
    if a.qk_norm is not None:
        q, k = (a.head_dim, a.head_dim) if a.qk_norm == "head" else (rows[0][1], rows[1][1])
        yield "attn.q_norm.weight", TensorSpec((q,), "norm")
        yield "attn.k_norm.weight", TensorSpec((k,), "norm")
    if a.sinks:
        yield "attn.sinks", TensorSpec((a.num_heads,), "attention", precision="float32")
    yield "attn.o.weight", TensorSpec((D, a.num_heads * a.v_head_dim), "attention")
    if a.o_bias:
        yield "attn.o.bias", TensorSpec((D,), "attention")


def _mla_tensors(a: AttentionSpec, D: int) -> Iterator[tuple[str, TensorSpec]]:
    q_out = a.num_heads * a.head_dim
    latent = a.kv_lora_rank + a.qk_rope_head_dim
    if a.q_lora_rank is None:
        yield "attn.q.weight", TensorSpec((q_out, D), "attention")
    else:
        yield "attn.q_a.weight", TensorSpec((a.q_lora_rank, D), "attention")
        if a.qkv_bias:
            yield "attn.q_a.bias", TensorSpec((a.q_lora_rank,), "attention")
        yield "attn.q_a_norm.weight", TensorSpec((a.q_lora_rank,), "norm")
        yield "attn.q_b.weight", TensorSpec((q_out, a.q_lora_rank), "attention")
    yield "attn.kv_a.weight", TensorSpec((latent, D), "attention")
    if a.qkv_bias:
        yield "attn.kv_a.bias", TensorSpec((latent,), "attention")
    yield "attn.kv_a_norm.weight", TensorSpec((a.kv_lora_rank,), "norm")
    yield (
        "attn.kv_b.weight",
        TensorSpec((a.num_heads * (a.qk_nope_head_dim + a.v_head_dim), a.kv_lora_rank), "attention"),
    )
    yield "attn.o.weight", TensorSpec((D, a.num_heads * a.v_head_dim), "attention")
    if a.o_bias:
        yield "attn.o.bias", TensorSpec((D,), "attention")


def _mlp_tensors(name: str, width: int, D: int, role: Role) -> Iterator[tuple[str, TensorSpec]]:
    yield f"{name}.gate_up.weight", TensorSpec((2 * width, D), role, (("gate", width), ("up", width)))
    yield f"{name}.down.weight", TensorSpec((D, width), role)


def _moe_tensors(m: MoESpec, D: int) -> Iterator[tuple[str, TensorSpec]]:
    E, F = m.router.num_experts, m.expert_width
    rows = (("gate", F), ("up", F))
    yield "moe.router.weight", TensorSpec((E, D), "router")
    if m.router_bias:
        yield "moe.router.bias", TensorSpec((E,), "router")
    if m.selection_bias:
        yield "moe.selection_bias", TensorSpec((E,), "router", precision="float32")
    yield "moe.experts.gate_up.weight", TensorSpec((E, 2 * F, D), "expert", rows)
    if m.expert_bias:
        yield "moe.experts.gate_up.bias", TensorSpec((E, 2 * F), "expert", rows)
    yield "moe.experts.down.weight", TensorSpec((E, D, F), "expert")
    if m.expert_bias:
        yield "moe.experts.down.bias", TensorSpec((E, D), "expert")
    if m.shared_width:
        yield from _mlp_tensors("moe.shared", m.shared_width, D, "shared")
        if m.shared_gate:
            yield "moe.shared_gate.weight", TensorSpec((1, D), "shared")
