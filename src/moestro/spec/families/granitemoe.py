"""Granite 3.0 and 3.1 MoE: four multipliers, softmax over the chosen experts, one tensor for all experts."""

from moestro.spec.fields import LayerSpec, ModelSpec, MoESpec, RouterSpec
from moestro.spec.names import ROTARY_BUFFERS, NameMap, Rule, frame, fused_experts, gqa, router
from moestro.spec.parts import build, read_heads, read_max_position, read_num_layers
from moestro.spec.parts import gqa as gqa_attention
from moestro.spec.read import ConfigReader
from moestro.spec.rope import read_rope

ARCHITECTURES = ("GraniteMoeForCausalLM",)
MODEL_TYPES = ("granitemoe",)

_BLOCK = "(block_sparse_moe|mlp)"
_THEIRS, _OURS = f"model.layers.{{layer}}.{_BLOCK}.", "layers.{layer}.moe.experts."
NAMES = NameMap(
    [
        *frame(),
        *gqa(),
        *router(_BLOCK, "(router.layer|router|gate)"),
        Rule(f"{_THEIRS}input_linear.weight", f"{_OURS}gate_up.weight"),
        Rule(f"{_THEIRS}output_linear.weight", f"{_OURS}down.weight"),
        *fused_experts(_BLOCK),
    ],
    ROTARY_BUFFERS,
)


def spec(config: ConfigReader) -> ModelSpec:
    heads = read_heads(config, kv_heads_stated=False)
    bias = config.default("attention_bias", bool, False)
    attention = gqa_attention(
        heads,
        read_rope(config, heads.head_dim, read_max_position(config)),
        qkv_bias=bias,
        o_bias=bias,
        softmax_scale=config.require_to_run("attention_multiplier", float, heads.head_dim**-0.5, at_least=0.0),
    )
    moe = MoESpec(
        router=RouterSpec(
            num_experts=config.count(("num_local_experts", "num_experts")),
            top_k=config.count("num_experts_per_tok"),
            scoring="topk_softmax",
        ),
        expert_width=config.count("intermediate_size"),
    )
    divisor = config.require_to_run("logits_scaling", float, 1.0, at_least=0.0)
    if divisor == 0:
        raise config.fail("logits_scaling", "the logits are divided by it")
    return build(
        config,
        "granitemoe",
        [LayerSpec(attention, moe)] * read_num_layers(config),
        embedding_multiplier=config.require_to_run("embedding_multiplier", float, 1.0, at_least=0.0),
        residual_multiplier=config.require_to_run("residual_multiplier", float, 1.0, at_least=0.0),
        logits_divisor=divisor,
    )
