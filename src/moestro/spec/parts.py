"""The pieces that the families' configs share, read the same way everywhere."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from moestro.errors import ConfigError
from moestro.spec.fields import AttentionSpec, LayerSpec, ModelSpec
from moestro.spec.read import ConfigReader
from moestro.spec.rope import RopeReading

# A bound that no model comes near; it keeps a mistyped number from filling the memory with layer descriptions.
MOST_LAYERS = 4096
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Heads:
    num_heads: int
    num_kv_heads: int
    head_dim: int


def read_heads(config: ConfigReader, *, kv_heads_stated: bool = True, head_dim_stated: bool = False) -> Heads:
    """Head counts and width of grouped-query attention.

    kv_heads_stated: num_key_value_heads must be there; otherwise its absence means one key/value head a query head.
    head_dim_stated: head_dim must be there; otherwise its absence means hidden_size / num_attention_heads.
    """
    num_heads = config.count("num_attention_heads")
    if kv_heads_stated:
        num_kv_heads = config.count("num_key_value_heads")
    else:
        num_kv_heads = config.default("num_key_value_heads", int, num_heads, at_least=1)
    if num_heads % num_kv_heads:
        raise config.fail("num_key_value_heads", f"num_attention_heads={num_heads} is not divisible by it")
    if head_dim_stated:
        head_dim = config.count("head_dim")
    else:
        width = config.count("hidden_size")
        stated = config.optional("head_dim", int, at_least=1)
        if stated is None and width % num_heads:
            raise config.fail(
                "hidden_size", f"it is not divisible by num_attention_heads={num_heads}, and head_dim is not stated"
            )
        head_dim = width // num_heads if stated is None else stated
    return Heads(num_heads, num_kv_heads, head_dim)


def gqa(heads: Heads, reading: RopeReading, **options: Any) -> AttentionSpec:
    """Grouped-query attention with the usual softmax scale; options are fields of AttentionSpec."""
    fields: dict[str, Any] = {
        "kind": "gqa",
        "num_heads": heads.num_heads,
        "num_kv_heads": heads.num_kv_heads,
        "head_dim": heads.head_dim,
        "v_head_dim": heads.head_dim,
        "softmax_scale": heads.head_dim**-0.5,
        "rope": reading.rope,
    }
    return AttentionSpec(**(fields | options))


def read_mla(config: ConfigReader, reading: RopeReading) -> AttentionSpec:
    """Multi-head latent attention, as DeepSeek-V2 introduced it (arXiv 2405.04434)."""
    num_heads = config.count("num_attention_heads")
    config.expect("num_key_value_heads", num_heads)
    rope_dim, nope_dim = config.count("qk_rope_head_dim"), config.count("qk_nope_head_dim")
    # transformers writes its own bookkeeping into the file: head_dim is the rotated part there.
    config.expect("head_dim", rope_dim, rope_dim + nope_dim)
    config.expect("qk_head_dim", rope_dim + nope_dim)
    bias = config.default("attention_bias", bool, False)
    return AttentionSpec(
        kind="mla",
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=nope_dim + rope_dim,
        v_head_dim=config.count("v_head_dim"),
        softmax_scale=(nope_dim + rope_dim) ** -0.5 * reading.softmax_factor,
        rope=reading.rope,
        qkv_bias=bias,
        o_bias=bias,
        q_lora_rank=config.optional("q_lora_rank", int, at_least=1),
        kv_lora_rank=config.count("kv_lora_rank"),
        qk_nope_head_dim=nope_dim,
        qk_rope_head_dim=rope_dim,
    )


def read_num_layers(config: ConfigReader) -> int:
    return config.require("num_hidden_layers", int, at_least=1, at_most=MOST_LAYERS)


def read_max_position(config: ConfigReader) -> int:
    """The longest context; 0 with a blocker when the config does not say."""
    return config.require_to_run("max_position_embeddings", int, 0, at_least=1)


def read_window(config: ConfigReader) -> int | None:
    """The sliding window that all layers have; null and absent mean none."""
    return config.optional("sliding_window", int, at_least=1)


def read_layer_windows(config: ConfigReader, num_layers: int, window: int | None) -> list[int | None] | None:
    """The window of each layer from `layer_types`; None when the config has no such list."""
    types = config.optional("layer_types", list)
    if types is None:
        return None
    known = ("sliding_attention", "full_attention")
    if len(types) != num_layers or not all(isinstance(t, str) and t in known for t in types):
        raise config.fail("layer_types", f"it must name {' or '.join(known)} for each of the {num_layers} layers")
    if window is None and "sliding_attention" in types:
        raise config.fail("layer_types", "sliding_attention needs a sliding_window that is in use")
    return [window if t == "sliding_attention" else None for t in types]


def sparse_layers(config: ConfigReader, num_layers: int) -> list[bool]:
    """Qwen's rule for which layers are mixtures: every decoder_sparse_step-th, less those in mlp_only_layers."""
    step = config.default("decoder_sparse_step", int, 1, at_least=1)
    dense = config.optional("mlp_only_layers", list) or []
    if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < num_layers for i in dense):
        raise config.fail("mlp_only_layers", f"it must list layers from 0 to {num_layers - 1}")
    return [i not in dense and (i + 1) % step == 0 for i in range(num_layers)]


