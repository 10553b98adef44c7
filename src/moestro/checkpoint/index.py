"""What a checkpoint holds, from the headers of its safetensors files alone; no tensor is read.

A safetensors file is eight bytes of header length, a JSON header, and the tensors' bytes one behind the other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any, TypeGuard

from moestro.errors import CheckpointError
from moestro.logs import log_once

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

DTYPE_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}

# The safetensors library's own limit; a larger one is a file of another kind.
_LONGEST_HEADER_BYTES = 100_000_000
_SHARD = re.compile(r".*-\d+-of-\d+\.safetensors")


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: offset and nbytes in `file`, dtype as safetensors spells it ("BF16")."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class CheckpointIndex:
    """All tensors of a checkpoint by name."""

    folder: Path
    tensors: Mapping[str, TensorEntry]

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.tensors.values())


def read_index(folder: str | Path) -> CheckpointIndex:
    """Read the headers of a checkpoint folder: model.safetensors, or the shards that its index file names.

    Raises CheckpointError when there are no safetensors, a shard is missing, a file is truncated or not safetensors, or
    the index does not fit the files.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is not a folder; a checkpoint is a folder with config.json and safetensors files"
        )
    index_file, on_disk = folder / INDEX_NAME, sorted(p.name for p in folder.glob("*.safetensors"))
    if index_file.exists():
        return CheckpointIndex(folder, _read_shards(folder, index_file, on_disk))
    if SINGLE_NAME in on_disk:
        name = SINGLE_NAME
    elif len(on_disk) == 1:
        name = on_disk[0]
    else:
        raise CheckpointError(_nothing_to_read(folder, on_disk))
    _report_unused(folder, [n for n in on_disk if n != name])
    return CheckpointIndex(folder, read_header(folder / name))


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file; raises CheckpointError when it is truncated, corrupt or something else."""
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if file_bytes < 8 or length > _LONGEST_HEADER_BYTES:
                raise CheckpointError(f"{path} is not a safetensors file: its header length cannot be")
            if 8 + length > file_bytes:
                raise CheckpointError(
                    f"{path} is truncated: {file_bytes} bytes, and its header alone has {length}; download it again"
                )
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    try:
        header = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a safetensors file: its header is not valid JSON ({error})") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} is not a safetensors file: its header is not an object")
    header.pop("__metadata__", None)
    entries = {name: _entry(path, name, value, 8 + length) for name, value in header.items()}
    _check_layout(path, entries, 8 + length, file_bytes)
    return entries


def _entry(path: Path, name: str, value: Any, data_start: int) -> TensorEntry:
    fields: dict[str, Any] = value if isinstance(value, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not (_is_sizes(shape) and _is_sizes(offsets) and len(offsets) == 2 and offsets[0] <= offsets[1]):
        raise CheckpointError(f"{path}: the header's entry of tensor {name} is corrupt")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(f"{path}: tensor {name} has the unknown dtype {dtype!r}; known: {', '.join(DTYPE_BITS)}")
    nbytes = offsets[1] - offsets[0]
    if prod(shape) * DTYPE_BITS[dtype] != nbytes * 8:
        raise CheckpointError(f"{path}: tensor {name} of shape {shape} and dtype {dtype} cannot have {nbytes} bytes")
    return TensorEntry(path, dtype, tuple(shape), data_start + offsets[0], nbytes)


def _check_layout(path: Path, entries: Mapping[str, TensorEntry], data_start: int, file_bytes: int) -> None:
    """The tensors fill the file, without holes and without sharing a byte."""
    end = data_start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset != end:
            raise CheckpointError(
                f"{path}: the header is corrupt: tensor {name} does not start where the one before ends"
            )
        end += entry.nbytes
    if end > file_bytes:
        raise CheckpointError(
            f"{path} is truncated: {file_bytes} bytes, and its header describes {end}; download it again"
        )
    if end < file_bytes:
        raise CheckpointError(f"{path}: the header is corrupt: it describes {end} of the file's {file_bytes} bytes")


def _read_shards(folder: Path, index_file: Path, on_disk: list[str]) -> dict[str, TensorEntry]:
    weight_map = _read_weight_map(index_file)
    shards = sorted(set(weight_map.values()))
    missing = [name for name in shards if not (folder / name).is_file()]
    unused = [name for name in on_disk if name not in shards]
    if missing:
        stale = f"; the folder holds {_some(unused)}, so the index may be that of another version" if unused else ""
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(shards)} files that {INDEX_NAME} names are missing: {_some(missing)}; "
            f"the download may be incomplete{stale}"
        )
    stray = [name for name in unused if _SHARD.fullmatch(name) or name == SINGLE_NAME]
    if stray:
        raise CheckpointError(
            f"{folder}: {INDEX_NAME} does not name {_some(stray)}: the index is stale, or the files are left over"
        )
    _report_unused(folder, unused)
    tensors: dict[str, TensorEntry] = {}
    for shard in shards:
        header = read_header(folder / shard)
        twice = [name for name in header if name in tensors]
        unlisted = [name for name in header if weight_map.get(name) != shard and name not in twice]
        if twice or unlisted:
            what = (
                f"holds {_some(twice)} a second time"
                if twice
                else f"holds {_some(unlisted)}, which the index does not say"
            )
            raise CheckpointError(f"{folder / shard} {what}: {INDEX_NAME} is stale")
        tensors |= header
    absent = [name for name in weight_map if name not in tensors]
    if absent:
        raise CheckpointError(f"{folder}: {INDEX_NAME} is stale: no file holds {_some(absent)}")
    return tensors


def _read_weight_map(index_file: Path) -> dict[str, str]:
    """Tensor name -> file name; only plain names inside the folder are let through."""
    try:
        content = json.loads(index_file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{index_file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{index_file} is not valid JSON: {error}") from None
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{index_file} has no weight_map from tensor names to file names")
    for name in set(weight_map.values()):
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name or path.suffix != ".safetensors":
            raise CheckpointError(f"{index_file} names {name!r}; only safetensors files inside the folder are read")
    return weight_map


def _nothing_to_read(folder: Path, on_disk: list[str]) -> str:
    if on_disk:
        return f"{folder} holds {_some(on_disk)} and no {INDEX_NAME} that says what is in them"
    pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
    if pickles:
        return f"{folder} holds {_some(pickles)} and no safetensors; moestro reads safetensors only, convert it first"
    return f"{folder} holds no safetensors files"


def _report_unused(folder: Path, names: list[str]) -> None:
    if names:
        log_once(f"{folder}: not part of the checkpoint, left alone: {_some(names)}")


def _is_sizes(value: Any) -> TypeGuard[list[int]]:
    """A list of sizes as they occur; the bound keeps products of them small enough to print."""
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 2**48 for v in value) and len(value) <= 8


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands there twice")
    return found


def _some(names: list[str]) -> str:
    """The first few names of a list for a message."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
