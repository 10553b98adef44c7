"""DeepSeek-V2 and V2-Lite (arXiv 2405.04434): latent attention, ungated shared experts, softmax routing in groups."""

from moestro.spec.fields import DenseSpec, LayerSpec, ModelSpec, MoESpec, RouterSpec
from moestro.spec.names import ROTARY_BUFFERS, NameMap, dense_mlp, experts, frame, mla, router, shared_expert
from moestro.spec.parts import build, groups, read_max_position, read_mla, read_num_layers, sparse_after_first
from moestro.spec.read import ConfigReader
from moestro.spec.rope import read_rope

ARCHITECTURES = ("DeepseekV2ForCausalLM",)
MODEL_TYPES = ("deepseek_v2",)

_BLOCK = "(mlp|block_sparse_moe)"
NAMES = NameMap(
    [
        *frame(),
        *mla(),
        *dense_mlp(),
        *experts(_BLOCK, "(gate_proj|w1)", "(up_proj|w3)", "(down_proj|w2)"),
        *router(_BLOCK, "gate"),
        *shared_expert("shared_experts"),
    ],
    ROTARY_BUFFERS,
)


def spec(config: ConfigReader) -> ModelSpec:
    rope = read_rope(config, config.count("qk_rope_head_dim"), read_max_position(config), interleaved=True)
    attention = read_mla(config, rope)
    config.expect("scoring_func", "softmax")
    config.expect("topk_method", "greedy", "group_limited_greedy")
    # With true, the authors' code and transformers disagree; every released model says false.
    config.expect("norm_topk_prob", False)
    config.expect("mlp_bias", False)
    num_groups, top_groups = groups(config)
    if config.require("topk_method", str) == "greedy":
        num_groups = top_groups = None
    width = config.count("moe_intermediate_size")
    moe = MoESpec(
        router=RouterSpec(
            num_experts=config.count(("n_routed_experts", "num_experts")),
            top_k=config.count("num_experts_per_tok"),
            routed_scaling_factor=config.require("routed_scaling_factor", float),
            num_groups=num_groups,
            top_groups=top_groups,
        ),
        expert_width=width,
        shared_width=width * config.default("n_shared_experts", int, 0, at_least=0),
    )
    dense = DenseSpec(config.count("intermediate_size"))
    sparse = sparse_after_first(config, read_num_layers(config))
    return build(config, "deepseek_v2", [LayerSpec(attention, moe if s else dense) for s in sparse])
