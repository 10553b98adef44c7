"""The whole way, from HTTP to the model's tokens, over a small random checkpoint."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import Served, serve, write_fake_model

from moestro import LLM, SamplingParams
from moestro.checkpoint.synth import TINY, write_checkpoint
from moestro.engine.config import EngineConfig
from moestro.engine.worker import build_loop
from moestro.server.config import ServerConfig

COMPLETION = "/v1/completions"
OPTIONS: dict[str, Any] = {
    "max_model_len": 128,
    "max_num_seqs": 4,
    "kernels": "reference",
    "kv_memory": "4MB",
    "num_threads": 1,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_checkpoint(TINY["qwen3_moe"], tmp_path_factory.mktemp("tiny"), seed=7)
    return write_fake_model(folder)


@pytest.fixture(scope="module")
def real(folder: Path) -> Iterator[Served]:
    yield from serve(EngineConfig(model=str(folder), **OPTIONS), ServerConfig(port=0), build_loop)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), **OPTIONS)


def body_of(seed: int) -> dict[str, Any]:
    """Greedy, seeded and restricted requests in turn (C99)."""
    kind = [{"temperature": 0}, {"temperature": 1.0, "seed": seed}, {"temperature": 1.0, "top_k": 1}][seed % 3]
    prompt = [(seed * 7 + i * i) % 250 for i in range(1 + seed * 5 % 40)]
    return {"prompt": prompt, "max_tokens": 8, "return_token_ids": True, **kind}


def test_concurrent_requests_give_the_tokens_of_the_engine_alone(real: Served, llm: LLM) -> None:
    bodies = [body_of(seed) for seed in range(8)]

    def ask(body: dict[str, Any]) -> list[int]:
        with real.http() as http:
            if body["prompt"][0] % 2:
                lines = http.post(COMPLETION, json=body | {"stream": True}).text.split("\n\n")
                chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
                return [i for chunk in chunks for i in chunk["choices"][0]["token_ids"]]
            [choice] = http.post(COMPLETION, json=body).json()["choices"]
            return choice["token_ids"]

    with ThreadPoolExecutor(8) as pool:
        served = list(pool.map(ask, bodies))
    for body, tokens in zip(bodies, served, strict=True):
        names = ("max_tokens", "temperature", "seed", "top_k")
        params = SamplingParams(**{name: body[name] for name in names if name in body})
        assert tokens == llm.generate(body["prompt"], params)[0].token_ids


def test_text_logprobs_and_echo(real: Served, llm: LLM) -> None:
    body = {"prompt": "hello there", "max_tokens": 6, "temperature": 0, "logprobs": 2, "echo": True}
    with real.http() as http:
        [choice] = http.post(COMPLETION, json=body).json()["choices"]
    result = llm.generate("hello there", SamplingParams(temperature=0, max_tokens=6, logprobs=2))[0]
    assert choice["text"] == "hello there" + result.text
    assert choice["logprobs"]["token_logprobs"][0] is None
    expected = [position.chosen.logprob for position in result.logprobs or []]
    assert choice["logprobs"]["token_logprobs"][-6:] == pytest.approx(expected, abs=1e-4)


def test_loads_count_every_token_of_every_layer(real: Served) -> None:
    with real.http() as http:
        before = http.get("/moe/loads").json()
        http.post(COMPLETION, json={"prompt": [1, 2, 3, 250, 9], "max_tokens": 4, "temperature": 0, "ignore_eos": True})
        after = http.get("/moe/loads").json()
    grown = [sum(b) - sum(a) for a, b in zip(before["loads"], after["loads"], strict=True)]
    assert grown == [(5 + 3) * after["top_k"]] * len(after["layers"])  # the last token is not computed


def test_a_client_that_goes_away_gives_its_pages_back(real: Served) -> None:
    """C91."""
    with real.http() as http:
        body = {"prompt": [1, 2, 3], "max_tokens": 120, "n": 4, "ignore_eos": True}
        with pytest.raises(httpx.ReadTimeout):
            http.post(COMPLETION, json=body, timeout=0.05)
        deadline = time.monotonic() + 10
        while "num_requests_running" not in (page := http.get("/metrics").text) or not _idle(page):
            assert time.monotonic() < deadline
        assert 'finished_reason="abort",model_name' in page


def _idle(page: str) -> bool:
    values = {line.split("{")[0]: float(line.split()[-1]) for line in page.splitlines() if not line.startswith("#")}
    return values["moestro:num_requests_running"] == 0 and values["moestro:num_requests_waiting"] == 0


def test_prompts_around_the_context_limit(real: Served) -> None:
    """C92, with the real engine."""
    with real.http() as http:
        for length in (126, 127, 128, 129):
            body = {"prompt": [5] * length, "max_tokens": 1000, "ignore_eos": True}
            answer = http.post(COMPLETION, json=body)
            if length > 127:
                assert answer.status_code == 400
            else:
                assert answer.json()["usage"]["completion_tokens"] == 128 - length
