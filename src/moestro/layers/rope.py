"""Rotary position embedding: cos and sin tables.

T tokens, R rotated pairs.
"""

from __future__ import annotations

import torch

from moestro.spec.fields import RopeSpec
from moestro.spec.rope import inverse_frequencies


class RopeTable:
    """cos and sin of every position of a context, float32 [positions, R].

    Longrope has two sets of frequencies. Its table holds the short set first and the long one behind it, and a token's
    row is its position, plus max_position when its sequence is a long one: see `long_from`.
    """

    def __init__(self, rope: RopeSpec, max_position: int, device: torch.device) -> None:
        tables = [_angles(rope, max_position, context=None)]
        factors = [rope.cos_sin_factor]
        if rope.kind == "longrope":
            assert rope.original_max_position is not None
            assert rope.long_cos_sin_factor is not None
            tables = [
                _angles(rope, max_position, context=rope.original_max_position),
                _angles(rope, max_position, context=rope.original_max_position + 1),
            ]
            factors.append(rope.long_cos_sin_factor)
        self.cos = torch.cat([a.cos() * f for a, f in zip(tables, factors, strict=True)]).float().to(device)
        self.sin = torch.cat([a.sin() * f for a, f in zip(tables, factors, strict=True)]).float().to(device)

    def rows(self, index_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [T, R] of the given rows."""
        return self.cos[index_T], self.sin[index_T]


def long_from(rope: RopeSpec | None) -> int | None:
    """Sequences of more tokens than this use longrope's long frequencies; None when there are none."""
    return rope.original_max_position if rope is not None and rope.kind == "longrope" else None


def _angles(rope: RopeSpec, max_position: int, context: int | None) -> torch.Tensor:
    # The reference (transformers) multiplies in float32, and so do the checkpoints' authors; float64 here would differ
    # from both by up to 1e-3 rad at position 100,000.
    frequencies = torch.tensor(inverse_frequencies(rope, context), dtype=torch.float32)
    return torch.outer(torch.arange(max_position, dtype=torch.float32), frequencies)
