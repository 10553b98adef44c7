"""Random checkpoints: the same for the same seed, whatever the shards, and never more than one tensor in memory."""

import json
import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moestro.checkpoint.index import read_index
from moestro.checkpoint.synth import TINY, write_checkpoint
from moestro.errors import ConfigError, SettingError
from moestro.spec.count import total_params
from moestro.spec.registry import read_spec


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def test_seed_decides(tmp_path: Path) -> None:
    a, b, c = (
        tensors(write_checkpoint(TINY["qwen2_moe"], tmp_path / name, seed=seed, shards=shards))
        for name, seed, shards in (("a", 1, 1), ("b", 1, 4), ("c", 2, 1))
    )
    assert a.keys() == b.keys() == c.keys()
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert not any(torch.equal(a[n], c[n]) for n in a)


@pytest.mark.parametrize("family", TINY)
def test_sizes_and_values(family: str, tmp_path: Path) -> None:
    found = tensors(write_checkpoint(TINY[family], tmp_path))
    assert sum(t.numel() for t in found.values()) == total_params(read_spec(TINY[family]))
    assert all(t.isfinite().all() and t.std() > 0.01 for t in found.values())


def test_dtype_is_written_and_biases_stay_float32(tmp_path: Path) -> None:
    """C08."""
    folder = write_checkpoint(TINY["deepseek_v3"], tmp_path, dtype="bfloat16")
    assert read_spec(folder).dtype == "bfloat16"
    dtypes = {n: e.dtype for n, e in read_index(folder).tensors.items()}
    assert {d for n, d in dtypes.items() if n.endswith("e_score_correction_bias")} == {"F32"}
    assert {d for n, d in dtypes.items() if not n.endswith("e_score_correction_bias")} == {"BF16"}


def test_writing_holds_one_tensor(tmp_path: Path) -> None:
    config = {**TINY["olmoe"], "vocab_size": 30_000, "num_hidden_layers": 6}
    tracemalloc.start()
    write_checkpoint(config, tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * 2**20  # headers and names; torch's own memory is not traced, so this is about Python's buffers
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == 30_000


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="dtype='int8'"):
        write_checkpoint(TINY["olmoe"], tmp_path, dtype="int8")  # type: ignore[arg-type]
    with pytest.raises(SettingError, match=r"shards=0 must lie in 1\.\."):
        write_checkpoint(TINY["olmoe"], tmp_path, shards=0)
    with pytest.raises(ConfigError):
        write_checkpoint({**TINY["olmoe"], "num_experts": 0}, tmp_path)
