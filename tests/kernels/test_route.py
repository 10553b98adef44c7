"""route for the CPU against the reference; the reference itself is held to plain loops in tests/moe/test_router.py."""

from __future__ import annotations

import pytest
import torch

from moestro.kernels.ops.route import numba, reference
from moestro.spec.fields import RouterSpec

SPECS = [
    RouterSpec(8, 2),
    RouterSpec(60, 4),  # C12
    RouterSpec(40, 8, renormalize=True),  # C12
    RouterSpec(4, 4, renormalize=True),  # every expert is chosen
    RouterSpec(5, 1),
    RouterSpec(384, 8, "sigmoid", True, 2.5),  # C12
    RouterSpec(256, 8, "sigmoid", True, 2.5, 8, 4, "top2_sum"),  # DeepSeek-V3
    RouterSpec(160, 6, "softmax", False, 16.0, 8, 3, "max"),  # C12, DeepSeek-V2
    RouterSpec(32, 4, "topk_softmax"),
    RouterSpec(16, 2, "sparsemixer"),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 64, 700])
@pytest.mark.parametrize("kind", ["spread", "coarse", "equal"])
def test_equals_reference(spec: RouterSpec, tokens: int, kind: str) -> None:
    """Same ids, ties included (C10), and the same weights."""
    logits = torch.randn(tokens, spec.num_experts) * 3
    if kind == "coarse":
        logits = logits.round()
    elif kind == "equal":
        logits = torch.full_like(logits, 1.5)
    for bias in (None, torch.randn(spec.num_experts) * 0.2, torch.full((spec.num_experts,), -3.0)):
        if bias is not None and spec.scoring == "sparsemixer":
            continue
        ids, weights = numba.route(logits, spec, bias)
        expected_ids, expected_weights = reference.route(logits, spec, bias)
        assert ids.dtype == torch.int32
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(weights, expected_weights, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 64])
def test_ties_go_to_the_lower_id(tokens: int) -> None:
    """C10."""
    ids, _ = numba.route(torch.zeros(tokens, 8), RouterSpec(8, 2), None)
    assert ids.tolist() == [[0, 1]] * tokens
    close = torch.tensor([[1.0, 1.0 + 1e-6] + [0.0] * 6])
    assert numba.route(close, RouterSpec(8, 2, "topk_softmax"), None)[0].tolist() == [[1, 0]]


@pytest.mark.parametrize("spec", SPECS[:-1], ids=str)
def test_nan_logits_never_give_an_invalid_id(spec: RouterSpec) -> None:
    logits = torch.randn(5, spec.num_experts)
    logits[1, 3] = float("nan")
    logits[2] = float("nan")
    ids, _ = numba.route(logits, spec, None)
    assert bool(((ids >= 0) & (ids < spec.num_experts)).all())
    assert all(len(set(row)) == spec.top_k for row in ids.tolist())
