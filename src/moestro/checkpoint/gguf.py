"""GGUF files (llama.cpp), read as far as the demo model's source needs: metadata, and tensors of the formats in
quant/ggml.

Layout (version 3, little endian): magic, version, counts; key-value pairs; tensor descriptions; then the data, aligned.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch

from moestro.errors import CheckpointError
from moestro.quant.ggml import FORMATS

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_ENTRIES = 1 << 24


@dataclass(frozen=True)
class _Tensor:
    kind: int
    shape: tuple[int, ...]  # rows first, as torch counts
    offset: int


class GGUFFile:
    """An open file. metadata: its key-value pairs. Raises CheckpointError when the file is damaged or of another
    kind.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self._tensors: dict[str, _Tensor] = {}
        try:
            with path.open("rb") as file:
                self._read_header(file)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
        except (struct.error, UnicodeDecodeError, KeyError):
            raise CheckpointError(f"{path} is damaged: its header does not make sense") from None

    @property
    def names(self) -> list[str]:
        return list(self._tensors)

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor in float32. Raises CheckpointError when it is not there, of another format, or cut off."""
        if name not in self._tensors:
            raise CheckpointError(f"{self.path} has no tensor {name}")
        t = self._tensors[name]
        fmt = FORMATS.get(t.kind)
        if fmt is None:
            known = ", ".join(f.name for f in FORMATS.values())
            raise CheckpointError(f"{self.path}: {name} has GGML type {t.kind}, which is not one of {known}")
        num_bytes = prod(t.shape) // fmt.block_values * fmt.block_bytes
        with self.path.open("rb") as file:
            file.seek(t.offset)
            raw = file.read(num_bytes)
        if len(raw) < num_bytes:
            raise CheckpointError(f"{self.path} is cut off: {name} should have {num_bytes} bytes and has {len(raw)}")
        blocks = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(-1, fmt.block_bytes)
        return fmt.unpack(blocks).view(t.shape)

    def _read_header(self, file: BinaryIO) -> None:
        if file.read(4) != b"GGUF":
            raise CheckpointError(f"{self.path} is not a GGUF file")
        (version,) = self._unpack(file, "I")
        if version != 3:
            raise CheckpointError(f"{self.path} is GGUF version {version}; version 3 is read")
        num_tensors, num_pairs = self._unpack(file, "QQ")
        for _ in range(num_pairs):
            key = self._string(file)
            self.metadata[key] = self._value(file, *self._unpack(file, "I"))
        described = []
        for _ in range(num_tensors):
            name = self._string(file)
            (num_axes,) = self._unpack(file, "I")
            shape = self._unpack(file, f"{num_axes}Q")[::-1]
            kind, offset = self._unpack(file, "IQ")
            described.append((name, kind, shape, offset))
        alignment = self.metadata.get("general.alignment", 32)
        start = -(-file.tell() // alignment) * alignment
        self._tensors = {name: _Tensor(kind, shape, start + offset) for name, kind, shape, offset in described}

    def _value(self, file: BinaryIO, kind: int) -> Any:
        if kind == _STRING:
            return self._string(file)
        if kind == _ARRAY:
            item_kind, count = self._unpack(file, "IQ")
            if count > _MOST_ENTRIES:
                raise CheckpointError(f"{self.path} is damaged: an array of {count} entries")
            if item_kind in _SCALARS:
                return list(self._unpack(file, f"{count}{_SCALARS[item_kind]}"))
            return [self._value(file, item_kind) for _ in range(count)]
        return self._unpack(file, _SCALARS[kind])[0]

    def _string(self, file: BinaryIO) -> str:
        (length,) = self._unpack(file, "Q")
        return file.read(min(length, _MOST_ENTRIES)).decode()

    @staticmethod
    def _unpack(file: BinaryIO, form: str) -> tuple[Any, ...]:
        return struct.unpack("<" + form, file.read(struct.calcsize("<" + form)))
