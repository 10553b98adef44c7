"""gpt-oss 20b and 120b: sinks, alternating windows, biases, a clamped activation, experts stored transposed."""

from moestro.spec.fields import LayerSpec, ModelSpec, MoESpec, RouterSpec
from moestro.spec.names import ROTARY_BUFFERS, NameMap, Rule, frame, gqa, router
from moestro.spec.parts import build, read_heads, read_layer_windows, read_max_position, read_num_layers, read_window
from moestro.spec.parts import gqa as gqa_attention
from moestro.spec.read import ConfigReader
from moestro.spec.rope import read_rope

ARCHITECTURES = ("GptOssForCausalLM",)
MODEL_TYPES = ("gpt_oss",)

_THEIRS, _OURS = "model.layers.{layer}.mlp.experts.", "layers.{layer}.moe.experts."
NAMES = NameMap(
    [
        *frame(),
        *gqa(),
        *router("mlp", "router"),
        Rule(f"{_THEIRS}gate_up_proj", f"{_OURS}gate_up.weight", None, "interleaved_transpose"),
        Rule(f"{_THEIRS}gate_up_proj_bias", f"{_OURS}gate_up.bias", None, "interleaved"),
        Rule(f"{_THEIRS}down_proj", f"{_OURS}down.weight", None, "transpose"),
        Rule(f"{_THEIRS}down_proj_bias", f"{_OURS}down.bias"),
    ],
    ROTARY_BUFFERS,
)


def spec(config: ConfigReader) -> ModelSpec:
    heads = read_heads(config, head_dim_stated=True)
    rope = read_rope(config, heads.head_dim, read_max_position(config))
    if rope.rope.original_max_position is not None:
        config.expect("initial_context_length", rope.rope.original_max_position)
    bias = config.require("attention_bias", bool)
    # The slope of the activation, whatever hidden_act says; no other value was ever released.
    config.expect("swiglu_alpha", 1.702)
    num_layers = read_num_layers(config)
    moe = MoESpec(
        router=RouterSpec(
            num_experts=config.count(("num_local_experts", "num_experts")),
            top_k=config.count(("num_experts_per_tok", "experts_per_token")),
            scoring="topk_softmax",
        ),
        expert_width=config.count("intermediate_size"),
        activation="swiglu_clamped",
        activation_limit=config.require("swiglu_limit", float, at_least=0.0),
        expert_bias=True,
        router_bias=True,
    )
    windows = read_layer_windows(config, num_layers, read_window(config))
    if windows is None:
        raise config.fail("layer_types", "it must name the attention of each layer")
    layers = [
        LayerSpec(gqa_attention(heads, rope, qkv_bias=bias, o_bias=bias, sinks=True, window=window), moe)
        for window in windows
    ]
    return build(config, "gpt_oss", layers)
