"""GLM-4.5 and 4.5-Air (arXiv 2508.06471): DeepSeek-V3's router, grouped-query attention, half of a head rotated."""

from moestro.spec.fields import DenseSpec, LayerSpec, ModelSpec, MoESpec, RouterSpec
from moestro.spec.names import ROTARY_BUFFERS, NameMap, dense_mlp, experts, frame, gqa, router, shared_expert
from moestro.spec.parts import build, groups, read_heads, read_max_position, read_num_layers, sparse_after_first
from moestro.spec.parts import gqa as gqa_attention
from moestro.spec.read import ConfigReader
from moestro.spec.rope import read_rope

ARCHITECTURES = ("Glm4MoeForCausalLM",)
MODEL_TYPES = ("glm4_moe",)

_BLOCK = "(mlp|block_sparse_moe)"
NAMES = NameMap(
    [
        *frame(),
        *gqa(),
        *dense_mlp(),
        *experts(_BLOCK, "(gate_proj|w1)", "(up_proj|w3)", "(down_proj|w2)"),
        *router(_BLOCK, "gate"),
        *shared_expert("shared_experts"),
    ],
    ROTARY_BUFFERS,
)


def spec(config: ConfigReader) -> ModelSpec:
    heads = read_heads(config)
    attention = gqa_attention(
        heads,
        read_rope(config, heads.head_dim, read_max_position(config), partial_default=0.5),
        qkv_bias=config.default("attention_bias", bool, False),
        qk_norm="head" if config.default("use_qk_norm", bool, False) else None,
    )
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
        "glm4_moe",
        [LayerSpec(attention, moe if s else dense) for s in sparse],
        num_mtp_layers=config.default(("num_nextn_predict_layers", "num_mtp_layers"), int, 0, at_least=0, at_most=64),
    )
