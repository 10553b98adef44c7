"""Qwen3-MoE (30B-A3B, 235B-A22B, Coder-480B): norms on each head of q and k, no shared expert."""

from moestro.errors import ConfigError
from moestro.spec.fields import DenseSpec, LayerSpec, ModelSpec, MoESpec, RouterSpec
from moestro.spec.names import ROTARY_BUFFERS, NameMap, dense_mlp, experts, frame, gqa, router
from moestro.spec.parts import build, read_heads, read_max_position, read_num_layers, sparse_layers
from moestro.spec.parts import gqa as gqa_attention
from moestro.spec.read import ConfigReader
from moestro.spec.rope import read_rope

ARCHITECTURES = ("Qwen3MoeForCausalLM",)
MODEL_TYPES = ("qwen3_moe",)

_BLOCK = "(mlp|block_sparse_moe)"
NAMES = NameMap(
    [
        *frame(),
        *gqa(),
        *dense_mlp(),
        *experts(_BLOCK, "(gate_proj|w1)", "(up_proj|w3)", "(down_proj|w2)"),
        *router(_BLOCK, "gate"),
    ],
    ROTARY_BUFFERS,
)


def spec(config: ConfigReader) -> ModelSpec:
    heads = read_heads(config)
    bias = config.default("attention_bias", bool, False)
    # Written by the tools of Qwen3-Coder, with the only values that Qwen3 has.
    config.expect("qkv_bias", bias)
    config.expect("use_qk_norm", True)
    config.expect("shared_expert_intermediate_size", 0)
    attention = gqa_attention(
        heads,
        read_rope(config, heads.head_dim, read_max_position(config)),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        window=_window(config),
    )
    moe = MoESpec(
        router=RouterSpec(
            num_experts=config.count(("num_experts", "num_local_experts")),
            top_k=config.count("num_experts_per_tok"),
            renormalize=config.require("norm_topk_prob", bool),
        ),
        expert_width=config.count("moe_intermediate_size"),
    )
    dense = DenseSpec(config.count("intermediate_size"))
    sparse = sparse_layers(config, read_num_layers(config))
    return build(config, "qwen3_moe", [LayerSpec(attention, moe if s else dense) for s in sparse])


def _window(config: ConfigReader) -> int | None:
    in_use = config.default("use_sliding_window", bool, False)
    window = config.optional("sliding_window", int, at_least=0)
    first = config.optional("max_window_layers", int, at_least=0)
    if not in_use:
        return None
    if not window:
        raise ConfigError(f"{config.where}: use_sliding_window=true needs a sliding_window of at least 1")
    if first:
        # Versions of transformers disagree on whether this spares the first layers, and no released model uses it.
        raise ConfigError(f"{config.where}: max_window_layers={first} with use_sliding_window=true is not supported")
    return window
