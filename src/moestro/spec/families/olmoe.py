"""OLMoE-1B-7B (arXiv 2409.02060): norms over all heads of q and k together, routing weights not renormalised."""

from moestro.errors import ConfigError
from moestro.spec.fields import LayerSpec, ModelSpec, MoESpec, RouterSpec
from moestro.spec.names import ROTARY_BUFFERS, NameMap, experts, frame, gqa, router
from moestro.spec.parts import build, read_heads, read_max_position, read_num_layers
from moestro.spec.parts import gqa as gqa_attention
from moestro.spec.read import ConfigReader
from moestro.spec.rope import read_rope

ARCHITECTURES = ("OlmoeForCausalLM",)
MODEL_TYPES = ("olmoe",)

_BLOCK = "(mlp|block_sparse_moe)"
NAMES = NameMap(
    [
        *frame(),
        *gqa(),
        *experts(_BLOCK, "(gate_proj|w1)", "(up_proj|w3)", "(down_proj|w2)"),
        *router(_BLOCK, "gate"),
    ],
    ROTARY_BUFFERS,
)


def spec(config: ConfigReader) -> ModelSpec:
    heads = read_heads(config, kv_heads_stated=False)
    width = config.count("hidden_size")
    if heads.head_dim * heads.num_heads != width:
        raise ConfigError(
            f"{config.where}: head_dim={heads.head_dim} must be hidden_size / num_attention_heads; "
            "the norms of q and k span all of it"
        )
    bias = config.default("attention_bias", bool, False)
    attention = gqa_attention(
        heads,
        read_rope(config, heads.head_dim, read_max_position(config)),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="full",
        clip_qkv=_clip(config),
    )
    moe = MoESpec(
        router=RouterSpec(
            num_experts=config.count(("num_experts", "num_local_experts")),
            top_k=config.count("num_experts_per_tok"),
            renormalize=config.require("norm_topk_prob", bool),
        ),
        expert_width=config.count("intermediate_size"),
    )
    return build(config, "olmoe", [LayerSpec(attention, moe)] * read_num_layers(config))


def _clip(config: ConfigReader) -> float | None:
    clip = config.optional("clip_qkv", float)
    if clip is not None and clip <= 0:
        raise config.fail("clip_qkv", "it must be a positive number or null")
    return clip
