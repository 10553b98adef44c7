"""Each sampling parameter by what it must do to a distribution, and rows that know nothing of each other."""

from __future__ import annotations

import math

import pytest
import torch

from moestro.engine.request import Request, SamplingParams
from moestro.engine.sampler import sample, uniform
from moestro.engine.sequence import Sequence
from moestro.errors import RequestError


def row(
    prompt: list[int] | None = None, output: list[int] | None = None, end: set[int] | None = None, **params: object
):
    request = Request("r", prompt or [0], SamplingParams(**params))  # type: ignore[arg-type]
    sequence = Sequence(request, 0, seed=request.params.seed or 0, end_ids=frozenset(end or ()), max_tokens=100)
    sequence.token_ids += output or []
    return sequence


def choose(logits: list[float], sequence: Sequence) -> int | None:
    return sample(torch.tensor([logits]), [sequence])[0].token_id


def drawn(logits: list[float], num: int = 2000, **params: object) -> dict[int, float]:
    sequences = [
        row(seed=i, temperature=1.0, **params) if "temperature" not in params else row(seed=i, **params)
        for i in range(num)
    ]
    ids = [s.token_id for s in sample(torch.tensor([logits] * num), sequences)]
    return {i: ids.count(i) / num for i in set(ids) if i is not None}


def test_greedy_takes_the_highest() -> None:
    assert choose([0.1, 2.0, 1.0], row(temperature=0)) == 1


def test_draws_follow_the_distribution() -> None:
    shares = drawn([math.log(0.6), math.log(0.3), math.log(0.1)])
    assert shares[0] == pytest.approx(0.6, abs=0.04)
    assert shares[2] == pytest.approx(0.1, abs=0.03)


def test_temperature_sharpens() -> None:
    assert drawn([math.log(0.6), math.log(0.4)], temperature=0.5)[0] == pytest.approx(0.36 / 0.52, abs=0.04)


def test_top_k_top_p_and_min_p_leave_what_they_should() -> None:
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    assert set(drawn(logits, top_k=2)) == {0, 1}
    assert set(drawn(logits, top_p=0.5)) == {0, 1}, "the token that crosses top_p stays"
    assert set(drawn(logits, top_p=0.4)) == {0}
    assert set(drawn(logits, min_p=0.6)) == {0, 1}
    assert set(drawn(logits, top_k=3, top_p=0.75)) == {0, 1}, "top_p counts within what top_k left: 0.44, 0.78"
    assert set(drawn(logits, top_k=-1)) == {0, 1, 2, 3}


def test_a_nucleus_wider_than_the_first_candidates_is_found() -> None:
    flat = torch.zeros(1, 5000)
    ids = {sample(flat.clone(), [row(seed=i, temperature=1.0, top_p=0.9)])[0].token_id for i in range(300)}
    assert max(i for i in ids if i is not None) > 2000


def test_penalties() -> None:
    assert choose([2.0, 1.5], row(prompt=[0], temperature=0, repetition_penalty=2.0)) == 1
    assert choose([-1.0, -1.5], row(prompt=[0], temperature=0, repetition_penalty=2.0)) == 1, "negative ones move away"
    assert choose([2.0, 1.5], row(prompt=[0], temperature=0, presence_penalty=1.0)) == 0, "the prompt does not count"
    assert choose([2.0, 1.5], row(output=[0], temperature=0, presence_penalty=1.0)) == 1
    assert choose([2.0, 1.5], row(output=[0], temperature=0, frequency_penalty=0.3)) == 0
    assert choose([2.0, 1.5], row(output=[0, 0], temperature=0, frequency_penalty=0.3)) == 1


def test_bias_and_min_tokens() -> None:
    assert choose([2.0, 1.5], row(temperature=0, logit_bias={0: -1.0})) == 1
    assert choose([2.0, 1.5], row(temperature=0, end={0}, min_tokens=1)) == 1
    assert choose([2.0, 1.5], row(temperature=0, end={0}, min_tokens=1, ignore_eos=True)) == 0
    assert choose([2.0, 1.5], row(temperature=0, stop_token_ids=[0], min_tokens=1)) == 1
    assert choose([2.0, 1.5], row(output=[1], temperature=0, end={0}, min_tokens=1)) == 0


def test_c89_logprobs_are_the_models_own_and_hold_the_chosen_token() -> None:
    logits = [math.log(0.5), math.log(0.3), math.log(0.2)]
    result = sample(torch.tensor([logits]), [row(temperature=0, logprobs=1, logit_bias={0: -100.0, 1: -100.0})])[0]
    assert result.logprobs is not None
    assert (result.token_id, result.logprobs.chosen.rank) == (2, 3)
    assert result.logprobs.chosen.logprob == pytest.approx(math.log(0.2))
    assert [t.token_id for t in result.logprobs.top] == [0]


def test_c99_rows_keep_their_own_parameters() -> None:
    """Greedy, seeded and top-k rows joined in one batch choose as they do alone."""
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    sequences = [
        row(temperature=0),
        row(temperature=1.0, seed=7),
        row(temperature=5.0, seed=8, top_k=1),
        row(temperature=1.0, seed=7, output=[3]),
    ]
    together = [s.token_id for s in sample(logits.clone(), sequences)]
    alone = [sample(logits[i : i + 1].clone(), [s])[0].token_id for i, s in enumerate(sequences)]
    assert together == alone
    assert together[0] == int(logits[0].argmax())
    assert together[2] == int(logits[2].argmax())


def test_a_poisoned_row_harms_no_other() -> None:
    logits = torch.tensor([[0.0, float("nan")], [0.0, 1.0]])
    results = sample(logits, [row(temperature=0), row(temperature=0)])
    assert [r.token_id for r in results] == [None, 1]


def test_uniform_numbers_are_uniform_and_differ() -> None:
    numbers = [
        uniform(seed, index, position) for seed in (-1, 0, 2**62) for index in range(3) for position in range(200)
    ]
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= u < 1 for u in numbers)
    assert sum(numbers) / len(numbers) == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 2.0),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 3.0),
        ("frequency_penalty", -3.0),
        ("max_tokens", 0),
        ("min_tokens", 99),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
        ("stop", [""]),
        ("stop_token_ids", [-1]),
        ("logit_bias", {1: 101.0}),
        ("seed", 2**64),
    ],
)
def test_wrong_values_name_their_field(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field


@pytest.mark.parametrize("params", [{"temperature": 1e-40}, {"top_p": 1e-46}, {"temperature": 1e-300, "top_p": 0.5}])
def test_values_too_small_for_float32_are_greedy(params: dict[str, float]) -> None:
    assert choose([0.1, 2.0, 1.0, -3.0], row(seed=1, **({"temperature": 1.0} | params))) == 1


@pytest.mark.parametrize("field", ["n", "top_k", "seed", "min_tokens", "max_tokens", "logprobs", "prompt_logprobs"])
def test_whole_numbers_are_whole(field: str) -> None:
    with pytest.raises(RequestError, match="whole number"):
        SamplingParams(**{field: 2.5})  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["stop", "stop_token_ids", "logit_bias"])
def test_lists_are_lists(field: str) -> None:
    with pytest.raises(RequestError, match=field):
        SamplingParams(**{field: 5})  # type: ignore[arg-type]
