"""Routing against the values of the public bug cases and against a plain loop."""

from __future__ import annotations

import math

import pytest
import torch

from moestro.errors import SettingError
from moestro.moe.router import Routing, route
from moestro.spec.fields import RouterSpec


def plain_route(logits: list[float], spec: RouterSpec, bias: list[float] | None) -> tuple[list[int], list[float]]:
    """One token by the definitions, in Python floats."""
    experts = range(spec.num_experts)
    if spec.scoring == "sigmoid":
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    elif spec.scoring == "softmax":
        total = sum(math.exp(x) for x in logits)
        scores = [math.exp(x) / total for x in logits]
    else:
        scores = list(logits)
    selection = [s + (bias[e] if bias else 0.0) for e, s in enumerate(scores)]
    allowed = set(experts)
    if spec.num_groups is not None and spec.top_groups is not None:
        size = spec.num_experts // spec.num_groups
        best = 1 if spec.group_score == "max" else 2
        group_scores = [
            sum(sorted(selection[g * size : (g + 1) * size], reverse=True)[:best]) for g in range(spec.num_groups)
        ]
        groups = sorted(range(spec.num_groups), key=lambda g: (-group_scores[g], g))[: spec.top_groups]
        allowed = {e for g in groups for e in range(g * size, (g + 1) * size)}
    ids = sorted(allowed, key=lambda e: (-selection[e], e))[: spec.top_k]
    weights = [scores[e] for e in ids]
    if spec.scoring == "topk_softmax":
        total = sum(math.exp(w) for w in weights)
        weights = [math.exp(w) / total for w in weights]
    if spec.renormalize:
        weights = [w / sum(weights) for w in weights]
    return ids, [w * spec.routed_scaling_factor for w in weights]


def one(logits: list[float], spec: RouterSpec, bias: list[float] | None = None) -> tuple[list[int], list[float]]:
    routing = route(torch.tensor([logits]), spec, None if bias is None else torch.tensor(bias))
    return routing.ids_TK[0].tolist(), routing.weights_TK[0].tolist()


SPECS = [
    RouterSpec(8, 2, "softmax", True),
    RouterSpec(60, 4, "softmax", False),
    RouterSpec(40, 8, "topk_softmax"),
    RouterSpec(7, 7, "softmax", True),  # all experts, an odd number
    RouterSpec(1, 1, "sigmoid", True),  # one expert
    RouterSpec(160, 6, "softmax", False, 16.0, 8, 3, "max"),
    RouterSpec(256, 8, "sigmoid", True, 2.5, 8, 4, "top2_sum"),
    RouterSpec(384, 8, "sigmoid", True, 2.827, 1, 1, "top2_sum"),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.scoring}-{s.num_experts}-{s.top_k}")
def test_equals_plain_loop(spec: RouterSpec) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(33, spec.num_experts, generator=generator, dtype=torch.float32)
    bias = torch.randn(spec.num_experts, generator=generator) * 0.1 if spec.scoring == "sigmoid" else None
    routing = route(logits, spec, bias)
    for t in range(33):
        ids, weights = plain_route(logits[t].tolist(), spec, None if bias is None else bias.tolist())
        assert routing.ids_TK[t].tolist() == ids
        assert routing.weights_TK[t].tolist() == pytest.approx(weights, rel=1e-5)


def test_c01_softmax_over_all_or_over_the_chosen() -> None:
    logits = [2.0, 1.0, 0.0, -1.0]
    ids, weights = one(logits, RouterSpec(4, 2, "softmax", renormalize=False))
    assert ids == [0, 1]
    assert weights == pytest.approx([0.644, 0.237], abs=5e-4)
    _, renormalized = one(logits, RouterSpec(4, 2, "softmax", renormalize=True))
    _, over_chosen = one(logits, RouterSpec(4, 2, "topk_softmax"))
    assert renormalized == pytest.approx([0.731, 0.269], abs=5e-4)
    assert renormalized == pytest.approx(over_chosen, abs=1e-6)


def logit(p: float) -> float:
    return math.log(p / (1 - p))


def test_c03_bias_chooses_but_does_not_weigh() -> None:
    ids, weights = one([logit(p) for p in (0.5, 0.4, 0.3)], RouterSpec(3, 2, "sigmoid"), [0.0, 0.0, 1.0])
    assert ids == [2, 0]
    assert weights == pytest.approx([0.3, 0.5])


def test_c04_ruled_out_groups_stay_out_when_scores_are_negative() -> None:
    spec = RouterSpec(4, 2, "sigmoid", num_groups=2, top_groups=1, group_score="top2_sum")
    bias = [-0.1 - 0.5, -0.2 - 0.5, -0.9 - 0.5, -0.8 - 0.5]  # sigmoid(0) = 0.5
    assert one([0.0] * 4, spec, bias)[0] == [0, 1]


def test_c04_group_score_max_and_sum_of_two_differ() -> None:
    logits = [logit(p) for p in (0.9, 0.1, 0.6, 0.6)]
    assert one(logits, RouterSpec(4, 2, "sigmoid", num_groups=2, top_groups=1, group_score="max"))[0] == [0, 1]
    assert one(logits, RouterSpec(4, 2, "sigmoid", num_groups=2, top_groups=1, group_score="top2_sum"))[0] == [2, 3]


