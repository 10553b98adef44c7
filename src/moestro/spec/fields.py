"""What a model is, as data: frozen dataclasses that the families fill from config.json and everything else reads.

Nothing here is guessed: a field without a default must be stated by the family. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Scoring = Literal["softmax", "sigmoid", "topk_softmax", "sparsemixer"]
Activation = Literal["swiglu", "swiglu_clamped"]


@dataclass(frozen=True)
class RouterSpec:
    """How the router turns logits [T, E] into top_k expert ids and weights.

    scoring: "softmax" scores over all experts; "sigmoid" a score an expert (DeepSeek-V3); "topk_softmax" softmax over
        the chosen logits only (gpt-oss, Granite); "sparsemixer" the two-step masked softmax of Phi-3.5-MoE (arXiv
        2310.00811).
    renormalize: divide the chosen weights by their sum ("topk_softmax" and "sparsemixer" define their own: False).
    routed_scaling_factor: multiplies the weights, renormalised or not; never the shared experts.
    num_groups, top_groups: keep the best top_groups of num_groups equal groups of experts, then choose inside them;
        None: no groups.
    group_score: a group's score is the best of its (biased) scores, or the sum of its best two (DeepSeek-V3).
    jitter_eps: width of the sparsemixer mask.
    """

    num_experts: int
    top_k: int
    scoring: Scoring = "softmax"
    renormalize: bool = False
    routed_scaling_factor: float = 1.0
    num_groups: int | None = None
    top_groups: int | None = None
    group_score: Literal["max", "top2_sum"] = "max"
    jitter_eps: float = 0.01

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"top_k={self.top_k} must lie in 1..num_experts={self.num_experts}")
        if (self.num_groups is None) != (self.top_groups is None):
            raise ValueError("num_groups and top_groups are set together or not at all")
        if self.num_groups is not None and self.top_groups is not None:
            if self.num_experts % self.num_groups:
                raise ValueError(f"num_experts={self.num_experts} is not divisible by num_groups={self.num_groups}")
            if not 1 <= self.top_groups <= self.num_groups:
                raise ValueError(f"top_groups={self.top_groups} must lie in 1..num_groups={self.num_groups}")
            if self.top_k > self.top_groups * (self.num_experts // self.num_groups):
                raise ValueError(f"top_k={self.top_k} is more than the experts of top_groups={self.top_groups} groups")
            if self.group_score == "top2_sum" and self.num_experts // self.num_groups < 2:
                raise ValueError("group_score='top2_sum' needs at least two experts a group")
        if self.scoring == "sparsemixer" and self.top_k != 2:
            raise ValueError(f"scoring='sparsemixer' is defined for top_k=2, not {self.top_k}")


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding of one kind of attention layer.

    rotary_dim: how many leading dimensions of a head (MLA: of the rope part) are rotated.
    interleaved: pairs are (0, 1), (2, 3), ... (DeepSeek) in place of (i, i + rotary_dim/2).
    kind "linear" | "llama3" | "yarn" | "longrope" change the frequencies; "default" does not.
    cos_sin_factor: multiplies cos and sin (YaRN's and longrope's attention factor, worked out by the family).
    truncate: round YaRN's correction range to whole dimensions (gpt-oss does not).
    short_factor, long_factor: longrope's divisor a frequency, for contexts up to original_max_position and beyond.
    """

    theta: float
    rotary_dim: int
    interleaved: bool = False
    kind: Literal["default", "linear", "llama3", "yarn", "longrope"] = "default"
    factor: float = 1.0
    original_max_position: int | None = None
    cos_sin_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    long_cos_sin_factor: float | None = None


