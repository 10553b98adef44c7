"""Block formats of llama.cpp's GGUF files, unpacked to float32: what the demo model's source uses.

A block is 32 values of one row. Q4_1: scale d and minimum m (float16), then 16 bytes whose low nibbles are values 0..15
and high nibbles values 16..31; a value is q * d + m. Q8_0: scale d (float16), then 32 int8; a value is q * d.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

BLOCK = 32


@dataclass(frozen=True)
class BlockFormat:
    """block_bytes: size of a block in the file. unpack: uint8 [blocks, block_bytes] -> float32 [blocks, values]."""

    name: str
    block_values: int
    block_bytes: int
    unpack: Callable[[torch.Tensor], torch.Tensor]


def _half(raw: torch.Tensor) -> torch.Tensor:
    return raw.contiguous().view(torch.float16).float()


def _f32(raw: torch.Tensor) -> torch.Tensor:
    return raw.contiguous().view(torch.float32)


def _q4_1(raw: torch.Tensor) -> torch.Tensor:
    scale, minimum, nibbles = _half(raw[:, 0:2]), _half(raw[:, 2:4]), raw[:, 4:]
    return torch.cat((nibbles & 15, nibbles >> 4), dim=1).float() * scale + minimum


def _q8_0(raw: torch.Tensor) -> torch.Tensor:
    return raw[:, 2:].contiguous().view(torch.int8).float() * _half(raw[:, 0:2])


# by the type number in the file
FORMATS = {
    0: BlockFormat("F32", 1, 4, _f32),
    3: BlockFormat("Q4_1", BLOCK, 4 + BLOCK // 2, _q4_1),
    8: BlockFormat("Q8_0", BLOCK, 2 + BLOCK, _q8_0),
}
