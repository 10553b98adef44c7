"""The same request gives the same tokens, whatever else happens: batching, chunks, prefix hits, preemption, streaming,
placement."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from moestro import LLM, Placement, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def prompts(count: int, longest: int = 70, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 250) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def load(folder: Path, **options: object) -> LLM:
    return LLM(folder, dtype="float32", **({"max_model_len": 512, "kv_memory": "64MiB"} | options))


def tokens(llm: LLM, many: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [r.token_ids for r in llm.generate(many, params)]


@pytest.fixture(scope="module", params=["tiny", "tiny_latent"])
def folder(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def alone(folder: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, and their tokens when each runs by itself with nothing cached."""
    llm = load(folder, enable_prefix_caching=False)
    many = prompts(12)
    return many, [tokens(llm, [p])[0] for p in many]


def test_batched_is_alone(folder: Path, alone: tuple[list[list[int]], list[list[int]]]) -> None:
    many, expected = alone
    assert tokens(load(folder), many) == expected


def test_c74_chunked_is_whole(folder: Path) -> None:
    many = [p[:n] for p, n in zip(prompts(6, 300, seed=1), (1, 15, 16, 17, 33, 255), strict=True)]
    whole = tokens(load(folder, max_num_batched_tokens=512, enable_prefix_caching=False), many)
    for chunk in (1, 7, 16, 17):
        assert tokens(load(folder, max_num_batched_tokens=chunk, enable_prefix_caching=False), many) == whole, chunk


def test_prefix_hit_is_miss(folder: Path, alone: tuple[list[list[int]], list[list[int]]]) -> None:
    many, expected = alone
    llm = load(folder)
    first = tokens(llm, many)
    before = llm.stats().prefix_hits
    assert tokens(llm, many) == first == expected
    assert llm.stats().prefix_hits - before >= sum((len(p) - 1) // 16 * 16 for p in many)


def test_preempted_is_not(folder: Path, alone: tuple[list[list[int]], list[list[int]]]) -> None:
    many, expected = alone
    small = load(folder, max_model_len=112, kv_memory=str(12 * page_bytes(folder)))
    assert tokens(small, many) == expected
    assert small.stats().preemptions > 0
    assert small.stats().kv_pages_used == 0


@pytest.mark.parametrize("kernels", ["reference", "numba"])
def test_what_nobody_wrote_is_not_read(
    folder: Path, alone: tuple[list[list[int]], list[list[int]]], kernels: str
) -> None:
    many, expected = alone
    llm = load(folder, kernels=kernels)
    for pages in llm._loop._engine.runner.kv.layers:
        pages.k.fill_(float("nan"))
        pages.v.fill_(float("nan"))
    assert tokens(llm, many[:4]) == expected[:4]


def test_streaming_is_not(folder: Path, alone: tuple[list[list[int]], list[list[int]]]) -> None:
    many, expected = alone
    llm = load(folder)
    assert [[t for d in llm.stream(p, GREEDY) for t in d.token_ids] for p in many[:4]] == expected[:4]


def test_another_placement_is_none(folder: Path, tmp_path: Path) -> None:
    llm = load(folder)
    info, many = llm.info, prompts(4)
    rng = random.Random(3)
    shuffled = Placement(
        info.num_experts, tuple(tuple(rng.sample(range(info.num_experts), info.num_experts)) for _ in info.moe_layers)
    )
    shuffled.save(tmp_path / "placement.json")
    moved = load(folder, placement=str(tmp_path / "placement.json"))
    assert tokens(moved, many) == tokens(llm, many)
    assert moved.expert_loads() == llm.expert_loads(), "loads are told by logical expert"


def test_seeded_sampling_is_the_same_alone_batched_and_preempted(folder: Path) -> None:
    many = prompts(10, seed=4)
    each = [
        SamplingParams(temperature=0.9, top_p=0.9 if i % 2 else 1.0, top_k=i * 3, min_p=0.01, seed=i, max_tokens=20)
        for i in range(10)
    ]
    llm = load(folder)
    alone = [llm.generate(p, e)[0].token_ids for p, e in zip(many, each, strict=True)]
    small = load(folder, max_model_len=112, kv_memory=str(12 * page_bytes(folder)))
    assert [r.token_ids for r in llm.generate(many, each)] == alone
    assert [r.token_ids for r in small.generate(many, each)] == alone
    assert small.stats().preemptions > 0


def test_a_thousand_mixed_requests_through_a_pool_far_too_small(tiny: Path) -> None:
    rng = random.Random(9)
    many = prompts(1000, 40, seed=9)
    for i in range(0, 1000, 3):  # every third shares a beginning with its neighbour
        many[i] = many[i - 1][:32] + many[i][:8]
    each = [
        SamplingParams(
            temperature=rng.choice([0.0, 0.8]),
            top_k=rng.choice([0, 5]),
            presence_penalty=rng.choice([0.0, 0.5]),
            seed=i,
            max_tokens=rng.randint(1, 24),
            ignore_eos=True,
        )
        for i in range(1000)
    ]
    small = load(tiny, max_model_len=80, kv_memory=str(40 * page_bytes(tiny)), max_num_seqs=32)
    results = small.generate(many, each)
    assert [len(r.token_ids) for r in results] == [e.max_tokens for e in each]
    stats = small.stats()
    assert stats.preemptions > 0
    assert (stats.kv_pages_used, stats.num_running, stats.num_waiting) == (0, 0, 0)
    assert stats.finished == {"length": 1000}
    roomy = load(tiny, max_num_seqs=1, enable_prefix_caching=False)
    for i in rng.sample(range(1000), 60):
        assert roomy.generate(many[i], each[i])[0].token_ids == results[i].token_ids, i


def page_bytes(folder: Path) -> int:
    from moestro.spec.registry import read_spec

    return read_spec(folder).kv_values_per_token * 16 * 4