@dataclass(frozen=True)
class AttentionSpec:
    """One layer's attention. Grouped-query ("gqa") or multi-head latent ("mla", DeepSeek).

    head_dim: width of a query/key head (mla: qk_nope_head_dim + qk_rope_head_dim); v_head_dim: of a value head.
    softmax_scale: multiplies q.k, with whatever a family folds in (1/sqrt(head_dim), YaRN's mscale, Granite's
    multiplier).
    qk_norm: RMS norm of q and k before RoPE, a head ("head", weight [head_dim]) or over all heads ("full", weight
        [H*head_dim]).
    clip_qkv: clamp q, k, v to +-this, q and k after their norm (OLMoE).
    window: query i sees keys i-window+1..i; None sees all.
    sinks: a learned logit a head joins the softmax's denominator, without a value (gpt-oss).
    q_lora_rank, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim: mla only.
    latent_norm_eps: mla only, epsilon of the norms of the two latents; DeepSeek's code fixes it, whatever rms_norm_eps
    says.
    """

    kind: Literal["gqa", "mla"]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    softmax_scale: float
    rope: RopeSpec | None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: Literal["head", "full"] | None = None
    clip_qkv: float | None = None
    window: int | None = None
    sinks: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    latent_norm_eps: float = 1e-6

    @property
    def kv_values_per_token(self) -> int:
        """Numbers the KV cache keeps a token and layer: K and V of all heads, or one latent with its rope part."""
        if self.kind == "mla":
            return self.kv_lora_rank + self.qk_rope_head_dim
        return self.num_kv_heads * (self.head_dim + self.v_head_dim)


@dataclass(frozen=True)
class DenseSpec:
    """A dense gated MLP: down(act(gate(x)) * up(x)), of intermediate width `width`."""

    width: int
    activation: Activation = "swiglu"


@dataclass(frozen=True)
class MoESpec:
    """A mixture-of-experts block.

    expert_width: intermediate width F of one routed expert.
    activation: "swiglu", or "swiglu_clamped" (gpt-oss: (clamp(up)+1) * gate * sigmoid(1.702*gate), gate clamped above).
    activation_limit: the clamp of "swiglu_clamped".
    expert_bias, router_bias: the experts' two projections / the router's projection have a bias.
    selection_bias: a learned bias an expert that changes the choice, not the weights (float32 always).
    shared_width: total intermediate width of the shared experts, 0 for none; shared_gate: their output is scaled by
        sigmoid(gate(x)).
    """

    router: RouterSpec
    expert_width: int
    activation: Activation = "swiglu"
    activation_limit: float | None = None
    expert_bias: bool = False
    router_bias: bool = False
    selection_bias: bool = False
    shared_width: int = 0
    shared_gate: bool = False


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer: attention, then a dense or a mixture-of-experts MLP."""

    attention: AttentionSpec
    mlp: DenseSpec | MoESpec

    @property
    def is_moe(self) -> bool:
        return isinstance(self.mlp, MoESpec)


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only model, complete: sizes, layers, constants. The one description that all packages read.

    family: name of the family file; architecture: the string in config.json.
    width: residual width D. max_position: longest context the checkpoint was made for.
    norm: RMS norm, or LayerNorm with bias (Phi-3.5-MoE).
    tied_head: the head is the embedding. head_bias: the head has a bias.
    embedding_multiplier, residual_multiplier, logits_divisor: Granite's constants; 1.0 elsewhere.
    num_mtp_layers: next-token-prediction layers after the last one, present in the checkpoint and left out by name.
    quantization: the quantization_config of config.json, None when there is none.
    eos_ids, bos_id: special tokens named by config.json.
    dtype: dtype named by config.json ("bfloat16"), None when it names none.
    blockers: why this model can be described but not run (an option or format not implemented), each a sentence.
    ignored: config keys that have no effect on inference here, for `inspect`.
    """

    family: str
    architecture: str
    vocab_size: int
    width: int
    layers: tuple[LayerSpec, ...]
    max_position: int
    norm_eps: float
    norm: Literal["rms", "layer"] = "rms"
    tied_head: bool = False
    head_bias: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    num_mtp_layers: int = 0
    quantization: dict[str, object] | None = None
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    dtype: str | None = None
    blockers: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the mixture-of-experts layers; the one answer to "is layer i MoE"."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.is_moe)

    @property
    def kv_values_per_token(self) -> int:
        """Numbers the KV cache keeps for one token over all layers; times the cache dtype's size gives bytes."""
        return sum(layer.attention.kv_values_per_token for layer in self.layers)
