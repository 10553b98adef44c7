"""experts_mlp and gated_mlp: reference against a plain loop, CPU kernel against the reference."""

from __future__ import annotations

import math

import pytest
import torch

from moestro.errors import KernelError
from moestro.kernels.ops.experts import ExpertWeights, numba, reference
from moestro.kernels.ops.gated_mlp import numba as mlp_numba
from moestro.kernels.ops.gated_mlp import reference as mlp_reference
from moestro.quant.formats import Weight

ACTIVATIONS = [("swiglu", None), ("swiglu_clamped", 0.7)]


def make(E: int, F: int, D: int, dtype: torch.dtype = torch.float32, bias: bool = True) -> ExpertWeights:
    gate_up, down = torch.randn(E, 2 * F, D) / D**0.5, torch.randn(E, D, F) / F**0.5
    biases = (torch.randn(E, 2 * F), torch.randn(E, D)) if bias else (None, None)
    return ExpertWeights(Weight(gate_up.to(dtype)), Weight(down.to(dtype)), *biases)


def offsets_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).to(torch.int32)


@pytest.mark.parametrize(("activation", "limit"), ACTIVATIONS)
def test_reference_equals_plain_loop(activation: str, limit: float | None) -> None:
    E, F, D = 2, 3, 4
    w = make(E, F, D)
    x, owner = torch.randn(3, D), [0, 1, 1]
    y = reference.experts_mlp(x, offsets_of([1, 2]), w, activation, limit)  # type: ignore[arg-type]
    w1, b1 = w.gate_up.data.tolist(), w.gate_up_bias_E2F.tolist()  # type: ignore[union-attr]
    w2, b2 = w.down.data.tolist(), w.down_bias_ED.tolist()  # type: ignore[union-attr]
    for r, e in enumerate(owner):
        row = x[r].tolist()
        both = [sum(a * b for a, b in zip(w1[e][i], row, strict=True)) + b1[e][i] for i in range(2 * F)]
        hidden = []
        for gate, up in zip(both[:F], both[F:], strict=True):
            if limit is None:
                hidden.append(gate / (1 + math.exp(-gate)) * up)
            else:
                gate, up = min(gate, limit), max(-limit, min(up, limit))
                hidden.append((up + 1) * gate / (1 + math.exp(-1.702 * gate)))
        for d in range(D):
            expected = sum(a * b for a, b in zip(w2[e][d], hidden, strict=True)) + b2[e][d]
            assert float(y[r, d]) == pytest.approx(expected, abs=1e-5)


# E, F, D, rows of each expert, why
CASES = [
    (4, 8, 16, [1, 1, 1, 1], "one row each, as in decode"),
    (3, 5, 7, [2, 0, 3], "no size fills a tile; an expert without rows"),
    (1, 64, 32, [1], "one expert with one row must still be shared out"),
    (8, 16, 33, [0, 0, 50, 0, 0, 0, 0, 0], "C18: all tokens to one expert"),
    (60, 12, 20, [i % 3 for i in range(60)], "C12: 60 experts"),
    (384, 4, 8, [int(i % 40 == 0) for i in range(384)], "C12: 384 experts, few touched"),
    (5, 24, 40, [7, 13, 1, 6, 19], "rows beyond one tile, with and without a rest"),
    (4, 8, 16, [0, 0, 0, 0], "C54: no rows at all"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("activation", "limit"), ACTIVATIONS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c[4])
def test_equals_reference(case: tuple[int, int, int, list[int], str], dtype: torch.dtype, activation, limit) -> None:  # type: ignore[no-untyped-def]
    E, F, D, counts, _ = case
    x = torch.randn(sum(counts), D)
    for bias in (True, False):
        w = make(E, F, D, dtype, bias)
        y = numba.experts_mlp(x, offsets_of(counts), w, activation, limit)
        assert y.shape == x.shape
        torch.testing.assert_close(
            y, reference.experts_mlp(x, offsets_of(counts), w, activation, limit), rtol=1e-5, atol=1e-5
        )


def test_weights_of_untouched_experts_are_not_read() -> None:
    w = make(3, 8, 16, bias=False)
    w.gate_up.data[1], w.down.data[1] = float("nan"), float("nan")
    y = numba.experts_mlp(torch.randn(4, 16), offsets_of([2, 0, 2]), w, "swiglu", None)
    assert torch.isfinite(y).all()


def test_row_does_not_depend_on_the_batch() -> None:
    w = make(3, 40, 72, torch.bfloat16)
    x = torch.randn(30, 72)
    together = numba.experts_mlp(x, offsets_of([13, 9, 8]), w, "swiglu", None)
    alone = numba.experts_mlp(x[13:14], offsets_of([0, 1, 0]), w, "swiglu", None)
    assert torch.equal(together[13:14], alone)


@pytest.mark.parametrize(("activation", "limit"), ACTIVATIONS)
@pytest.mark.parametrize("rows", [0, 1, 6, 7, 50])
def test_gated_mlp_equals_reference(rows: int, activation, limit) -> None:  # type: ignore[no-untyped-def]
    w = make(1, 34, 50, torch.bfloat16)
    x = torch.randn(rows, 50)
    arguments = (w.gate_up.expert(0), w.down.expert(0), activation, limit)
    y, expected = mlp_numba.gated_mlp(x, *arguments), mlp_reference.gated_mlp(x, *arguments)
    assert y.shape == x.shape
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


def test_huge_gate_does_not_overflow() -> None:
    w = ExpertWeights(Weight(torch.full((1, 2, 1), 1e4)), Weight(torch.ones(1, 1, 1)))
    x = torch.tensor([[1.0], [-1.0]])
    expected = torch.tensor([[1e8], [0.0]])
    torch.testing.assert_close(numba.experts_mlp(x, offsets_of([2]), w, "swiglu", None), expected)


@pytest.mark.parametrize("module", [reference, numba])
@pytest.mark.parametrize("offsets", [[0, 2, 1, 4], [1, 2, 3, 4], [0, 1, 2, 3], [0, 1, 2, 5], [0, -1, 2, 4]])
def test_refuses_offsets_that_are_not_the_rows_in_order(module: object, offsets: list[int]) -> None:
    w = make(3, 8, 16)
    with pytest.raises(KernelError, match="must rise from 0 to the 4 rows"):
        module.experts_mlp(torch.zeros(4, 16), torch.tensor(offsets, dtype=torch.int32), w, "swiglu", None)  # type: ignore[attr-defined]


@pytest.mark.parametrize("module", [reference, numba])
def test_refuses_what_does_not_fit(module: object) -> None:
    w, experts_mlp = make(3, 8, 16), module.experts_mlp  # type: ignore[attr-defined]
    with pytest.raises(KernelError, match=r"offsets has dtype torch\.int64; expected int32"):  # C16
        experts_mlp(torch.zeros(4, 16), torch.tensor([0, 1, 2, 4]), w, "swiglu", None)
    with pytest.raises(KernelError, match=r"offsets has shape \[3\]; expected \[4\]"):
        experts_mlp(torch.zeros(4, 16), offsets_of([1, 3]), w, "swiglu", None)
    with pytest.raises(KernelError, match="needs a limit"):
        experts_mlp(torch.zeros(4, 16), offsets_of([1, 1, 2]), w, "swiglu_clamped", None)
    with pytest.raises(KernelError, match="'gelu' is not known"):
        experts_mlp(torch.zeros(4, 16), offsets_of([1, 1, 2]), w, "gelu", None)
    with pytest.raises(KernelError, match="do not fit"):
        ExpertWeights(Weight(torch.zeros(3, 15, 16)), Weight(torch.zeros(3, 16, 8)))
