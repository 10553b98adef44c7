"""The released configs: every one is read, and its sizes are exact."""

import json
from dataclasses import replace

import pytest

from moestro.spec.count import active_params, kv_bytes_per_token, total_params, weight_bytes
from moestro.spec.describe import describe
from moestro.spec.fields import ModelSpec, MoESpec
from moestro.spec.registry import read_spec
from moestro.spec.tensors import model_tensors
from tests.spec.real import SIZES, config


def moe_of(spec: ModelSpec) -> MoESpec:
    moe = spec.layers[spec.moe_layers[-1]].mlp
    assert isinstance(moe, MoESpec)
    return moe


@pytest.mark.parametrize("name", SIZES)
def test_total_params(name: str) -> None:
    spec = read_spec(config(name))
    assert spec.family == SIZES[name]["family"]
    assert total_params(spec) == SIZES[name]["total_params"]


@pytest.mark.parametrize("name", SIZES)
def test_active_params_leave_out_the_input_embedding(name: str) -> None:
    spec = read_spec(config(name))
    embedding = 0 if spec.tied_head else spec.vocab_size * spec.width
    # The published sheet leaves the bias of one LayerNorm of Phi-3.5-MoE out.
    slack = spec.width if spec.norm == "layer" else 0
    assert active_params(spec) == SIZES[name]["active_params_with_embeddings"] - embedding + slack


@pytest.mark.parametrize("name", [n for n, s in SIZES.items() if s["checkpoint_bytes"]])
def test_weight_bytes_against_the_files(name: str) -> None:
    spec, on_disk = read_spec(config(name)), SIZES[name]["checkpoint_bytes"]
    weights = weight_bytes(spec)
    assert weights.estimate == (spec.quantization is not None)
    if spec.family == "gpt_oss" or not weights.estimate:
        assert weights.value == on_disk
    else:
        # DeepSeek-V3's files include the next-token-prediction layer, about 2 % of the model.
        assert weights.value is not None
        assert 0.97 * on_disk < weights.value <= on_disk


def test_kv_bytes() -> None:
    """One latent of 576 numbers a layer against keys and values of all heads."""
    assert kv_bytes_per_token(read_spec(config("DeepSeek-V3")), "bfloat16") == 61 * 576 * 2
    assert kv_bytes_per_token(read_spec(config("Qwen3-30B-A3B")), "bfloat16") == 48 * 2 * 4 * 128 * 2


@pytest.mark.parametrize("name", SIZES)
def test_described_models_say_why_they_cannot_run(name: str) -> None:
    spec = read_spec(config(name))
    text = " ".join(spec.blockers)
    if spec.quantization is not None:
        assert str(spec.quantization["quant_method"]) in text
    elif name == "Phi-3.5-MoE-instruct":
        assert all(key in text for key in ("short_factor", "long_factor", "short_mscale", "long_mscale"))
    elif spec.family == "granitemoe":
        # These copies lack what makes Granite Granite; 1.0 would be a wrong guess.
        assert all(key in text for key in ("attention_multiplier", "logits_scaling", "residual_multiplier"))
    else:
        assert spec.blockers == ()


@pytest.mark.parametrize("name", SIZES)
def test_describe_is_json(name: str) -> None:
    spec = read_spec(config(name))
    said = json.loads(json.dumps(describe(spec)))
    assert said["total_params"] == SIZES[name]["total_params"]
    assert said["num_experts"] == moe_of(spec).router.num_experts
    assert said["num_moe_layers"] == len(spec.moe_layers)
    assert "input embedding" in said["active_params_counts"]


@pytest.mark.parametrize("name", SIZES)
def test_both_forms_of_rope_mean_the_same(name: str) -> None:
    """C84: what transformers 5 writes for the same model, with `type` beside `rope_type`."""
    old = config(name)
    if "rope_theta" not in old:
        pytest.skip("this partial copy has no rope fields")
    new = {k: v for k, v in old.items() if k not in ("rope_theta", "rope_scaling", "partial_rotary_factor")}
    scaling = old.get("rope_scaling") or {"type": "default"}
    kind = scaling.get("rope_type") or scaling["type"]
    new["rope_parameters"] = {**scaling, "rope_type": kind, "rope_theta": old["rope_theta"]}
    if "partial_rotary_factor" in old:
        new["rope_parameters"]["partial_rotary_factor"] = old["partial_rotary_factor"]
    assert read_spec(new).layers == read_spec(old).layers


def test_what_the_families_state() -> None:
    """Spot checks of fields that are easy to read wrongly; README of the configs, traps 6 to 12."""
    mixtral, qwen1, qwen3 = (read_spec(config(n)) for n in ("Mixtral-8x7B-v0.1", "Qwen1.5-MoE-A2.7B", "Qwen3-30B-A3B"))
    v2, v2_lite, v3 = (read_spec(config(n)) for n in ("DeepSeek-V2", "DeepSeek-V2-Lite", "DeepSeek-V3"))
    air, oss, phi = (read_spec(config(n)) for n in ("GLM-4.5-Air", "gpt-oss-20b", "Phi-3.5-MoE-instruct"))
    assert moe_of(mixtral).router.renormalize
    assert not moe_of(qwen1).router.renormalize
    assert moe_of(qwen1).shared_gate
    assert read_spec(config("Qwen2-57B-A14B")).layers[0].attention.qkv_bias
    assert qwen3.layers[0].attention.head_dim == 128
    assert qwen3.layers[0].attention.window is None
    assert (moe_of(v2).router.num_groups, moe_of(v2).router.top_groups, moe_of(v2).router.group_score) == (8, 3, "max")
    assert moe_of(v2_lite).router.num_groups is None
    assert moe_of(v2_lite).shared_width == 2 * 1408
    assert v2_lite.layers[0].attention.q_lora_rank is None
    assert (moe_of(v3).router.num_groups, moe_of(v3).router.group_score) == (8, "top2_sum")
    assert moe_of(v3).selection_bias
    assert v3.num_mtp_layers == 1
    assert moe_of(read_spec(config("Kimi-K2-Instruct"))).router.num_groups is None
    assert air.layers[0].attention.rope is not None
    assert air.layers[0].attention.rope.rotary_dim == 64
    assert air.layers[0].attention.qk_norm is None
    assert read_spec(config("GLM-4.5")).layers[0].attention.qk_norm == "head"
    assert air.eos_ids == (151329, 151336, 151338)
    assert [layer.attention.window for layer in oss.layers[:3]] == [128, None, 128]
    assert oss.layers[0].attention.head_dim == 64
    assert phi.head_bias
    assert phi.norm == "layer"


@pytest.mark.parametrize("name", ["DeepSeek-V3", "gpt-oss-20b", "GLM-4.5"])
def test_only_selection_bias_and_sinks_stay_float32(name: str) -> None:
    """C08."""
    tensors = model_tensors(read_spec(config(name)))
    kept = {n.split(".", 2)[2] for n, t in tensors.items() if t.precision == "float32"}
    assert kept == ({"attn.sinks"} if name == "gpt-oss-20b" else {"moe.selection_bias"})


def test_config_dtype_does_not_change_the_count() -> None:
    spec = read_spec(config("DeepSeek-V2-Lite"))
    half, full = weight_bytes(spec, "bfloat16").value, weight_bytes(spec, "float32").value
    assert half is not None
    assert full == 2 * half
    assert weight_bytes(replace(spec, dtype=None)).value is None
