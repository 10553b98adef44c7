"""Qwen1.5-MoE and Qwen2-57B-A14B: one gated shared expert, biases on q, k and v, some dense layers by rule."""

from moestro.errors import ConfigError
from moestro.spec.fields import DenseSpec, LayerSpec, ModelSpec, MoESpec, RouterSpec
from moestro.spec.names import ROTARY_BUFFERS, NameMap, dense_mlp, experts, frame, gqa, router, shared_expert
from moestro.spec.parts import build, read_heads, read_layer_windows, read_max_position, read_num_layers, sparse_layers
from moestro.spec.parts import gqa as gqa_attention
from moestro.spec.read import ConfigReader
from moestro.spec.rope import read_rope

ARCHITECTURES = ("Qwen2MoeForCausalLM",)
MODEL_TYPES = ("qwen2_moe",)

_BLOCK = "(mlp|block_sparse_moe)"
NAMES = NameMap(
    [
        *frame(),
        *gqa(),
        *dense_mlp(),
        *experts(_BLOCK, "(gate_proj|w1)", "(up_proj|w3)", "(down_proj|w2)"),
        *router(_BLOCK, "gate"),
        *shared_expert("shared_expert"),
    ],
    ROTARY_BUFFERS,
)


def spec(config: ConfigReader) -> ModelSpec:
    heads = read_heads(config)
    rope = read_rope(config, heads.head_dim, read_max_position(config))
    # Released configs do not state qkv_bias and have the biases.
    qkv_bias = config.default("qkv_bias", bool, True)
    num_layers = read_num_layers(config)
    moe = MoESpec(
        router=RouterSpec(
            num_experts=config.count(("num_experts", "num_local_experts")),
            top_k=config.count("num_experts_per_tok"),
            renormalize=config.default("norm_topk_prob", bool, False),
        ),
        expert_width=config.count("moe_intermediate_size"),
        shared_width=config.count("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    dense = DenseSpec(config.count("intermediate_size"))
    layers = [
        LayerSpec(gqa_attention(heads, rope, qkv_bias=qkv_bias, window=window), moe if sparse else dense)
        for window, sparse in zip(_windows(config, num_layers), sparse_layers(config, num_layers), strict=True)
    ]
    return build(config, "qwen2_moe", layers)


def _windows(config: ConfigReader, num_layers: int) -> list[int | None]:
    """transformers' rule without layer_types: of the first max_window_layers, those with an even index."""
    in_use = config.default("use_sliding_window", bool, False)
    window = config.optional("sliding_window", int, at_least=0)
    if in_use and not window:
        raise ConfigError(f"{config.where}: use_sliding_window=true needs a sliding_window of at least 1")
    window = window if in_use else None
    first = config.optional("max_window_layers", int, at_least=0)
    stated = read_layer_windows(config, num_layers, window)
    if stated is not None:
        return stated
    if in_use and first is None:
        raise ConfigError(f"{config.where}: use_sliding_window=true needs max_window_layers or layer_types")
    return [window if i % 2 == 0 and i < (first or 0) else None for i in range(num_layers)]
