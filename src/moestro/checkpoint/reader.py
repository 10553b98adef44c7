"""Reading tensors of a checkpoint into memory that is already there.

Positional reads go straight into the destination. A memory map would do the same copy and leave the file's pages
counted against the process, so that a model near the size of the memory would look twice as large.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

import torch

from moestro.checkpoint.index import TensorEntry
from moestro.errors import CheckpointError

TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}

# Linux moves at most 2 GiB a call; smaller pieces let a signal through now and then.
_PIECE_BYTES = 256 * 2**20


class CheckpointReader:
    """Open files of a checkpoint; a context manager that closes them."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def read(self, entry: TensorEntry) -> torch.Tensor:
        """The tensor as it lies in the file, in host memory of its own."""
        tensor = torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype])
        self.read_into_(entry, tensor)
        return tensor

    def read_for_now(self, entry: TensorEntry) -> torch.Tensor:
        """The tensor as it lies in the file, in memory that the next call uses again.

        Fresh memory costs more than the read: the system clears each page first.
        """
        if self._scratch.numel() < entry.nbytes:
            self._scratch = torch.empty(0, dtype=torch.uint8)  # let go of the old one before asking for a larger
            self._scratch = torch.empty(entry.nbytes, dtype=torch.uint8)
        tensor = self._scratch[: entry.nbytes].view(TORCH_DTYPES[entry.dtype]).reshape(entry.shape)
        self.read_into_(entry, tensor)
        return tensor

    def read_into_(self, entry: TensorEntry, tensor: torch.Tensor) -> None:
        """Fill a contiguous host tensor of the entry's dtype and size.

        Raises CheckpointError when the file ends early or cannot be read.
        """
        assert tensor.is_contiguous(), tensor.stride()
        assert tensor.device.type == "cpu", tensor.device
        assert tensor.nbytes == entry.nbytes, (tensor.shape, entry)
        assert tensor.dtype == TORCH_DTYPES[entry.dtype], (tensor.dtype, entry)
        if entry.nbytes == 0:
            return
        view = tensor.reshape(-1).view(torch.uint8).numpy().data
        done = 0
        while done < entry.nbytes:
            try:
                piece = view[done : done + _PIECE_BYTES]
                count = os.preadv(self._open(entry.file), [piece], entry.offset + done)
            except OSError as error:
                raise CheckpointError(f"{entry.file} cannot be read: {error.strerror}") from None
            if count == 0:
                raise CheckpointError(f"{entry.file} ended early: it was changed while it was read")
            done += count

    def _open(self, path: Path) -> int:
        if path not in self._descriptors:
            self._descriptors[path] = os.open(path, os.O_RDONLY)
        return self._descriptors[path]
