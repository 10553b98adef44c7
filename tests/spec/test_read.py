"""Reading config.json: kinds, spellings, and keys that nobody read."""

from pathlib import Path
from typing import Any

import pytest

from moestro.checkpoint.synth import TINY
from moestro.errors import ConfigError, UnsupportedModelError
from moestro.spec.read import ConfigReader, load_config
from moestro.spec.registry import read_spec


def reader(**raw: Any) -> ConfigReader:
    return ConfigReader(raw, "here")


def test_integer_valued_floats_are_integers() -> None:
    assert reader(n=12.0).require("n", int) == 12
    assert reader(n=12).require("n", float) == 12.0


@pytest.mark.parametrize("value", ["12", 1.5, True, [1], float("nan"), float("inf"), 10**400, -(2**31) - 1])
def test_not_an_integer(value: object) -> None:
    with pytest.raises(ConfigError, match=r"here: n=.* must be an integer"):
        reader(n=value).require("n", int)


def test_bounds_are_named() -> None:
    with pytest.raises(ConfigError, match="heads=0 must be at least 1"):
        reader(heads=0).count("heads")
    with pytest.raises(ConfigError, match="heads=9 must be at most 8"):
        reader(heads=9).require("heads", int, at_most=8)


def test_missing_and_null_are_the_same() -> None:
    for raw in ({}, {"n": None}):
        with pytest.raises(ConfigError, match="here: n is missing"):
            ConfigReader(raw, "here").require("n", int)
        assert ConfigReader(raw, "here").default("n", int, 7) == 7


def test_two_spellings_must_agree() -> None:
    assert reader(a=3, b=3).count(("a", "b")) == 3
    assert reader(b=3).count(("a", "b")) == 3
    with pytest.raises(ConfigError, match="a=3 and b=4 mean the same and differ"):
        reader(a=3, b=4).count(("a", "b"))


def test_expect_names_what_is_supported() -> None:
    reader(act="silu").expect("act", "silu")
    reader().expect("act", "silu")
    with pytest.raises(ConfigError, match='act=\'gelu\' is not supported; supported: "silu" or "swish"'):
        reader(act="gelu").expect("act", "silu", "swish")
    with pytest.raises(ConfigError, match="flag=0 is not supported"):
        reader(flag=0).expect("flag", False)


def test_unread_keys() -> None:
    config = reader(n=1, use_cache=True, gone=None, initializer_range=0.02)
    config.count("n")
    assert config.finish() == ("initializer_range", "use_cache")
    with pytest.raises(ConfigError, match="not understood: new_option=3; an unknown option may change the model"):
        reader(new_option=3).finish()


@pytest.mark.parametrize("family", TINY)
def test_an_unknown_option_is_refused_in_every_family(family: str) -> None:
    with pytest.raises(ConfigError, match="routed_expert_hidden_size=3584"):
        read_spec({**TINY[family], "routed_expert_hidden_size": 3584})


@pytest.mark.parametrize("family", TINY)
def test_an_option_not_implemented_is_refused_in_every_family(family: str) -> None:
    with pytest.raises(ConfigError, match="hidden_act='gelu' is not supported"):
        read_spec({**TINY[family], "hidden_act": "gelu"})


def test_load_config_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        load_config(tmp_path)
    file = tmp_path / "config.json"
    for text, message in [("{", "not valid JSON"), ("[1]", "holds a list"), ("[" * 100_000, "not valid JSON")]:
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            load_config(file)
    file.write_bytes(b"\xff\xfe{}")
    with pytest.raises(ConfigError, match="not valid JSON"):
        load_config(tmp_path)
    file.unlink()
    file.mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)


def test_unknown_architecture_lists_the_known_ones() -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"'DbrxForCausalLM' is not supported; supported: .*OlmoeForCausalLM"
    ):
        read_spec({"architectures": ["DbrxForCausalLM"]})
    with pytest.raises(ConfigError, match="architectures and model_type are both missing"):
        read_spec({})
    with pytest.raises(ConfigError, match="must be a list of names"):
        read_spec({"architectures": [7]})


def test_model_type_stands_in_for_architectures() -> None:
    config = {k: v for k, v in TINY["olmoe"].items() if k != "architectures"}
    assert read_spec(config).family == "olmoe"
    kimi = {**TINY["deepseek_v3"], "model_type": "kimi_k2", "architectures": []}
    assert read_spec(kimi).family == "deepseek_v3"


def test_several_end_tokens() -> None:
    """C97: int, list or absent."""
    assert read_spec(TINY["glm4_moe"]).eos_ids == (2, 3, 5)
    assert read_spec(TINY["olmoe"]).eos_ids == (2,)
    assert read_spec(TINY["mixtral"]).eos_ids == ()
    with pytest.raises(ConfigError, match="eos_token_id"):
        read_spec({**TINY["olmoe"], "eos_token_id": [2, "</s>"]})


def test_dtype_under_both_names() -> None:
    assert read_spec({**TINY["olmoe"], "torch_dtype": "bfloat16"}).dtype == "bfloat16"
    assert read_spec({**TINY["olmoe"], "dtype": "torch.float16"}).dtype == "float16"
    with pytest.raises(ConfigError, match="torch_dtype='int8' cannot be; use float32"):
        read_spec({**TINY["olmoe"], "torch_dtype": "int8"})
