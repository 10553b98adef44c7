from __future__ import annotations

import pytest
import torch

from moestro.spec.fields import RouterSpec

pytest.importorskip("triton")

from moestro.kernels.ops.route import reference
from moestro.kernels.ops.route.triton import route

SPECS = [
    RouterSpec(8, 2, "softmax", False),
    RouterSpec(128, 8, "softmax", True),
    RouterSpec(60, 4, "softmax", True),
    RouterSpec(6, 3, "topk_softmax", False),
    RouterSpec(32, 4, "topk_softmax", False),
    RouterSpec(16, 2, "sparsemixer", False),
    RouterSpec(256, 8, "sigmoid", True, 2.5, num_groups=8, top_groups=4, group_score="top2_sum"),
    RouterSpec(160, 6, "softmax", False, 16.0, num_groups=8, top_groups=3, group_score="max"),
    RouterSpec(384, 8, "sigmoid", True, 2.827, num_groups=1, top_groups=1, group_score="top2_sum"),
    RouterSpec(24, 3, "sigmoid", True, num_groups=3, top_groups=2, group_score="top2_sum"),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_equals_reference(spec: RouterSpec, biased: bool, device: torch.device) -> None:
    if biased and spec.scoring == "sparsemixer":
        pytest.skip("sparsemixer takes no bias")
    logits = torch.randn(9, spec.num_experts, device=device) * 2
    logits[3] = logits[2].round()  # many equal scores
    logits[4] = 0.0
    bias = torch.randn(spec.num_experts, device=device) - 1.5 if biased else None
    ids, weights = route(logits, spec, bias)
    expected_ids, expected_weights = reference.route(logits, spec, bias)
    assert ids.dtype == torch.int32
    assert torch.equal(ids, expected_ids)
    assert torch.allclose(weights, expected_weights, rtol=1e-5, atol=1e-7)


def test_c48_padding_goes_nowhere_and_the_rest_is_counted(device: torch.device) -> None:
    spec = RouterSpec(16, 3, "softmax", True)
    logits = torch.randn(7, 16, device=device)
    slots = torch.tensor([[4, 1, -1, 9, -1, 0, 2], [0] * 7], device=device)[0]
    counts = torch.full((16,), 5, dtype=torch.int64, device=device)
    ids, weights = route(logits, spec, None, slots, counts)
    real = slots >= 0
    assert (ids[~real] == -1).all()
    assert (weights[~real] == 0).all()
    expected, _ = reference.route(logits[real], spec)
    assert torch.equal(ids[real], expected)
    assert torch.equal(counts - 5, torch.bincount(expected.flatten().long(), minlength=16))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_ids_stay_in_range_whatever_the_logits(spec: RouterSpec, device: torch.device) -> None:
    logits = torch.randn(4, spec.num_experts, device=device)
    logits[0] = float("nan")
    logits[1, ::2] = float("nan")
    logits[2] = float("-inf")
    logits[3, 1] = float("inf")
    ids, _ = route(logits, spec)
    assert ((ids >= 0) & (ids < spec.num_experts)).all()
    assert all(len(set(row)) == spec.top_k for row in ids.tolist()), "no expert twice"


def test_no_tokens(device: torch.device) -> None:
    assert route(torch.zeros(0, 8, device=device), RouterSpec(8, 2))[0].shape == (0, 2)
