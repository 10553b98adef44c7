from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moestro.kernels.ops.sort_by_expert import reference
from moestro.kernels.ops.sort_by_expert.triton import sort_by_expert, sort_with_inverse


@pytest.mark.parametrize(("T", "K", "E"), [(1, 1, 1), (1, 8, 128), (33, 3, 6), (300, 8, 16), (70, 2, 40)])
def test_equals_reference(T: int, K: int, E: int, device: torch.device) -> None:
    ids = torch.randint(
        -1, max(1, E - 1), (T, K), dtype=torch.int32, device=device
    )  # padding, and an expert without rows
    offsets, order = sort_by_expert(ids, E)
    expected_offsets, expected_order = reference.sort_by_expert(ids, E)
    used = int(expected_offsets[-1])
    assert torch.equal(offsets, expected_offsets)
    assert torch.equal(order[:used], expected_order)
    assert (order[used:] == -1).all()
    inverse = sort_with_inverse(ids, E)[2].tolist()
    for pair, expert in enumerate(ids.flatten().tolist()):
        assert inverse[pair] == (-1 if expert < 0 else expected_order.tolist().index(pair))
