"""Scheduling as pure policy: a fake model answers with token 7."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.engine.request import Request, SamplingParams
from moestro.engine.scheduler import Scheduler, StepPlan
from moestro.engine.sequence import Sequence
from moestro.kv.pages import PagePool


def make(num_pages: int, page_size: int = 16, seqs: int = 8, budget: int = 64, caching: bool = True) -> Scheduler:
    return Scheduler(
        PagePool(num_pages, page_size, prefix_caching=caching), max_num_seqs=seqs, max_num_batched_tokens=budget
    )


def sequence(name: str, prompt: list[int], max_tokens: int, index: int = 0) -> Sequence:
    return Sequence(Request(name, prompt, SamplingParams()), index, seed=0, max_tokens=max_tokens)


def step(scheduler: Scheduler) -> tuple[StepPlan, list[Sequence]]:
    plan = scheduler.plan_step()
    scheduler.commit(plan, [[7] if item.samples else [] for item in plan.scheduled])
    return plan, scheduler.collect_finished()


def run(scheduler: Scheduler, limit: int = 5000) -> list[Sequence]:
    done: list[Sequence] = []
    for _ in range(limit):
        if not scheduler.has_work:
            return done
        plan, finished = step(scheduler)
        assert plan.scheduled, "work is left but nothing was planned"
        done += finished
    raise AssertionError("the scheduler does not come to an end")


def test_prompts_are_cut_into_chunks_and_decoding_goes_first() -> None:
    scheduler = make(64, budget=32)
    scheduler.add(sequence("a", [1] * 8, 10))
    step(scheduler)
    scheduler.add(sequence("b", [2] * 100, 2))
    plan, _ = step(scheduler)
    assert [(s.sequence.request.request_id, s.num_tokens, s.samples) for s in plan.scheduled] == [
        ("a", 1, True),
        ("b", 31, False),
    ]


def test_c69_minimal_preemption() -> None:
    scheduler = make(7, caching=False)
    for name in "ab":
        scheduler.add(sequence(name, [ord(name)] * 34, 35))
    done = run(scheduler)
    assert {s.request.request_id: s.num_output for s in done} == {"a": 35, "b": 35}
    assert scheduler.stats.preemptions >= 1
    assert done[0].request.request_id == "a", "the oldest makes progress"
    assert scheduler.pool.num_available == 7


def test_c71_recompute_is_not_a_prefix_hit() -> None:
    scheduler = make(7)
    for name in "ab":
        scheduler.add(sequence(name, [ord(name)] * 34, 35))
    run(scheduler)
    assert scheduler.stats.preemptions >= 1
    assert scheduler.stats.prefix_hits == 0
    assert scheduler.stats.prefix_queries == 68


def test_c72_long_prompts_do_not_thrash() -> None:
    scheduler = make(10, budget=16)
    scheduler.add(sequence("a", [1] * 120, 4))
    scheduler.add(sequence("b", [2] * 120, 4))
    done = run(scheduler, limit=60)
    assert [s.request.request_id for s in done] == ["a", "b"]
    assert scheduler.stats.preemptions == 0


def test_completions_of_one_prompt_share_its_pages() -> None:
    scheduler = make(64)
    request = Request("r", list(range(40)), SamplingParams(n=3))
    for index in range(3):
        scheduler.add(Sequence(request, index, seed=0, max_tokens=3))
    computed = 0
    while scheduler.has_work:
        plan, _ = step(scheduler)
        computed += plan.num_tokens
    assert computed == 40 + 2 * (40 - 32) + 3 * 2
    assert scheduler.stats.prefix_hits == 64


def test_an_aborted_sequence_frees_its_pages_wherever_it_is() -> None:
    scheduler = make(8, seqs=1)
    running, waiting = sequence("a", [1] * 20, 50), sequence("b", [2] * 20, 50)
    scheduler.add(running)
    scheduler.add(waiting)
    step(scheduler)
    for s in (running, waiting):
        s.finish("abort")
    assert scheduler.collect_finished() == [running, waiting]
    assert not scheduler.has_work
    assert scheduler.pool.num_used == 0
    assert scheduler.stats.finished == {"abort": 2}


@pytest.mark.parametrize("budget", [1, 7, 16, 17])
@pytest.mark.parametrize("prompt_len", [1, 15, 16, 17, 33, 255])
def test_c74_any_chunk_size_makes_progress(budget: int, prompt_len: int) -> None:
    scheduler = make(20, seqs=1, budget=budget)
    scheduler.add(sequence("a", [1] * prompt_len, 3))
    assert [s.num_output for s in run(scheduler)] == [3]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40), st.integers(0, 2)), min_size=1, max_size=25),
    st.integers(1, 5),
    st.integers(5, 40),
    st.booleans(),
)
def test_everything_ends_and_no_page_stays(
    jobs: list[tuple[int, int, int]], seqs: int, budget: int, caching: bool
) -> None:
    scheduler = make(101 // 4 + 1, page_size=4, seqs=seqs, budget=budget, caching=caching)
    for i, (prompt, output, kind) in enumerate(jobs):
        scheduler.add(sequence(str(i), [kind] * prompt, output))
    done = run(scheduler)
    assert sorted((int(s.request.request_id), s.num_output) for s in done) == [(i, j[1]) for i, j in enumerate(jobs)]
    assert scheduler.pool.num_available == scheduler.pool.num_pages
