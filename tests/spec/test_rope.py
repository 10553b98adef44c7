"""Rotary embeddings: frequencies and factors against transformers, for each family and each type (C84, C85)."""

import copy
import math
from typing import Any

import pytest

from moestro.checkpoint.synth import TINY
from moestro.errors import ConfigError
from moestro.spec.fields import AttentionSpec, RopeSpec
from moestro.spec.registry import read_spec
from moestro.spec.rope import inverse_frequencies, yarn_correction_range

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
rope_utils = pytest.importorskip("transformers.modeling_rope_utils")

THETA = 50_000.0


def scaling(kind: str, pairs: int, **changes: Any) -> dict[str, Any]:
    by_kind: dict[str, dict[str, Any]] = {
        "default": {},
        "linear": {"factor": 3.0},
        "llama3": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
        "yarn": {"factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 20, "beta_slow": 1.5},
        "longrope": {
            "short_factor": [1.0 + 0.1 * i for i in range(pairs)],
            "long_factor": [1.0 + 0.7 * i for i in range(pairs)],
            "original_max_position_embeddings": 128,
        },
    }
    return {"rope_type": kind, **by_kind[kind], **changes}


def attention(config: dict[str, Any]) -> tuple[AttentionSpec, RopeSpec]:
    found = read_spec(config).layers[0].attention
    assert found.rope is not None
    return found, found.rope


def with_rope(family: str, rope: dict[str, Any]) -> dict[str, Any]:
    config = {k: v for k, v in TINY[family].items() if k != "original_max_position_embeddings"}
    if family == "mixtral":
        config["head_dim"] = 12  # transformers fails on the null it writes itself when a scaling is set
    return {**config, "rope_theta": THETA, "rope_scaling": rope}


def reference(config: dict[str, Any], context: int | None = None) -> tuple[list[float], float]:
    """Inverse frequencies and cos/sin factor of transformers' own model of this config."""
    theirs = transformers.AutoConfig.for_model(**copy.deepcopy(config))  # it writes into nested objects
    kind = theirs.rope_parameters["rope_type"]
    if kind == "default":
        with torch.device("meta"):
            model = transformers.AutoModel.from_config(theirs)
        function = model.rotary_emb.compute_default_rope_parameters
        frequencies, factor = function(theirs)
    else:
        frequencies, factor = rope_utils.ROPE_INIT_FUNCTIONS[kind](theirs, device="cpu", seq_len=context)
    return frequencies.tolist(), factor


KINDS = ["default", "linear", "llama3", "yarn", "longrope"]


@pytest.mark.parametrize("family", [f for f in TINY if f not in ("phimoe",)])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_transformers(family: str, kind: str) -> None:
    pairs = attention(with_rope(family, {"type": "default"}))[1].rotary_dim // 2
    config = with_rope(family, scaling(kind, pairs))
    _, rope = attention(config)
    for context in (None, 128, 129):  # longrope's border
        expected, factor = reference(config, context)
        assert inverse_frequencies(rope, context) == pytest.approx(expected, rel=1e-5)
        assert rope.cos_sin_factor == pytest.approx(factor)
    if kind == "longrope":
        assert rope.long_cos_sin_factor == rope.cos_sin_factor


@pytest.mark.parametrize("family", TINY)
def test_the_family_as_it_is_released(family: str) -> None:
    _, rope = attention(TINY[family])
    expected, factor = reference(TINY[family])
    assert inverse_frequencies(rope) == pytest.approx(expected, rel=1e-5)
    if family != "phimoe":
        assert rope.cos_sin_factor == pytest.approx(factor)


def test_phimoe_states_its_own_factors() -> None:
    """Its two factors replace the formula; short up to the original context, long beyond."""
    config = TINY["phimoe"]
    _, rope = attention(config)
    assert (rope.cos_sin_factor, rope.long_cos_sin_factor, rope.original_max_position) == (1.05, 1.2, 64)
    for context in (64, 65):
        assert inverse_frequencies(rope, context) == pytest.approx(reference(config, context)[0], rel=1e-5)
    assert inverse_frequencies(rope, 64) != inverse_frequencies(rope, 65)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("mscale", [(0.707, 0.707), (1.0, 1.0), (1.0, 0.0), (1.0, 0.5), (None, None)])
def test_mla_softmax_scale_equals_transformers(family: str, mscale: tuple[float | None, float | None]) -> None:
    """C84: mscale_all_dim goes into the softmax scale, squared."""
    config = with_rope(family, scaling("yarn", 4, mscale=mscale[0], mscale_all_dim=mscale[1]))
    ours, rope = attention(config)
    theirs = transformers.AutoConfig.for_model(**copy.deepcopy(config))  # it writes into nested objects
    with torch.device("meta"):
        layer = transformers.AutoModel.from_config(theirs).layers[0].self_attn
    assert ours.softmax_scale == pytest.approx(layer.scaling, rel=1e-12)
    assert rope.cos_sin_factor == pytest.approx(reference(config)[1], rel=1e-12)


def test_yarn_figures() -> None:
    """C84: the published numbers of DeepSeek-V2-Lite and its variants."""

    def read(**changes: Any) -> tuple[AttentionSpec, RopeSpec]:
        rope = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, **changes}
        return attention(with_rope("deepseek_v2", rope))

    plain = attention(with_rope("deepseek_v2", {"type": "default"}))[0].softmax_scale
    ours, rope = read(mscale=0.707, mscale_all_dim=0.707)
    assert rope.cos_sin_factor == 1.0
    assert ours.softmax_scale / plain == pytest.approx((0.1 * 0.707 * math.log(40) + 1) ** 2)
    ours, rope = read(mscale=1.0, mscale_all_dim=0)
    assert rope.cos_sin_factor == pytest.approx(1.369, abs=5e-4)
    assert ours.softmax_scale == pytest.approx(plain)
    assert read(attention_factor=1.0)[1].cos_sin_factor == 1.0


