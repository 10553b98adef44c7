"""DeepSeek-V3, R1, V3.1 (arXiv 2412.19437) and Kimi-K2: sigmoid routing with a selection bias and groups.

The next-token-prediction layers behind the last layer are named and left out.
"""

from moestro.spec.fields import DenseSpec, LayerSpec, ModelSpec, MoESpec, RouterSpec
from moestro.spec.names import ROTARY_BUFFERS, NameMap, dense_mlp, experts, frame, mla, router, shared_expert
from moestro.spec.parts import build, groups, read_max_position, read_mla, read_num_layers, sparse_after_first
from moestro.spec.read import ConfigReader
from moestro.spec.rope import read_rope

ARCHITECTURES = ("DeepseekV3ForCausalLM",)
MODEL_TYPES = ("deepseek_v3", "kimi_k2")

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
    rope = read_rope(
        config,
        config.count("qk_rope_head_dim"),
        read_max_position(config),
        interleaved=config.default("rope_interleave", bool, True),
    )
    attention = read_mla(config, rope)
    config.expect("scoring_func", "sigmoid")
    config.expect("topk_method", "noaux_tc")
    num_groups, top_groups = groups(config)
    width = config.count("moe_intermediate_size")
    moe = MoESpec(
        router=RouterSpec(
            num_experts=config.count(("n_routed_experts", "num_local_experts")),
            top_k=config.count("num_experts_per_tok"),
            scoring="sigmoid",
            renormalize=config.require("norm_topk_prob", bool),
            routed_scaling_factor=config.require("routed_scaling_factor", float),
            num_groups=num_groups,
            top_groups=top_groups,
            group_score="top2_sum",
        ),
        expert_width=width,
        selection_bias=True,
        shared_width=width * config.default("n_shared_experts", int, 0, at_least=0),
    )
    dense = DenseSpec(config.count("intermediate_size"))
    sparse = sparse_after_first(config, read_num_layers(config))
    return build(
        config,
        "deepseek_v3",
        [LayerSpec(attention, moe if s else dense) for s in sparse],
        num_mtp_layers=config.default(("num_nextn_predict_layers", "num_mtp_layers"), int, 0, at_least=0, at_most=64),
    )
