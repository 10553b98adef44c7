"""Names of checkpoint tensors: every family's rules against its own tensors, and variants in the wild (C22, C25)."""

import pytest

from moestro.checkpoint.synth import TINY
from moestro.spec.names import PREFIXES, NameMap, Rule, Skip, Source, source_shape
from moestro.spec.registry import names_of, read_spec
from moestro.spec.tensors import TensorSpec, model_tensors


@pytest.mark.parametrize("family", TINY)
def test_published_names_come_back_to_their_tensors(family: str) -> None:
    spec = read_spec(TINY[family])
    names, seen, size = names_of(spec), set(), 0
    for target, tensor in model_tensors(spec).items():
        published = list(names.published(target, tensor))
        assert published, target
        for name, source in published:
            assert name not in seen
            seen.add(name)
            assert names.match(name, spec) == source
            assert source.target == target
            shape, numbers = source_shape(source, tensor), 1
            for n in shape:
                numbers *= n
            size += numbers
    assert size == sum(t.size for t in model_tensors(spec).values())


@pytest.mark.parametrize("prefix", PREFIXES)
def test_prefixes(prefix: str) -> None:
    """C22."""
    spec = read_spec(TINY["qwen3_moe"])
    name = f"{prefix}layers.1.mlp.experts.2.up_proj.weight"
    assert names_of(spec).match(name, spec) == Source("layers.1.moe.experts.gate_up.weight", 2, "up")


@pytest.mark.parametrize(
    ("family", "name", "source"),
    [
        ("mixtral", "mlp.experts.3.gate_proj.weight", Source("moe.experts.gate_up.weight", 3, "gate")),
        ("mixtral", "block_sparse_moe.experts.3.w2.weight", Source("moe.experts.down.weight", 3)),
        ("mixtral", "block_sparse_moe.experts.3.w3.weight", Source("moe.experts.gate_up.weight", 3, "up")),
        ("mixtral", "mlp.gate.weight", Source("moe.router.weight")),
        ("olmoe", "block_sparse_moe.experts.0.w1.weight", Source("moe.experts.gate_up.weight", 0, "gate")),
        ("olmoe", "mlp.experts.gate_up_proj", Source("moe.experts.gate_up.weight", None, None, "fused")),
        ("qwen3_moe", "mlp.experts.down_proj.weight", Source("moe.experts.down.weight", None, None, "fused")),
        ("granitemoe", "block_sparse_moe.router.weight", Source("moe.router.weight")),
        ("granitemoe", "mlp.experts.gate_up_proj", Source("moe.experts.gate_up.weight", None, None, "fused")),
        ("phimoe", "mlp.router.weight", Source("moe.router.weight")),
        ("deepseek_v3", "mlp.e_score_correction_bias", Source("moe.selection_bias")),
        ("deepseek_v3", "mlp.gate.e_score_correction_bias", Source("moe.selection_bias")),
        ("gpt_oss", "mlp.router.bias", Source("moe.router.bias")),
    ],
)
def test_spellings(family: str, name: str, source: Source) -> None:
    """C20, C22: w1/w2/w3 against gate/down/up, block_sparse_moe against mlp, fused against one tensor an expert."""
    spec = read_spec(TINY[family])
    expected = Source(f"layers.1.{source.target}", source.expert, source.rows, source.transform)
    assert names_of(spec).match(f"model.layers.1.{name}", spec) == expected


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.experts.02.up_proj.weight",  # not how an index is written
        "model.layers.-1.mlp.gate.weight",
        "model.layers.٣.mlp.gate.weight",  # a digit, but not ASCII
        "model.layers.3.mlp.gate.weight",  # behind the last layer
        "model.layers.1.mlp.experts.2.up_proj.weight.weight",
        "model.layers.1.mlp.experts.99999999999999999999.up_proj.weight",
        "model.model.norm.weight",
        "visual.patch_embed.weight",
        "",
    ],
)
def test_strangers(name: str) -> None:
    spec = read_spec(TINY["qwen3_moe"])
    assert names_of(spec).match(name, spec) is None


def test_rotary_buffers_are_skipped() -> None:
    spec = read_spec(TINY["mixtral"])
    skip = names_of(spec).match("model.layers.0.self_attn.rotary_emb.inv_freq", spec)
    assert skip == Skip("rotary buffer")


@pytest.mark.parametrize("name", ["eh_proj.weight", "enorm.weight", "shared_head.head.weight", "mlp.gate.weight"])
def test_declared_mtp_layers_are_skipped(name: str) -> None:
    """C25: the layer behind the last one, under any prefix, when the config declares it."""
    with_mtp = read_spec({**TINY["deepseek_v3"], "num_nextn_predict_layers": 1})
    without = read_spec(TINY["deepseek_v3"])
    for prefix in ("model.", ""):
        assert isinstance(names_of(with_mtp).match(f"{prefix}layers.3.{name}", with_mtp), Skip)
        assert names_of(without).match(f"{prefix}layers.3.{name}", without) is None
        assert names_of(with_mtp).match(f"{prefix}layers.4.{name}", with_mtp) is None


def test_source_shapes() -> None:
    tensor = TensorSpec((5, 6, 7), "expert", (("gate", 3), ("up", 3)))
    assert source_shape(Source("t"), tensor) == (5, 6, 7)
    assert source_shape(Source("t", 2, "up"), tensor) == (3, 7)
    assert source_shape(Source("t", None, None, "interleaved_transpose"), tensor) == (5, 7, 6)
    assert source_shape(Source("t", None, "k"), TensorSpec((10, 4), "attention", (("q", 8), ("k", 2)))) == (2, 4)


def test_two_rules_for_one_name_are_our_mistake() -> None:
    with pytest.raises(AssertionError, match="two rules"):
        NameMap([Rule("model.a.weight", "x"), Rule("(model.a|model.b).weight", "y")])