@pytest.mark.parametrize(("renormalize", "expected"), [(False, [1.0, 0.5]), (True, [2.5 * 2 / 3, 2.5 / 3])])
def test_c06_scaling_factor_applies_in_both_branches(renormalize: bool, expected: list[float]) -> None:
    spec = RouterSpec(3, 2, "sigmoid", renormalize, routed_scaling_factor=2.5)
    assert one([logit(0.4), logit(0.2), -9.0], spec)[1] == pytest.approx(expected, rel=1e-5)


def test_c08_bias_of_16_bits_is_refused_and_float32_decides() -> None:
    spec = RouterSpec(3, 1, "sigmoid")
    bias = torch.tensor([6.83, 6.84, 6.85])
    assert route(torch.zeros(1, 3), spec, bias).ids_TK.tolist() == [[2]]
    with pytest.raises(SettingError, match="float32"):
        route(torch.zeros(1, 3), spec, bias.bfloat16())


def test_float32_throughout_for_bf16_logits() -> None:
    logits = torch.randn(5, 8, generator=torch.Generator().manual_seed(2)).bfloat16()
    routing = route(logits, RouterSpec(8, 2, "softmax", True))
    same = route(logits.float(), RouterSpec(8, 2, "softmax", True))
    assert routing.weights_TK.dtype == torch.float32
    assert torch.equal(routing.weights_TK, same.weights_TK)


@pytest.mark.parametrize("num_tokens", [1, 64])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "topk_softmax", "sparsemixer"])
def test_c10_ties_go_to_the_lower_id(num_tokens: int, scoring: str) -> None:
    routing = route(torch.full((num_tokens, 8), 0.25), RouterSpec(8, 2, scoring))  # type: ignore[arg-type]
    assert routing.ids_TK.tolist() == [[0, 1]] * num_tokens


def test_c10_close_is_not_equal() -> None:
    logits = torch.tensor([[1.0, 1.0 + 1.2e-7]])
    assert route(logits, RouterSpec(2, 2, "topk_softmax")).ids_TK.tolist() == [[1, 0]]
    assert one([1.0, 1.0], RouterSpec(2, 2, "topk_softmax"))[0] == [0, 1]


def test_c10_tied_groups_go_to_the_lower_group() -> None:
    spec = RouterSpec(6, 2, "sigmoid", num_groups=3, top_groups=1, group_score="max")
    assert one([0.0, 0.0, 1.0, 0.0, 1.0, 0.0], spec)[0] == [2, 3]


def test_c12_many_experts_and_a_whole_prefill() -> None:
    logits = torch.randn(54_273, 384, generator=torch.Generator().manual_seed(3))
    routing = route(logits, RouterSpec(384, 8, "sigmoid", True, num_groups=1, top_groups=1))
    assert torch.equal(routing.ids_TK[-1], route(logits[-1:], RouterSpec(384, 8, "sigmoid", True)).ids_TK[0])
    assert (routing.ids_TK.sort(dim=1).values.diff(dim=1) > 0).all(), "an expert twice in a row (C13)"
    assert torch.allclose(routing.weights_TK.sum(dim=1), torch.ones(54_273), atol=1e-5)


def test_c16_ids_are_int32() -> None:
    assert route(torch.zeros(2, 4), RouterSpec(4, 2)).ids_TK.dtype == torch.int32
    with pytest.raises(AssertionError):
        Routing(torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, 2))


def test_no_tokens() -> None:
    routing = route(torch.zeros(0, 8), RouterSpec(8, 2))
    assert routing.ids_TK.shape == (0, 2)


def test_c48_padding_goes_nowhere() -> None:
    slots, counts = torch.tensor([5, 0, 9, -1, -1, -1, -1, -1]), torch.zeros(4, dtype=torch.int64)
    routing = route(torch.zeros(8, 4), RouterSpec(4, 2), slots_T=slots, counts_E=counts)
    assert counts.tolist() == [3, 3, 0, 0]
    assert (routing.ids_TK[:3] >= 0).all()
    assert (routing.ids_TK[3:] == -1).all()
    assert routing.weights_TK[3:].abs().sum() == 0


@pytest.mark.parametrize(
    ("logits", "bias"),
    [
        (torch.zeros(2, 3), None),
        (torch.zeros(4), None),
        (torch.zeros(2, 4).int(), None),
        (torch.zeros(2, 4), torch.zeros(3)),
    ],
)
def test_wrong_shapes_are_named(logits: torch.Tensor, bias: torch.Tensor | None) -> None:
    with pytest.raises(SettingError, match=r"\[T, 4\]|\[4\]"):
        route(logits, RouterSpec(4, 2), bias)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_experts": 4, "top_k": 5},
        {"num_experts": 4, "top_k": 0},
        {"num_experts": 6, "top_k": 1, "num_groups": 4, "top_groups": 1},
        {"num_experts": 8, "top_k": 3, "num_groups": 4, "top_groups": 1},
        {"num_experts": 8, "top_k": 3, "num_groups": 4},
        {"num_experts": 8, "top_k": 3, "scoring": "sparsemixer"},
    ],
)
def test_impossible_specs_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"top_k|num_groups|top_groups"):
        RouterSpec(**fields)  # type: ignore[arg-type]
