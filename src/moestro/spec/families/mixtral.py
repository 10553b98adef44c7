"""Mixtral 8x7B and 8x22B (arXiv 2401.04088): every layer a mixture; `intermediate_size` is the width of an expert."""

from moestro.spec.fields import LayerSpec, ModelSpec, MoESpec, RouterSpec
from moestro.spec.names import ROTARY_BUFFERS, NameMap, experts, frame, gqa, router
from moestro.spec.parts import build, read_heads, read_max_position, read_num_layers, read_window
from moestro.spec.parts import gqa as gqa_attention
from moestro.spec.read import ConfigReader
from moestro.spec.rope import read_rope

ARCHITECTURES = ("MixtralForCausalLM",)
MODEL_TYPES = ("mixtral",)

_BLOCK = "(block_sparse_moe|mlp)"
NAMES = NameMap(
    [
        *frame(),
        *gqa(),
        *experts(_BLOCK, "(w1|gate_proj)", "(w3|up_proj)", "(w2|down_proj)"),
        *router(_BLOCK, "gate"),
    ],
    ROTARY_BUFFERS,
)


def spec(config: ConfigReader) -> ModelSpec:
    heads = read_heads(config)
    config.expect("attention_bias", False)
    config.ignore("router_jitter_noise")  # training only; at inference in Phi-3.5-MoE alone
    attention = gqa_attention(
        heads,
        read_rope(config, heads.head_dim, read_max_position(config)),
        window=read_window(config),
    )
    moe = MoESpec(
        router=RouterSpec(
            num_experts=config.count(("num_local_experts", "num_experts")),
            top_k=config.count("num_experts_per_tok"),
            # The config has no such field; the reference divides by the sum.
            renormalize=True,
        ),
        expert_width=config.count("intermediate_size"),
    )
    layers = [LayerSpec(attention, moe)] * read_num_layers(config)
    return build(config, "mixtral", layers)
