"""Which layers are mixtures, which have windows: the rules of the families against transformers' own."""

from typing import Any

import pytest

from moestro.checkpoint.synth import TINY
from moestro.errors import ConfigError
from moestro.spec.fields import ModelSpec
from moestro.spec.registry import read_spec


def spec(family: str, **changes: Any) -> ModelSpec:
    return read_spec({**TINY[family], **changes})


def windows(model: ModelSpec) -> list[int | None]:
    return [layer.attention.window for layer in model.layers]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"decoder_sparse_step": 2, "mlp_only_layers": []}, (1, 3)),
        ({"decoder_sparse_step": 1, "mlp_only_layers": [2]}, (0, 1, 3)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, (3,)),
        ({"decoder_sparse_step": 3, "mlp_only_layers": []}, (2,)),
    ],
)
@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
def test_qwen_layers(family: str, changes: dict[str, Any], expected: tuple[int, ...]) -> None:
    """C15."""
    assert spec(family, num_hidden_layers=4, **changes).moe_layers == expected


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "glm4_moe"])
def test_first_layers_dense(family: str) -> None:
    """C15."""
    assert spec(family, num_hidden_layers=4).moe_layers == (1, 2, 3)
    assert spec(family, num_hidden_layers=4, first_k_dense_replace=0).moe_layers == (0, 1, 2, 3)
    assert spec(family, num_hidden_layers=5, first_k_dense_replace=1, moe_layer_freq=2).moe_layers == (2, 4)


def test_layer_lists_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"mlp_only_layers=\[4\] cannot be"):
        spec("qwen2_moe", mlp_only_layers=[4])
    with pytest.raises(ConfigError, match="layer_types"):
        spec("gpt_oss", layer_types=["full_attention"])
    with pytest.raises(ConfigError, match="layer_types"):
        spec("gpt_oss", layer_types=["full_attention", "full_attention", "linear_attention"])
    with pytest.raises(ConfigError, match="layer_types"):
        spec("gpt_oss", layer_types=None)
    with pytest.raises(ConfigError, match="sliding_attention needs a sliding_window"):
        spec("gpt_oss", sliding_window=None)


def test_window_of_all_layers() -> None:
    assert windows(spec("mixtral", sliding_window=None)) == [None, None, None]
    assert windows(spec("mixtral", sliding_window=9)) == [9, 9, 9]
    assert windows(spec("qwen3_moe", sliding_window=9, use_sliding_window=True)) == [9, 9, 9]
    assert windows(spec("qwen3_moe", sliding_window=9, use_sliding_window=False)) == [None, None, None]
    with pytest.raises(ConfigError, match="max_window_layers=2 with use_sliding_window=true"):
        spec("qwen3_moe", sliding_window=9, use_sliding_window=True, max_window_layers=2)
    with pytest.raises(ConfigError, match="needs a sliding_window"):
        spec("qwen3_moe", use_sliding_window=True)


def test_windows_of_some_layers() -> None:
    """C78: the windows of one kind of layer are not those of another."""
    assert windows(spec("gpt_oss")) == [6, None, 6]
    off: dict[str, Any] = {"sliding_window": 9, "max_window_layers": 4, "num_hidden_layers": 6}
    assert windows(spec("qwen2_moe", **off)) == [None] * 6
    assert windows(spec("qwen2_moe", **off, use_sliding_window=True)) == [9, None, 9, None, None, None]
    types = ["full_attention"] * 5 + ["sliding_attention"]
    assert windows(spec("qwen2_moe", **off, use_sliding_window=True, layer_types=types)) == [None] * 5 + [9]
    with pytest.raises(ConfigError, match="sliding_attention needs a sliding_window that is in use"):
        spec("qwen2_moe", **off, layer_types=types)


def test_qwen2_windows_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen2MoeConfig(
        num_hidden_layers=7, use_sliding_window=True, sliding_window=9, max_window_layers=5
    )
    ours = windows(
        spec("qwen2_moe", num_hidden_layers=7, use_sliding_window=True, sliding_window=9, max_window_layers=5)
    )
    assert [w is not None for w in ours] == [t == "sliding_attention" for t in config.layer_types]


def test_heads_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"num_key_value_heads=3 cannot be; num_attention_heads=4"):
        spec("mixtral", num_key_value_heads=3)
    with pytest.raises(ConfigError, match="head_dim is missing"):
        spec("gpt_oss", head_dim=None)
    with pytest.raises(ConfigError, match="hidden_size=50 cannot be"):
        spec("mixtral", hidden_size=50)
    with pytest.raises(ConfigError, match="norms of q and k span"):
        spec("olmoe", head_dim=16)
    with pytest.raises(ConfigError, match="num_key_value_heads=2 is not supported"):
        spec("deepseek_v3", num_key_value_heads=2)
    assert spec("granitemoe", num_key_value_heads=None).layers[0].attention.num_kv_heads == 4


def test_router_values_that_only_together_are_wrong() -> None:
    with pytest.raises(ConfigError, match="top_k=9 must lie in"):
        spec("mixtral", num_experts_per_tok=9)
    with pytest.raises(ConfigError, match="not divisible by num_groups=5"):
        spec("deepseek_v3", n_group=5)
    with pytest.raises(ConfigError, match="n_group and topk_group are set together"):
        spec("deepseek_v3", topk_group=None)
    with pytest.raises(ConfigError, match="topk_method='noaux_tc' is not supported"):
        spec("deepseek_v2", topk_method="noaux_tc")
    with pytest.raises(ConfigError, match="scoring_func='softmax' is not supported"):
        spec("deepseek_v3", scoring_func="softmax")
    with pytest.raises(ConfigError, match="norm_topk_prob=True is not supported"):
        spec("deepseek_v2", norm_topk_prob=True)


def test_greedy_routing_has_no_groups() -> None:
    model = spec("deepseek_v2", topk_method="greedy")
    moe = model.layers[1].mlp
    assert moe.router.num_groups is None  # type: ignore[union-attr]


def test_granite_multipliers_may_be_integers() -> None:
    model = spec("granitemoe", embedding_multiplier=12, logits_scaling=6)
    assert (model.embedding_multiplier, model.residual_multiplier, model.logits_divisor) == (12.0, 0.22, 6.0)
    assert model.layers[0].attention.softmax_scale == 0.25


@pytest.mark.parametrize(
    ("family", "qkv", "o"),
    [("qwen3_moe", True, True), ("olmoe", True, True), ("glm4_moe", True, False), ("granitemoe", True, True)],
)
def test_which_projections_attention_bias_means(family: str, qkv: bool, o: bool) -> None:
    attention = spec(family, attention_bias=True).layers[0].attention
    assert (attention.qkv_bias, attention.o_bias) == (qkv, o)