def sparse_after_first(config: ConfigReader, num_layers: int) -> list[bool]:
    """DeepSeek's rule: the first first_k_dense_replace layers are dense, then every moe_layer_freq-th is a mixture."""
    first = config.default("first_k_dense_replace", int, 0, at_least=0)
    step = config.default("moe_layer_freq", int, 1, at_least=1)
    return [i >= first and i % step == 0 for i in range(num_layers)]


def groups(config: ConfigReader) -> tuple[int | None, int | None]:
    """num_groups and top_groups of a router; (None, None) when every group is kept, which is the same as none."""
    num_groups = config.optional("n_group", int, at_least=1)
    top_groups = config.optional("topk_group", int, at_least=1)
    if num_groups in (None, 1) and top_groups in (None, 1):
        return None, None
    if num_groups is None or top_groups is None:
        raise config.fail("n_group", "n_group and topk_group are set together")
    return (None, None) if num_groups == top_groups else (num_groups, top_groups)


def build(config: ConfigReader, family: str, layers: Iterable[LayerSpec], **constants: Any) -> ModelSpec:
    """The ModelSpec of these layers, with the fields that every config has, once all keys are accounted for."""
    config.expect("hidden_act", "silu")
    config.expect("is_encoder_decoder", False)
    quantization = config.optional("quantization_config", dict) or None
    if quantization is not None:
        name = quantization.get("quant_method") or quantization.get("quant_algo") or "no quant_method"
        config.blockers.append(
            f"the weights are quantised ({name}); float32, bfloat16 and float16 checkpoints can be run."
        )
    dtype = config.optional(("dtype", "torch_dtype"), str)
    if dtype is not None and dtype.removeprefix("torch.") not in DTYPES:
        raise config.fail("dtype" if config.raw("dtype") else "torch_dtype", f"use {', '.join(DTYPES)}")
    fields: dict[str, Any] = {
        "family": family,
        "architecture": architecture(config),
        "vocab_size": config.count("vocab_size"),
        "width": config.count("hidden_size"),
        "layers": tuple(layers),
        "max_position": read_max_position(config),
        "norm_eps": config.require_to_run("rms_norm_eps", float, 1e-6, at_least=0.0),
        "tied_head": config.default("tie_word_embeddings", bool, False),
        "quantization": quantization,
        "eos_ids": _token_ids(config, "eos_token_id"),
        "bos_id": config.optional("bos_token_id", int, at_least=0),
        "dtype": None if dtype is None else dtype.removeprefix("torch."),
    }
    fields |= constants
    fields["ignored"] = config.finish()
    fields["blockers"] = tuple(dict.fromkeys(config.blockers))
    return ModelSpec(**fields)


def architecture(config: ConfigReader) -> str:
    """The name of the architecture as config.json has it; model_type when it names none."""
    names, model_type = config.optional("architectures", list), config.optional("model_type", str)
    if names:
        if not isinstance(names[0], str):
            raise config.fail("architectures", "it must be a list of names")
        return names[0]
    if model_type is None:
        raise ConfigError(f"{config.where}: architectures and model_type are both missing")
    return model_type


def _token_ids(config: ConfigReader, key: str) -> tuple[int, ...]:
    value = config.raw(key)
    values = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values):
        raise config.fail(key, "it must be a token id or a list of token ids")
    return tuple(values)
