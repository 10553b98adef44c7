"""Phi-3.5-MoE (arXiv 2404.14219): LayerNorm, biases, sparsemixer routing, longrope with its own cos/sin factors."""

from moestro.spec.fields import LayerSpec, ModelSpec, MoESpec, RouterSpec
from moestro.spec.names import ROTARY_BUFFERS, NameMap, experts, frame, gqa, router
from moestro.spec.parts import build, read_heads, read_max_position, read_num_layers, read_window
from moestro.spec.parts import gqa as gqa_attention
from moestro.spec.read import ConfigReader
from moestro.spec.rope import read_rope

ARCHITECTURES = ("PhiMoEForCausalLM", "PhimoeForCausalLM")
MODEL_TYPES = ("phimoe",)

_BLOCK = "(block_sparse_moe|mlp)"
NAMES = NameMap(
    [
        *frame(),
        *gqa(),
        *experts(_BLOCK, "(w1|gate_proj)", "(w3|up_proj)", "(w2|down_proj)"),
        *router(_BLOCK, "(gate|router)"),
    ],
    ROTARY_BUFFERS,
)


def spec(config: ConfigReader) -> ModelSpec:
    heads = read_heads(config)
    bias = config.require("attention_bias", bool)
    attention = gqa_attention(
        heads,
        read_rope(config, heads.head_dim, read_max_position(config), own_mscales=True),
        qkv_bias=bias,
        o_bias=bias,
        window=read_window(config),
    )
    moe = MoESpec(
        router=RouterSpec(
            num_experts=config.count("num_local_experts"),
            top_k=config.count("num_experts_per_tok"),
            scoring="sparsemixer",
            # Unlike its name says, it is used at inference too: the width of the mask around the best expert.
            jitter_eps=config.require("router_jitter_noise", float, at_least=0.0),
        ),
        expert_width=config.count("intermediate_size"),
    )
    return build(
        config,
        "phimoe",
        [LayerSpec(attention, moe)] * read_num_layers(config),
        norm="layer",
        head_bias=config.require("lm_head_bias", bool),
    )