def test_yarn_range_of_gpt_oss_is_not_rounded() -> None:
    """C85."""
    rope = RopeSpec(150_000.0, 64, kind="yarn", factor=32.0, original_max_position=4096, truncate=False)
    assert yarn_correction_range(rope) == pytest.approx((8.09, 17.40), abs=5e-3)
    rounded = RopeSpec(150_000.0, 64, kind="yarn", factor=32.0, original_max_position=4096)
    assert yarn_correction_range(rounded) == (8, 18)
    assert attention(TINY["gpt_oss"])[1].truncate is False
    absent = {k: v for k, v in TINY["gpt_oss"]["rope_scaling"].items() if k != "truncate"}
    assert attention(with_rope("gpt_oss", absent))[1].truncate is True


def test_always_filled_default_is_not_yarn() -> None:
    """C84: transformers 5 writes rope_parameters for every model."""
    config = {k: v for k, v in TINY["olmoe"].items() if k != "rope_theta"}
    _, rope = attention({**config, "rope_parameters": {"rope_type": "default", "rope_theta": 777.0}})
    assert (rope.kind, rope.theta) == ("default", 777.0)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"type": "default", "factor": 4.0}, r"not understood: factor=4\.0"),
        ({"type": "linear", "factor": 4.0, "beta_fast": 32}, "not understood: beta_fast=32"),
        ({"type": "dynamic", "factor": 4.0}, "rope_type='dynamic' is not supported; supported: default, linear"),
        ({"type": "yarn"}, "factor is missing"),
        ({"type": "yarn", "rope_type": "linear", "factor": 4.0}, "mean the same and differ"),
        ({"type": "yarn", "factor": 0.5}, "factor=0.5 must be at least 1"),
        ({"type": "yarn", "factor": 4, "original_max_position_embeddings": 64, "beta_fast": 1e-9}, "leave no ramp"),
        ({"type": "llama3", "factor": 4, "low_freq_factor": 4, "high_freq_factor": 1}, "must be larger than low_freq"),
        ({"type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 6}, "list of 6 positive numbers"),
        ({"type": "longrope", "short_factor": ["a"] * 6, "long_factor": [1.0] * 6}, "must be a number"),
        ({"rope_theta": 3.0, "type": "default"}, "rope_theta=50000 and .* differ"),
        ({"full_attention": {"rope_type": "default"}}, "not understood: full_attention"),
        ({"type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
    ],
)
def test_rope_keys_that_are_unknown_unused_or_wrong(rope: dict[str, Any], message: str) -> None:
    """C84."""
    with pytest.raises(ConfigError, match=message):
        read_spec(with_rope("mixtral", rope))


def test_two_rope_objects_must_agree() -> None:
    config = with_rope("mixtral", {"type": "linear", "factor": 2.0})
    with pytest.raises(ConfigError, match="rope_parameters and rope_scaling are both set and differ"):
        read_spec({**config, "rope_parameters": {"rope_type": "default"}})


def test_missing_theta_blocks_running() -> None:
    config = {k: v for k, v in TINY["mixtral"].items() if k != "rope_theta"}
    assert read_spec(config).blockers == (
        "rope_theta is missing from config.json, and no default is right for released models.",
    )


def test_partial_rotation() -> None:
    assert attention(TINY["glm4_moe"])[1].rotary_dim == 8
    assert attention({**TINY["glm4_moe"], "partial_rotary_factor": 0.25})[1].rotary_dim == 4
    with pytest.raises(ConfigError, match="must be even"):
        read_spec({**TINY["glm4_moe"], "partial_rotary_factor": 0.2})


def test_interleaved_pairs() -> None:
    assert attention(TINY["deepseek_v2"])[1].interleaved
    assert attention(TINY["deepseek_v3"])[1].interleaved
    assert not attention({**TINY["deepseek_v3"], "rope_interleave": False})[1].interleaved
    assert not attention(TINY["glm4_moe"])[1].interleaved
