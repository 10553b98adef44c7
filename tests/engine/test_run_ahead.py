"""Steps launched before the tokens of the last one are known, as on a GPU: the tokens are the same, nothing is lost.

The device is played by a runner on the CPU that keeps its choice to itself until it is waited for.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest
import torch

from moestro import LLM, SamplingParams
from moestro.engine.device_sampler import choose_rows, is_plain
from moestro.engine.request import Request
from moestro.engine.runner import Runner
from moestro.engine.sampler import NOT_A_NUMBER, Choice, Grammars, Sampled, sample
from moestro.engine.scheduler import StepPlan
from moestro.engine.sequence import PENDING, Sequence


@dataclass
class LateChoice:
    tokens: torch.Tensor
    runs_ahead: bool = True

    def wait(self) -> list[Sampled]:
        return [Sampled(None, None, NOT_A_NUMBER) if t < 0 else Sampled(t, None) for t in self.tokens.tolist()]


class LateRunner(Runner):
    def __init__(self, runner: Runner) -> None:
        super().__init__(runner.decoder, runner.kv, runner.counters, runner.batches)
        self.last_tokens = torch.zeros(512, dtype=torch.int64)
        self.ahead = 0

    def run(self, plan: StepPlan) -> torch.Tensor:
        self.steps += 1
        self.ahead += any(item.sequence.token_ids[-1] == PENDING for item in plan.scheduled)
        return self.decoder.forward(self.batches.build(plan, last_tokens=self.last_tokens), self.kv, self.counters)

    def choose(self, logits_RV: torch.Tensor, sequences: list[Sequence], grammars: Grammars) -> Choice:
        if not all(is_plain(s) for s in sequences):
            return super().choose(logits_RV, sequences, grammars)
        tokens = choose_rows(logits_RV, sequences)
        self.last_tokens[: len(sequences)] = tokens
        return LateChoice(tokens)


def load(folder: Path, *, late: bool, **options: object) -> LLM:
    llm = LLM(folder, dtype="float32", **({"max_model_len": 80, "kv_memory": "64MiB"} | options))
    if late:
        engine = llm._loop._engine
        llm._loop._engine = replace(engine, runner=LateRunner(engine.runner))
    return llm


def many_requests(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(5)
    prompts = [[rng.randrange(3, 250) for _ in range(rng.randint(1, 40))] for _ in range(count)]
    params = [
        SamplingParams(
            temperature=rng.choice([0.0, 0.8]),
            top_k=rng.choice([0, 5]),
            top_p=rng.choice([1.0, 0.7]),
            min_p=rng.choice([0.0, 0.05]),
            presence_penalty=0.5 if rng.random() < 0.02 else 0.0,
            min_tokens=3 if rng.random() < 0.02 else 0,
            stop_token_ids=rng.choice([[], [9, 17, 60, 111]]),
            seed=i,
            max_tokens=rng.randint(3, 24),
            ignore_eos=rng.random() < 0.5,
        )
        for i in range(count)
    ]
    return prompts, params


@pytest.mark.parametrize("pages", [None, 30])
def test_the_same_tokens_as_step_by_step(tiny: Path, pages: int | None) -> None:
    prompts, params = many_requests(120)
    options: dict[str, object] = {"max_num_seqs": 16}
    if pages is not None:
        from moestro.spec.registry import read_spec

        options["kv_memory"] = str(pages * read_spec(tiny).kv_values_per_token * 16 * 4)
    late = load(tiny, late=True, **options)
    results = late.generate(prompts, params)
    expected = load(tiny, late=False, **options).generate(prompts, params)
    for i, (found, wanted) in enumerate(zip(results, expected, strict=True)):
        assert (found.token_ids, found.finish_reason) == (wanted.token_ids, wanted.finish_reason), i
    stats = late.stats()
    assert (stats.kv_pages_used, stats.num_running, stats.num_waiting) == (0, 0, 0)
    assert pages is None or stats.preemptions > 0
    runner = late._loop._engine.runner
    assert isinstance(runner, LateRunner)
    assert runner.ahead > 20


def test_an_abort_in_flight_leaves_nothing_behind(tiny: Path) -> None:
    llm = load(tiny, late=True)
    stream = llm.stream([5, 6, 7], SamplingParams(max_tokens=20, ignore_eos=True))
    next(stream)
    next(stream)
    stream.close()
    assert llm.stats().kv_pages_used == 0
    assert len(llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids) == 4


def test_a_step_that_fails_in_flight_ends_its_requests_only(tiny: Path) -> None:
    llm = load(tiny, late=True)
    loop = llm._loop
    for name in "ab":
        loop.add(Request(name, [5, 6, 7], SamplingParams(max_tokens=20, ignore_eos=True)))
    loop.step()
    runner = loop._engine.runner
    real, runner.run = runner.run, lambda plan: 1 / 0  # type: ignore[method-assign,assignment]
    with pytest.raises(ZeroDivisionError):
        loop.step()
    runner.run = real  # type: ignore[method-assign]
    failed = loop.fail_step("broke")
    assert sorted(d.request_id for d in failed) == ["a", "b"]
    assert not loop.has_work
    assert llm.stats().kv_pages_used == 0
    assert len(llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids) == 4


def test_rows_chosen_together_are_rows_chosen_alone() -> None:
    torch.manual_seed(3)
    prompts, params = many_requests(60)
    params = [msgspec.structs.replace(p, presence_penalty=0.0, min_tokens=0) for p in params]
    sequences = [
        Sequence(Request(str(i), p, q), 0, seed=i) for i, (p, q) in enumerate(zip(prompts, params, strict=True))
    ]
    logits = torch.randn(60, 3000) * 3
    logits[7, 11] = float("nan")
    logits[8, 5] = float("inf")
    together = choose_rows(logits.clone(), sequences).tolist()
    assert together[7] == together[8] == -1
    for i, found in enumerate(together):
        alone = sample(logits[i : i + 1].clone(), sequences[i : i + 1])[0].token_id
        assert (found if found >= 0 else None) == alone, i
