"""Headers of a checkpoint: what is there, what is missing, and what cannot be (C23, C27, C28)."""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from moestro.checkpoint.index import INDEX_NAME, read_header, read_index
from moestro.checkpoint.synth import TINY, write_checkpoint
from moestro.errors import CheckpointError


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_checkpoint(TINY["olmoe"], tmp_path / "model", shards=3)


def shard(folder: Path, number: int) -> Path:
    return folder / f"model-{number:05}-of-00003.safetensors"


def edit_index(folder: Path, change: Any) -> None:
    file = folder / INDEX_NAME
    content = json.loads(file.read_text())
    change(content["weight_map"])
    file.write_text(json.dumps(content))


def write_header(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def test_header_equals_what_was_saved(tmp_path: Path) -> None:
    tensors = {
        "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
        "b.weight": torch.ones(5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 4, dtype=torch.float16),
        "scalar": torch.tensor(3, dtype=torch.int64),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = read_header(tmp_path / "model.safetensors")
    assert {n: e.shape for n, e in found.items()} == {n: tuple(t.shape) for n, t in tensors.items()}
    assert {n: e.dtype for n, e in found.items()} == {"a": "F32", "b.weight": "BF16", "empty": "F16", "scalar": "I64"}
    raw = (tmp_path / "model.safetensors").read_bytes()
    entry = found["a"]
    assert raw[entry.offset : entry.offset + entry.nbytes] == tensors["a"].numpy().tobytes()


def test_shards_and_single_file_hold_the_same(sharded: Path, tmp_path: Path) -> None:
    single = write_checkpoint(TINY["olmoe"], tmp_path / "single")
    ours, other = read_index(sharded), read_index(single)
    assert {n: (e.dtype, e.shape) for n, e in ours.tensors.items()} == {
        n: (e.dtype, e.shape) for n, e in other.tensors.items()
    }
    assert ours.nbytes == other.nbytes


def test_a_single_file_of_another_name_is_found(tmp_path: Path) -> None:
    folder = write_checkpoint(TINY["olmoe"], tmp_path)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert read_index(folder).tensors


def test_missing_shard(sharded: Path) -> None:
    """C28: an interrupted download."""
    shard(sharded, 2).unlink()
    with pytest.raises(
        CheckpointError, match=r"1 of 3 files .* missing: model-00002-of-00003.*download may be incomplet"
    ):
        read_index(sharded)


def test_index_of_another_version(sharded: Path) -> None:
    """C28's cousin: the index names old files."""
    for number in (1, 2, 3):
        shard(sharded, number).rename(sharded / f"model-{number:05}-of-00004.safetensors")
    with pytest.raises(CheckpointError, match=r"3 of 3 files.*the folder holds model-00001-of-00004.*another version"):
        read_index(sharded)


def test_shard_that_the_index_does_not_name(sharded: Path) -> None:
    """C28."""
    shutil.copy(shard(sharded, 1), sharded / "model-00004-of-00004.safetensors")
    with pytest.raises(CheckpointError, match=r"does not name model-00004-of-00004\.safetensors: the index is stale"):
        read_index(sharded)


def test_other_safetensors_are_left_alone(sharded: Path) -> None:
    """Released folders hold the same model a second time in the authors' own layout."""
    shutil.copy(shard(sharded, 1), sharded / "consolidated.safetensors")
    assert read_index(sharded).tensors


def test_index_without_its_tensors(sharded: Path) -> None:
    edit_index(sharded, lambda m: m.update({"model.extra.weight": shard(sharded, 1).name}))
    with pytest.raises(CheckpointError, match=r"is stale: no file holds model\.extra\.weight"):
        read_index(sharded)


def test_tensor_in_another_shard_than_the_index_says(sharded: Path) -> None:
    edit_index(sharded, lambda m: m.update({"lm_head.weight": shard(sharded, 1).name}))
    with pytest.raises(CheckpointError, match=r"holds lm_head\.weight, which the index does not say: .* is stale"):
        read_index(sharded)


def test_tensor_in_two_shards(sharded: Path) -> None:
    shutil.copy(shard(sharded, 1), shard(sharded, 2))
    with pytest.raises(CheckpointError, match=r"holds model\.embed_tokens\.weight.* a second time"):
        read_index(sharded)


@pytest.mark.parametrize(
    "name",
    ["../evil.safetensors", "/etc/evil.safetensors", "a/../../evil.safetensors", "..\\evil.safetensors", "evil.py"],
)
def test_no_way_out_of_the_folder(sharded: Path, name: str) -> None:
    edit_index(sharded, lambda m: m.update({"lm_head.weight": name}))
    with pytest.raises(CheckpointError, match="only safetensors files inside the folder are read"):
        read_index(sharded)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}'])
def test_broken_index(sharded: Path, text: str) -> None:
    (sharded / INDEX_NAME).write_text(text)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        read_index(sharded)


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -1])
def test_truncated_file(tmp_path: Path, keep: int) -> None:
    folder = write_checkpoint(TINY["olmoe"], tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors (is truncated|is not a safetensors file)"):
        read_index(folder)


def _entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"not json", b"", "not valid JSON"),
        (b"[" * 100_000, b"", "not valid JSON"),
        (b"\xff\xfe", b"", "not valid JSON"),
        ([], b"", "not an object"),
        (b'{"a": {}, "a": {}}', b"", "stands there twice"),
        ({"a": 3}, b"", "entry of tensor a is corrupt"),
        ({"a": _entry(shape=[-2])}, b"x" * 8, "entry of tensor a is corrupt"),
        ({"a": _entry(shape=[True])}, b"x" * 8, "entry of tensor a is corrupt"),
        ({"a": _entry(shape=[2.0])}, b"x" * 8, "entry of tensor a is corrupt"),
        ({"a": _entry(shape=[2**40, 2**40])}, b"x" * 8, "cannot have 8 bytes"),
        ({"a": _entry(data_offsets=[8, 0])}, b"x" * 8, "entry of tensor a is corrupt"),
        ({"a": _entry(data_offsets=[0])}, b"x" * 8, "entry of tensor a is corrupt"),
        ({"a": _entry(dtype="F128")}, b"x" * 8, "unknown dtype 'F128'"),
        ({"a": _entry(dtype=[])}, b"x" * 8, "unknown dtype"),
        ({"a": _entry(), "b": _entry()}, b"x" * 8, "does not start where the one before ends"),
        ({"a": _entry(data_offsets=[8, 16])}, b"x" * 16, "does not start where the one before ends"),
        ({"a": _entry()}, b"x" * 7, "is truncated: .* describes"),
        ({"a": _entry()}, b"x" * 9, "the header is corrupt: it describes"),
    ],
)
def test_corrupt_header(tmp_path: Path, header: Any, data: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_header(write_header(tmp_path / "model.safetensors", header, data))


def test_header_length_that_cannot_be(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"\xff" * 64)
    with pytest.raises(CheckpointError, match="not a safetensors file: its header length cannot be"):
        read_header(file)


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no safetensors files"):
        read_index(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"holds pytorch_model\.bin and no safetensors; .*convert it first"):
        read_index(tmp_path)
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"holds a\.safetensors, b\.safetensors and no model\.safetensors\.index"):
        read_index(tmp_path)
    with pytest.raises(CheckpointError, match="is not a folder"):
        read_index(tmp_path / "nowhere")
