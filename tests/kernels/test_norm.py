"""rms_norm and add_rms_norm_: reference against a plain loop, CPU kernel against the reference."""

from __future__ import annotations

import pytest
import torch

from moestro.errors import KernelError
from moestro.kernels.ops.norm import numba, reference

SHAPES = [
    (1, 2048),  # decode
    (3, 1),  # a single value
    (7, 33),  # no whole vector at the end
    (64, 1024),  # enough to be shared out over threads
    (0, 16),  # C54
]


def test_reference_equals_plain_loop() -> None:
    x, weight = torch.randn(2, 5), torch.randn(5)
    y = reference.rms_norm(x, weight, 1e-3)
    for t in range(2):
        mean = sum(float(v) ** 2 for v in x[t]) / 5
        for d in range(5):
            assert float(y[t, d]) == pytest.approx(float(x[t, d]) / (mean + 1e-3) ** 0.5 * float(weight[d]), abs=1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_reference(shape: tuple[int, int]) -> None:
    x, weight = torch.randn(shape), torch.randn(shape[1])
    y = numba.rms_norm(x, weight, 1e-6)
    assert y.shape == shape
    torch.testing.assert_close(y, reference.rms_norm(x, weight, 1e-6), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.22])
def test_add_equals_reference(shape: tuple[int, int], scale: float) -> None:
    residual, x, weight = torch.randn(shape), torch.randn(shape), torch.randn(shape[1])
    other, before = residual.clone(), x.clone()
    y = numba.add_rms_norm_(residual, x, scale, weight, 1e-5)
    expected = reference.add_rms_norm_(other, x, scale, weight, 1e-5)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(residual, other, rtol=1e-6, atol=1e-6)
    assert torch.equal(x, before)
    assert shape[0] == 0 or y.data_ptr() != residual.data_ptr()


def test_zero_row_stays_zero() -> None:
    assert torch.equal(numba.rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6), torch.zeros(2, 8))


def test_bfloat16_weight_and_strided_input() -> None:
    x, weight = torch.randn(4, 64)[:, :32], torch.randn(32).bfloat16()
    torch.testing.assert_close(numba.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))


def test_refuses() -> None:
    for module in (reference, numba):
        with pytest.raises(KernelError, match=r"weight has shape \[4\]; expected \[8\]"):
            module.rms_norm(torch.zeros(2, 8), torch.zeros(4), 1e-6)
        with pytest.raises(KernelError, match=r"x has shape \[1, 8\]; expected \[2, 8\]"):
            module.add_rms_norm_(torch.zeros(2, 8), torch.zeros(1, 8), 1.0, torch.zeros(8), 1e-6)
    with pytest.raises(KernelError, match="must be contiguous"):
        numba.add_rms_norm_(torch.zeros(2, 16)[:, :8], torch.zeros(2, 8), 1.0, torch.zeros(8), 1e-6)
