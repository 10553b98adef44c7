"""linear: reference against a plain loop, CPU kernel against the reference."""

from __future__ import annotations

import pytest
import torch

from moestro.errors import KernelError
from moestro.kernels.ops.linear import numba, reference
from moestro.quant.formats import Weight

FORMATS = [torch.float32, torch.bfloat16, torch.float16]

SHAPES = [
    (1, 64, 64),  # one row, all sizes whole vectors
    (1, 1, 1),  # nothing fills a tile or a vector
    (2, 4, 3),  # K shorter than any vector
    (5, 7, 17),  # no size a multiple of the tile
    (6, 8, 100),  # the widest tile of rows
    (7, 33, 50),  # one row beyond it
    (40, 130, 257),  # many tiles, each with a rest
    (0, 8, 16),  # C54: an idle rank
]


def test_reference_equals_plain_loop() -> None:
    x, w, b = torch.randn(3, 5), torch.randn(4, 5), torch.randn(4)
    y = reference.linear(x, Weight(w), b)
    for t in range(3):
        for n in range(4):
            expected = sum(float(x[t, k]) * float(w[n, k]) for k in range(5)) + float(b[n])
            assert float(y[t, n]) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_equals_reference(shape: tuple[int, int, int], dtype: torch.dtype, with_bias: bool) -> None:
    T, N, K = shape
    x, weight = torch.randn(T, K), Weight(torch.randn(N, K).to(dtype))
    bias = torch.randn(N) if with_bias else None
    y, expected = numba.linear(x, weight, bias), reference.linear(x, weight, bias)
    assert y.shape == (T, N)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5 * K**0.5)


def test_row_does_not_depend_on_the_batch() -> None:
    x, weight = torch.randn(64, 300), Weight(torch.randn(70, 300).bfloat16())
    together = numba.linear(x, weight, None)
    for rows in (1, 2, 3, 5, 6, 7, 13):
        assert torch.equal(numba.linear(x[:rows], weight, None), together[:rows])


def test_same_result_in_every_run() -> None:
    x, weight = torch.randn(9, 512), Weight(torch.randn(600, 512).bfloat16())
    first = numba.linear(x, weight, None)
    assert all(torch.equal(numba.linear(x, weight, None), first) for _ in range(20))


def test_bfloat16_bias_and_strided_input() -> None:
    x, weight, bias = torch.randn(4, 64)[:, ::2], Weight(torch.randn(8, 32)), torch.randn(8).bfloat16()
    torch.testing.assert_close(numba.linear(x, weight, bias), reference.linear(x, weight, bias), rtol=1e-5, atol=1e-5)


def test_infinity_and_nan_pass_through() -> None:
    x = torch.tensor([[float("inf"), 1.0], [float("nan"), 1.0], [1.0, 1.0]])
    y = numba.linear(x, Weight(torch.ones(4, 2).bfloat16()), None)
    assert torch.isinf(y[0]).all()
    assert torch.isnan(y[1]).all()
    assert torch.equal(y[2], torch.full((4,), 2.0))


@pytest.mark.parametrize("module", [reference, numba])
def test_refuses_what_does_not_fit(module: object) -> None:
    linear = module.linear  # type: ignore[attr-defined]
    weight = Weight(torch.zeros(4, 8))
    with pytest.raises(KernelError, match=r"x has shape \[2, 7\]; expected \[T, 8\]"):
        linear(torch.zeros(2, 7), weight, None)
    with pytest.raises(KernelError, match=r"bias has shape \[3\]; expected \[4\]"):
        linear(torch.zeros(2, 8), weight, torch.zeros(3))
    with pytest.raises(KernelError, match=r"expected \[N, K\]"):
        linear(torch.zeros(2, 8), Weight(torch.zeros(2, 4, 8)), None)


def test_kernel_refuses_other_activations() -> None:
    with pytest.raises(KernelError, match="takes float32 on the CPU"):
        numba.linear(torch.zeros(2, 8, dtype=torch.bfloat16), Weight(torch.zeros(4, 8)), None)
