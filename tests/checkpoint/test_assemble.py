"""Assembly: every tensor once, none left over, each fault with its name (C08, C20, C22, C23, C25, C27)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moestro.checkpoint.assemble import AssemblyPlan, load_tensors, plan_assembly
from moestro.checkpoint.index import read_index
from moestro.checkpoint.synth import TINY, write_checkpoint
from moestro.errors import CheckpointError
from moestro.spec.fields import ModelSpec
from moestro.spec.registry import names_of, read_spec
from moestro.spec.tensors import model_tensors

Tensors = dict[str, torch.Tensor]


def plan(folder: Path, config: dict[str, Any] | None = None) -> AssemblyPlan:
    spec = read_spec(config if config is not None else folder)
    return plan_assembly(spec, names_of(spec), read_index(folder))


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Tensors:
    return load_tensors(plan(folder), dtype)


def tiny(family: str, folder: Path, **changes: Any) -> tuple[Path, Tensors]:
    """A checkpoint, and its tensors by their names in the file."""
    write_checkpoint({**TINY[family], **changes}, folder)
    return folder, load_file(folder / "model.safetensors")


def resave(folder: Path, tensors: Tensors) -> Path:
    save_file(
        {name: t.clone(memory_format=torch.contiguous_format) for name, t in tensors.items()},
        folder / "model.safetensors",
    )
    return folder


def same(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("family", TINY)
def test_everything_is_filled(family: str, tmp_path: Path) -> None:
    folder, stored = tiny(family, tmp_path)
    calls: list[tuple[int, int]] = []
    the_plan = plan(folder)
    loaded = load_tensors(the_plan, torch.float32, progress=lambda done, total: calls.append((done, total)))
    spec = read_spec(folder)
    assert {n: tuple(t.shape) for n, t in loaded.items()} == {n: t.shape for n, t in model_tensors(spec).items()}
    assert all(t.is_contiguous() for t in loaded.values())
    # Any order of the same numbers has the same sum of squares: nothing was read twice or dropped.
    squares = sum(t.double().square().sum() for t in stored.values())
    assert sum(t.double().square().sum() for t in loaded.values()) == pytest.approx(float(squares), rel=1e-12)
    assert calls[-1] == (the_plan.read_bytes, the_plan.read_bytes)
    assert the_plan.read_bytes == sum(t.nbytes for t in stored.values())


def test_rows_and_experts_go_where_they_belong(tmp_path: Path) -> None:
    folder, stored = tiny("mixtral", tmp_path)
    loaded = load(folder)
    attention, block = "model.layers.1.self_attn.", "model.layers.1.block_sparse_moe."
    qkv = torch.cat([stored[f"{attention}{p}_proj.weight"] for p in "qkv"])
    assert torch.equal(loaded["layers.1.attn.qkv.weight"], qkv)
    for e in range(5):
        gate, up, down = (stored[f"{block}experts.{e}.{w}.weight"] for w in ("w1", "w3", "w2"))
        assert torch.equal(loaded["layers.1.moe.experts.gate_up.weight"][e], torch.cat([gate, up]))
        assert torch.equal(loaded["layers.1.moe.experts.down.weight"][e], down)


def test_gpt_oss_layout(tmp_path: Path) -> None:
    """Stored [E, in, 2F] with alternating columns of gate and up."""
    folder, stored = tiny("gpt_oss", tmp_path)
    loaded, theirs = load(folder), "model.layers.2.mlp.experts."
    gate_up, bias = stored[f"{theirs}gate_up_proj"], stored[f"{theirs}gate_up_proj_bias"]
    ours = loaded["layers.2.moe.experts.gate_up.weight"]
    assert torch.equal(ours[:, :28], gate_up[..., 0::2].transpose(1, 2))
    assert torch.equal(ours[:, 28:], gate_up[..., 1::2].transpose(1, 2))
    assert torch.equal(loaded["layers.2.moe.experts.gate_up.bias"], torch.cat([bias[:, 0::2], bias[:, 1::2]], 1))
    assert torch.equal(loaded["layers.2.moe.experts.down.weight"], stored[f"{theirs}down_proj"].transpose(1, 2))


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "gpt_oss"])
def test_selection_bias_and_sinks_stay_float32(family: str, tmp_path: Path) -> None:
    """C08: biases between 6.817 and 7.063 become a handful of values in bfloat16."""
    folder, stored = tiny(family, tmp_path)
    theirs = "self_attn.sinks" if family == "gpt_oss" else "mlp.gate.e_score_correction_bias"
    ours = "attn.sinks" if family == "gpt_oss" else "moe.selection_bias"
    name = f"model.layers.1.{theirs}"
    stored[name] = torch.linspace(6.817, 7.063, stored[name].numel())
    resave(folder, stored)
    loaded = load(folder, torch.bfloat16)
    assert loaded[f"layers.1.{ours}"].dtype == torch.float32
    assert torch.equal(loaded[f"layers.1.{ours}"], stored[name])
    assert {t.dtype for n, t in loaded.items() if not n.endswith(ours)} == {torch.bfloat16}


@pytest.mark.parametrize("stored_as", [torch.bfloat16, torch.float16, torch.float64])
def test_casts(stored_as: torch.dtype, tmp_path: Path) -> None:
    folder, stored = tiny("qwen2_moe", tmp_path)
    exact = load(resave(folder, {n: t.to(stored_as).float() for n, t in stored.items()}))
    assert same(load(resave(folder, {n: t.to(stored_as) for n, t in stored.items()})), exact)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sizes", [{}, {"intermediate_size": 24}, {"intermediate_size": 48}])
def test_fused_experts(transposed: bool, sizes: dict[str, int], tmp_path: Path) -> None:
    """C20: one tensor a layer, in either orientation; also when gate_up (F=24) or down (F=48) is square at width 48."""
    folder, stored = tiny("mixtral", tmp_path, **sizes)
    expected = load(folder)
    for layer in range(3):
        for e in range(5):
            for w in ("w1", "w2", "w3"):
                del stored[f"model.layers.{layer}.block_sparse_moe.experts.{e}.{w}.weight"]
        for theirs, ours in (("gate_up_proj", "gate_up.weight"), ("down_proj", "down.weight")):
            fused = expected[f"layers.{layer}.moe.experts.{ours}"]
            stored[f"model.layers.{layer}.mlp.experts.{theirs}"] = fused.transpose(1, 2) if transposed else fused
    assert same(load(resave(folder, stored)), expected)


@pytest.mark.parametrize("family", ["mixtral", "olmoe", "deepseek_v3", "phimoe"])
@pytest.mark.parametrize("prefix", ["", "model.language_model.", "language_model.model."])
def test_prefixes(family: str, prefix: str, tmp_path: Path) -> None:
    """C22."""
    folder, stored = tiny(family, tmp_path)
    expected = load(folder)
    renamed = {prefix + n.removeprefix("model.") if n.startswith("model.") else n: t for n, t in stored.items()}
    assert same(load(resave(folder, renamed)), expected)


def test_other_spellings(tmp_path: Path) -> None:
    """C22: Mixtral with gate/up/down under mlp."""
    folder, stored = tiny("mixtral", tmp_path)
    expected = load(folder)
    for theirs, other in (
        ("block_sparse_moe", "mlp"),
        (".w1.", ".gate_proj."),
        (".w3.", ".up_proj."),
        (".w2.", ".down_proj."),
    ):
        stored = {n.replace(theirs, other): t for n, t in stored.items()}
    assert same(load(resave(folder, stored)), expected)


def test_one_tensor_under_two_names(tmp_path: Path) -> None:
    """C22."""
    folder, stored = tiny("mixtral", tmp_path)
    stored["layers.1.mlp.experts.2.up_proj.weight"] = stored["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    stored["norm.weight"] = stored["model.norm.weight"]
    with pytest.raises(CheckpointError) as caught:
        plan(resave(folder, stored))
    assert "experts.2.up_proj.weight and model.layers.1" in str(caught.value) or (
        "experts.2.w3.weight and layers.1.mlp.experts.2.up_proj.weight are the same tensor" in str(caught.value)
    )
    assert "norm.weight are the same tensor" in str(caught.value)


def test_fused_beside_single_experts(tmp_path: Path) -> None:
    folder, stored = tiny("mixtral", tmp_path)
    stored["model.layers.0.mlp.experts.down_proj"] = load(folder)["layers.0.moe.experts.down.weight"]
    with pytest.raises(CheckpointError, match="are the same tensor"):
        plan(resave(folder, stored))


def test_parts_of_an_expert_in_two_files(tmp_path: Path) -> None:
    """C23: shard borders fall inside experts; a lost part is named with its expert."""
    folder = write_checkpoint(TINY["olmoe"], tmp_path, shards=11)
    single, _ = tiny("olmoe", tmp_path / "single")
    files = {n: e.file for n, e in read_index(folder).tensors.items()}
    parts = {n.rsplit(".", 2)[0]: set() for n in files if ".experts." in n}
    for name, file in files.items():
        if ".experts." in name:
            parts[name.rsplit(".", 2)[0]].add(file)
    assert any(len(p) > 1 for p in parts.values())
    assert same(load(folder), load(single))


def test_incomplete_expert(tmp_path: Path) -> None:
    """C23."""
    folder, stored = tiny("olmoe", tmp_path)
    del stored["model.layers.1.mlp.experts.3.down_proj.weight"]
    with pytest.raises(
        CheckpointError, match=r"layers\.1\.mlp\.experts\.3\.down_proj\.weight is missing; expert 3 is incomplete"
    ):
        plan(resave(folder, stored))


@pytest.mark.parametrize("family", TINY)
def test_every_single_tensor_is_needed(family: str, tmp_path: Path) -> None:
    folder, _ = tiny(family, tmp_path)
    spec, index = read_spec(folder), read_index(folder)
    for name in index.tensors:
        rest = {n: e for n, e in index.tensors.items() if n != name}
        with pytest.raises(CheckpointError) as caught:
            plan_assembly(spec, names_of(spec), type(index)(index.folder, rest))
        assert f"{name} is missing" in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.experts.7.up_proj.weight",  # one expert too many
        "model.layers.3.input_layernorm.weight",  # one layer too many
        "model.layers.0.self_attn.q_proj.bias",  # a bias that the config rules out
        "model.layers.1.mlp.shared_expert.up_proj.weight",
        "model.layers.1.mlp.experts.3.up_proj.qweight",
        "vision_tower.patch.weight",
    ],
)
def test_left_over_tensor(name: str, tmp_path: Path) -> None:
    folder, stored = tiny("olmoe", tmp_path)
    stored[name] = torch.zeros(3)
    with pytest.raises(CheckpointError, match=f"{name} is not a tensor of this olmoe model"):
        plan(resave(folder, stored))


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("model.embed_tokens.weight", "olmoe"),
        ("model.layers.1.self_attn.k_proj.weight", "olmoe"),
        ("model.layers.1.mlp.experts.3.gate_proj.weight", "olmoe"),
        ("model.layers.1.mlp.experts.gate_up_proj", "gpt_oss"),
        ("model.layers.1.block_sparse_moe.input_linear.weight", "granitemoe"),
    ],
)
def test_wrong_shape(name: str, family: str, tmp_path: Path) -> None:
    folder, stored = tiny(family, tmp_path)
    right, stored[name] = list(stored[name].shape), stored[name].transpose(-1, -2)[..., :-1]
    wrong = list(stored[name].shape)
    with pytest.raises(CheckpointError) as caught:
        plan(resave(folder, stored))
    assert f"{name} has shape {wrong}; the config asks for {right}" in str(caught.value)


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    folder, stored = tiny("olmoe", tmp_path)
    name = "model.layers.1.mlp.experts.3.gate_proj.weight"
    stored[name] = stored[name].to(torch.float8_e4m3fn)
    with pytest.raises(CheckpointError, match=rf"{name} has dtype F8_E4M3; F64, F32, F16, BF16 can be read"):
        plan(resave(folder, stored))
    config = {**TINY["olmoe"], "quantization_config": {"quant_method": "awq", "bits": 4}}
    with pytest.raises(CheckpointError, match=r"cannot be run: the weights are quantised \(awq\)"):
        plan(folder, config)


def test_many_faults_make_a_short_message(tmp_path: Path) -> None:
    folder, stored = tiny("olmoe", tmp_path)
    with pytest.raises(CheckpointError) as caught:
        plan(resave(folder, {"x.weight": stored["model.norm.weight"]}))
    lines = str(caught.value).splitlines()
    assert len(lines) == 22
    assert "more of the kind" in lines[-1]


def test_mtp_layer_is_left_out(tmp_path: Path) -> None:
    """C25: two layers, one more for next-token prediction, skipped by rule and counted."""
    changes = {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    folder, stored = tiny("deepseek_v3", tmp_path, **changes)
    expected = load(folder)
    extra = {
        "eh_proj": (48, 96),
        "enorm": (48,),
        "hnorm": (48,),
        "shared_head.norm": (48,),
        "shared_head.head": (320, 48),
    }
    stored |= {f"model.layers.2.{name}.weight": torch.zeros(shape) for name, shape in extra.items()}
    stored["model.layers.2.mlp.gate.weight"] = torch.zeros(12, 48)
    resave(folder, stored)
    assert plan(folder).skipped == {"next-token-prediction layer": 6}
    assert same(load(folder), expected)
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\.eh_proj\.weight is not a tensor"):
        plan(folder, {**TINY["deepseek_v3"], **changes, "num_nextn_predict_layers": 0})


def test_rotary_buffers_are_left_out(tmp_path: Path) -> None:
    folder, stored = tiny("mixtral", tmp_path)
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(6)
    assert plan(resave(folder, stored)).skipped == {"rotary buffer": 1}


class TestHead:
    """C27: tied or not, in the file or not."""

    def test_tied_and_absent(self, tmp_path: Path) -> None:
        folder, stored = tiny("mixtral", tmp_path, tie_word_embeddings=True)
        assert "lm_head.weight" not in stored
        assert "head.weight" not in load(folder)

    @pytest.mark.parametrize("equal", [True, False])
    def test_tied_and_present(self, equal: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        folder, stored = tiny("mixtral", tmp_path / f"tied-{equal}", tie_word_embeddings=True)
        stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone() + (0.0 if equal else 1.0)
        the_plan = plan(resave(folder, stored))
        with caplog.at_level("INFO", logger="moestro"):
            loaded = load_tensors(the_plan, torch.float32)
        assert "head.weight" not in loaded
        assert torch.equal(loaded["embed.weight"], stored["model.embed_tokens.weight"])
        (record,) = caplog.records
        assert record.levelname == ("INFO" if equal else "WARNING")
        assert ("it equals the embedding" if equal else "though it differs") in record.message

    def test_tied_and_present_in_another_shape(self, tmp_path: Path) -> None:
        folder, stored = tiny("mixtral", tmp_path, tie_word_embeddings=True)
        stored["lm_head.weight"] = torch.zeros(5, 48)
        with pytest.raises(CheckpointError, match=r"lm_head\.weight has shape \[5, 48\]"):
            plan(resave(folder, stored))

    def test_untied_and_present(self, tmp_path: Path) -> None:
        folder, stored = tiny("mixtral", tmp_path)
        assert torch.equal(load(folder)["head.weight"], stored["lm_head.weight"])

    def test_untied_and_absent(self, tmp_path: Path) -> None:
        folder, stored = tiny("mixtral", tmp_path)
        del stored["lm_head.weight"]
        with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
            plan(resave(folder, stored))


def test_file_that_changes_while_it_is_read(tmp_path: Path) -> None:
    folder, _ = tiny("mixtral", tmp_path)
    the_plan, file = plan(folder), folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="ended early"):
        load_tensors(the_plan, torch.float32)
    file.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_tensors(the_plan, torch.float32)


def test_assembly_needs_the_model_only(tmp_path: Path) -> None:
    """The plan answers from headers: no tensor's bytes are touched."""
    folder, _ = tiny("olmoe", tmp_path)
    spec: ModelSpec = read_spec(folder)
    index = read_index(folder)
    (folder / "model.safetensors").unlink()
    assert plan_assembly(spec, names_of(spec), index).read_bytes == index.nbytes
