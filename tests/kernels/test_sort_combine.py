"""sort_by_expert and combine: against plain loops, by invariants, and the CPU kernels against the references."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from moestro.errors import KernelError
from moestro.kernels.ops.combine import numba as combine_numba
from moestro.kernels.ops.combine import reference as combine_reference
from moestro.kernels.ops.sort_by_expert import numba as sort_numba
from moestro.kernels.ops.sort_by_expert import reference as sort_reference

SORTS = [sort_reference, sort_numba]
COMBINES = [combine_reference, combine_numba]


def random_ids(T: int, K: int, E: int, sentinel_share: float = 0.0) -> torch.Tensor:
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(T)]).to(torch.int32) if T else torch.zeros(0, K).int()
    return torch.where(torch.rand(T, K) < sentinel_share, -1, ids)


@pytest.mark.parametrize("module", SORTS)
@pytest.mark.parametrize(
    ("T", "K", "E", "sentinels"),
    [
        (1, 1, 1, 0.0),
        (1, 8, 64, 0.0),  # decode of one sequence
        (0, 8, 64, 0.0),  # C54
        (9, 4, 60, 0.3),  # C12 with C48 / C59
        (33, 8, 40, 0.0),
        (100, 6, 160, 0.9),  # most pairs belong to other ranks
        (1000, 8, 384, 0.1),
        (5, 2, 4, 1.0),  # padding only
    ],
)
def test_sort_is_the_stable_grouping(module: ModuleType, T: int, K: int, E: int, sentinels: float) -> None:
    ids = random_ids(T, K, E, sentinels)
    offsets, order = module.sort_by_expert(ids, E)
    flat = ids.flatten().tolist()
    expected = [[i for i, e in enumerate(flat) if e == expert] for expert in range(E)]
    assert offsets.dtype == order.dtype == torch.int32
    assert order.tolist() == [i for rows in expected for i in rows]
    assert offsets.diff().tolist() == [len(rows) for rows in expected]
    assert int(offsets[0]) == 0
    assert int(offsets[-1]) == len(order) == sum(e >= 0 for e in flat)


@pytest.mark.parametrize("module", SORTS)
def test_all_tokens_to_one_expert(module: ModuleType) -> None:
    """C18: no buffer is sized for the average."""
    offsets, order = module.sort_by_expert(torch.full((1024, 1), 2, dtype=torch.int32), 4)
    assert offsets.tolist() == [0, 0, 0, 1024, 1024]
    assert order.tolist() == list(range(1024))


@pytest.mark.parametrize("module", SORTS)
def test_many_tokens_on_384_experts(module: ModuleType) -> None:
    """C12: the case that failed only beyond 54,272 tokens."""
    ids = torch.randint(0, 384, (54_273, 8), dtype=torch.int32)
    offsets, order = module.sort_by_expert(ids, 384)
    sorted_ids = ids.flatten()[order.long()]
    assert bool((sorted_ids.diff() >= 0).all())
    assert torch.equal(order.sort().values, torch.arange(54_273 * 8, dtype=torch.int32))
    assert torch.equal(offsets.diff(), torch.bincount(ids.flatten(), minlength=384).int())


@pytest.mark.parametrize("module", SORTS)
def test_sort_refuses(module: ModuleType) -> None:
    with pytest.raises(KernelError, match=r"dtype torch\.int64; expected int32"):  # C16
        module.sort_by_expert(torch.zeros(2, 2, dtype=torch.int64), 4)
    with pytest.raises(KernelError, match="expert id 4 is beyond the 4 experts"):  # C59
        module.sort_by_expert(torch.tensor([[0, 4]], dtype=torch.int32), 4)
    with pytest.raises(KernelError, match=r"expected \[T, K\]"):
        module.sort_by_expert(torch.zeros(4, dtype=torch.int32), 4)


@pytest.mark.parametrize("module", COMBINES)
@pytest.mark.parametrize(
    ("T", "K", "E", "D", "sentinels"),
    [(1, 8, 64, 2048, 0.0), (5, 2, 4, 3, 0.4), (0, 2, 4, 8, 0.0), (3, 2, 4, 17, 1.0), (300, 4, 8, 300, 0.1)],
)
def test_combine_equals_plain_loop(module: ModuleType, T: int, K: int, E: int, D: int, sentinels: float) -> None:
    ids = random_ids(T, K, E, sentinels)
    _, order = sort_reference.sort_by_expert(ids, E)
    y, weights = torch.randn(len(order), D), torch.rand(T, K)
    out = module.combine(y, order, weights, T)
    expected = torch.zeros(T, D)
    row_of = {pair: row for row, pair in enumerate(order.tolist())}
    for t in range(T):
        for k in range(K):
            if t * K + k in row_of:
                expected[t] += weights[t, k] * y[row_of[t * K + k]]
    assert out.shape == (T, D)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("module", COMBINES)
def test_padding_rows_come_out_as_zero(module: ModuleType) -> None:
    """C48, C59: nothing was computed for -1, and its weight is not read."""
    ids = torch.tensor([[1, 0], [-1, -1], [-1, 2]], dtype=torch.int32)
    _, order = sort_reference.sort_by_expert(ids, 3)
    weights = torch.tensor([[0.5, 0.5], [float("nan"), 7.0], [float("nan"), 1.0]])
    out = module.combine(torch.ones(3, 4), order, weights, 3)
    assert out[:, 0].tolist() == [1.0, 0.0, 1.0]


def test_combine_undoes_the_sort() -> None:
    ids = random_ids(50, 4, 16)
    _, order = sort_numba.sort_by_expert(ids, 16)
    x = torch.randn(50, 24)
    out = combine_numba.combine(x[order.long() // 4], order, torch.full((50, 4), 0.25), 50)
    torch.testing.assert_close(out, x)


@pytest.mark.parametrize("module", COMBINES)
def test_combine_refuses(module: ModuleType) -> None:
    order = torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(KernelError, match=r"order has dtype torch\.int64"):  # C16
        module.combine(torch.zeros(2, 4), order.long(), torch.zeros(1, 2), 1)
    with pytest.raises(KernelError, match=r"weights have shape \[1, 2\]; expected \[2, K\]"):
        module.combine(torch.zeros(2, 4), order, torch.zeros(1, 2), 2)
    with pytest.raises(KernelError, match=r"order has shape \[2\]; expected \[3\]"):
        module.combine(torch.zeros(3, 4), order, torch.zeros(1, 2), 1)


def test_combine_kernel_checks_the_order() -> None:
    with pytest.raises(KernelError, match=r"values outside 0\.\.1"):
        combine_numba.combine(torch.zeros(1, 4), torch.tensor([2], dtype=torch.int32), torch.zeros(1, 2), 1)
