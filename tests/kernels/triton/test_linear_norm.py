from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moestro.kernels.ops.linear import reference as plain_linear
from moestro.kernels.ops.linear.triton import linear, linear_parts
from moestro.kernels.ops.norm import reference
from moestro.kernels.ops.norm.triton import add_rms_norm_, add_rms_norm_logits_, rms_norm
from moestro.kernels.summands import Summands, total
from moestro.quant.formats import Weight

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def rand(device: torch.device, dtype: torch.dtype, *shape: int, sd: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape) * sd).to(device, dtype)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("N", "K"), [(40, 48), (96, 1024), (64, 64)])
@pytest.mark.parametrize("T", [1, 2, 5, 33, 70])
def test_linear(T: int, N: int, K: int, dtype: torch.dtype, device: torch.device) -> None:
    x, weight = rand(device, dtype, T, K), Weight(rand(device, dtype, N, K))
    for bias in (None, rand(device, torch.float32, N)):
        for out_dtype in (None, torch.float32):
            expected = plain_linear.linear(x.float(), Weight(weight.data.float()), bias)
            found = linear(x, weight, bias, out_dtype)
            assert found.dtype == (out_dtype or dtype)
            assert error(found, expected) < TOLERANCE[dtype]
        assert error(total(linear_parts(x, weight, bias), torch.float32), expected) < TOLERANCE[dtype]


def test_no_tokens(device: torch.device) -> None:
    assert linear(rand(device, torch.float32, 0, 8), Weight(rand(device, torch.float32, 4, 8)), None).shape == (0, 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [40, 128])
@pytest.mark.parametrize("T", [1, 3, 33, 70])
def test_norm_of_parts(T: int, D: int, dtype: torch.dtype, device: torch.device) -> None:
    weight, K = rand(device, dtype, D), 3
    pairs = rand(device, dtype, T * K, D)
    weights = torch.rand(T, K).to(device)
    weights[0, 1] = 0.0
    pairs[1] = float("nan")  # the pair of that weight
    split = rand(device, torch.float32, 4, T, D)
    for x in (
        rand(device, dtype, T, D),
        Summands(pairs.view(T, K, D).transpose(0, 1), weights),
        Summands(pairs.view(T, K, D).transpose(0, 1), weights, rand(device, dtype, T, D)),
        Summands(split),
        Summands(split[:1], None, rand(device, dtype, T, D)),
    ):
        residual = rand(device, dtype, T, D)
        mine, theirs = residual.clone(), residual.float()
        found = add_rms_norm_(mine, x, 0.5, weight, 1e-5)
        expected = reference.add_rms_norm_(theirs, total(x, torch.float32), 0.5, weight.float(), 1e-5)
        assert error(mine, theirs) < TOLERANCE[dtype]
        assert error(found, expected) < TOLERANCE[dtype]
        assert (
            error(rms_norm(residual, weight, 1e-5), reference.rms_norm(residual.float(), weight.float(), 1e-5)) < 1e-2
        )
    residual = rand(device, dtype, T, D)
    for E in (6, 16):
        router, bias = Weight(rand(device, dtype, E, D)), rand(device, torch.float32, E)
        mine, theirs = residual.clone(), residual.float()
        x = Summands(split)
        normed, logits = add_rms_norm_logits_(mine, x, 1.0, weight, 1e-5, router, bias)
        expected = reference.add_rms_norm_(theirs, total(x, torch.float32), 1.0, weight.float(), 1e-5)
        assert error(mine, theirs) < TOLERANCE[dtype]
        assert error(normed, expected) < TOLERANCE[dtype]
        assert logits.dtype == torch.float32
        exact = normed.float() @ router.data.float().T + bias
        assert error(logits, exact) < 1e-5, "of the norm as it was rounded"


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 2, 8, 32, 64, 257])
def test_real_shapes(T: int, device: torch.device) -> None:
    dtype, D, E = torch.bfloat16, 2048, 128
    for N, K in ((5120, 2048), (2048, 4096), (151936, 2048), (4096, 14336)):
        x, weight = rand(device, dtype, T, K), Weight(rand(device, dtype, N, K))
        expected = x.float() @ weight.data.float().T
        assert error(linear(x, weight, None, torch.float32), expected) < 1e-2
        if N < 10000:
            assert error(total(linear_parts(x, weight, None), torch.float32), expected) < 1e-2
    residual, x, weight = (
        rand(device, dtype, T, D),
        Summands(rand(device, torch.float32, 4, T, D)),
        rand(device, dtype, D),
    )
    router = Weight(rand(device, dtype, E, D))
    for _ in range(20):  # a race would show in some of them
        mine = residual.clone()
        normed, logits = add_rms_norm_logits_(mine, x, 1.0, weight, 1e-6, router, None)
        theirs = residual.float()
        expected = reference.add_rms_norm_(theirs, total(x, torch.float32), 1.0, weight.float(), 1e-6)
        assert error(mine, theirs) < 1e-2
        assert error(normed, expected) < 1e-2
        assert error(logits, normed.float() @ router.data.float().T) < 1e-4
