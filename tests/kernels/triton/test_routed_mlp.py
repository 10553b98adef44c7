from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moestro.kernels.ops.experts import ExpertWeights
from moestro.kernels.ops.gated_mlp import reference as plain
from moestro.kernels.ops.gated_mlp.triton import gated_mlp
from moestro.kernels.ops.routed_mlp import reference, triton_dot, triton_gemv
from moestro.kernels.ops.routed_mlp.triton import routed_mlp
from moestro.quant.formats import Weight

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def problem(T: int, K: int, E: int, D: int, F: int, dtype: torch.dtype, device: torch.device, bias: bool = False):  # type: ignore[no-untyped-def]
    def rand(*shape: int, dtype: torch.dtype = dtype, sd: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape) * sd).to(device, dtype)

    ids = torch.stack([torch.randperm(E)[:K] for _ in range(T)]).int().to(device)
    weights = torch.rand(T, K).to(device)
    biases = (rand(E, 2 * F, dtype=torch.float32), rand(E, D, dtype=torch.float32)) if bias else (None, None)
    experts = ExpertWeights(Weight(rand(E, 2 * F, D, sd=D**-0.5)), Weight(rand(E, D, F, sd=F**-0.5)), *biases)
    return rand(T, D), ids, weights, experts


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("D", "F"), [(48, 40), (64, 128)])
@pytest.mark.parametrize("T", [1, 2, 3, 17, 40, 70])
def test_equals_reference(T: int, D: int, F: int, dtype: torch.dtype, device: torch.device) -> None:
    x, ids, weights, experts = problem(T, 3, 6, D, F, dtype, device)
    if T > 2:
        ids[1], weights[1] = -1, 0.0  # padding
        ids[2, 1], weights[2, 1] = -1, 0.0  # an expert of another rank
    expected = reference.routed_mlp(x.float(), ids, weights, upcast(experts), "swiglu", None).total(torch.float32)
    found = routed_mlp(x, ids, weights, experts, "swiglu", None).total(torch.float32)
    assert error(found, expected) < TOLERANCE[dtype]
    if T > 2:
        assert (found[1] == 0).all()


def upcast(experts: ExpertWeights) -> ExpertWeights:
    gate_up, down = Weight(experts.gate_up.data.float()), Weight(experts.down.data.float())
    return ExpertWeights(gate_up, down, experts.gate_up_bias_E2F, experts.down_bias_ED)


@pytest.mark.parametrize("T", [1, 5, 40])
def test_biases_and_the_clamped_activation(T: int, device: torch.device) -> None:
    x, ids, weights, experts = problem(T, 4, 8, 32, 72, torch.float32, device, bias=True)
    expected = reference.routed_mlp(x, ids, weights, experts, "swiglu_clamped", 0.7).total(torch.float32)
    found = routed_mlp(x, ids, weights, experts, "swiglu_clamped", 0.7).total(torch.float32)
    assert error(found, expected) < 1e-5


@pytest.mark.parametrize("form", [triton_gemv, triton_dot])
def test_forms_agree_where_both_can_run(form: object, device: torch.device) -> None:
    x, ids, weights, experts = problem(2, 2, 4, 64, 64, torch.float32, device)
    expected = reference.routed_mlp(x, ids, weights, experts, "swiglu", None).total(torch.float32)
    found = form.mlp(x, ids, weights, experts, False, 0.0).total(torch.float32)  # type: ignore[attr-defined]
    assert error(found, expected) < 1e-5


@pytest.mark.parametrize("T", [1, 7, 70])
def test_gated_mlp_equals_reference(T: int, device: torch.device) -> None:
    x, gate_up, down = (torch.randn(*s).to(device) for s in ((T, 40), (2 * 56, 40), (40, 56)))
    expected = plain.gated_mlp(x, Weight(gate_up), Weight(down), "swiglu", None)
    assert error(gated_mlp(x, Weight(gate_up), Weight(down), "swiglu", None), expected) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 2, 8, 32, 64, 200, 600, 4000])
@pytest.mark.parametrize(("K", "E", "D", "F"), [(8, 128, 2048, 768), (2, 8, 4096, 14336), (4, 32, 2880, 2880)])
def test_real_shapes(T: int, K: int, E: int, D: int, F: int, device: torch.device) -> None:
    bias = D == 2880
    x, ids, weights, experts = problem(T, K, E, D, F, torch.bfloat16, device, bias)
    args = ("swiglu_clamped", 7.0) if bias else ("swiglu", None)
    if T > 3:
        ids[3], weights[3] = -1, 0.0
    expected = reference.routed_mlp(x, ids, weights, experts, *args).total(torch.float32)
    found = routed_mlp(x, ids, weights, experts, *args).total(torch.float32)
    assert error(found, expected) < 1e-2
