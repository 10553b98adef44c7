"""Structured outputs through the engine: whole, batched, in n, streamed, stopped and preempted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from moestro import LLM, SamplingParams
from moestro.checkpoint.synth import TINY, write_checkpoint
from moestro.engine.request import Request
from moestro.errors import RequestError
from moestro.text.grammar import StructuredOutputs

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{3,8}$"},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 3},
        "big": {"type": "boolean"},
    },
    "required": ["name", "tags", "big"],
    "additionalProperties": False,
}
END = 2


def random_params(seed: int, **more: Any) -> SamplingParams:
    """Temperature 2 on a random model: everything that is allowed will be met."""
    wanted = StructuredOutputs(json=SCHEMA)
    return SamplingParams(temperature=2.0, seed=seed, max_tokens=400, structured_outputs=wanted, **more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = TINY["qwen3_moe"] | {"eos_token_id": END, "max_position_embeddings": 1024}
    folder = write_checkpoint(config, tmp_path_factory.mktemp("structured"), seed=3)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def make(folder: Path, **options: Any) -> LLM:
    options = {"kv_memory": "8MiB", "kernels": "reference", "num_threads": 1, "max_model_len": 512} | options
    return LLM(folder, dtype="float32", **options)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return make(folder)


def check(text: str) -> None:
    value = json.loads(text)
    assert set(value) == {"name", "tags", "big"}
    assert 3 <= len(value["name"]) <= 8
    assert set(value["tags"]) <= {"red", "green"}
    assert isinstance(value["big"], bool)


def test_n_and_batch_follow_the_schema_and_leave_others_alone(llm: LLM) -> None:
    free = SamplingParams(temperature=1.0, seed=9, max_tokens=12, ignore_eos=True)
    alone = llm.generate("free", free)[0].token_ids
    results = llm.generate(
        ["a", "bb", "free", "ccc"], [random_params(1, n=3), random_params(2), free, random_params(3)]
    )
    assert results[2].token_ids == alone
    outputs = [c for i, r in enumerate(results) if i != 2 for c in r.outputs]
    assert len({c.text for c in outputs}) == 5
    for completion in outputs:
        check(completion.text)
        assert completion.finish_reason == "stop"


def test_preempted_is_not(llm: LLM, folder: Path) -> None:
    """C69 with grammars: the state outlives the pages."""
    prompts = ["x" * 30, "y" * 30, "z" * 30]
    params = [random_params(i) for i in range(3)]
    expected = [r.token_ids for r in llm.generate(prompts, params)]
    small = make(folder, max_model_len=128, kv_memory="120KiB", max_num_seqs=3, enable_prefix_caching=False)
    params = [random_params(i) for i in range(3)]
    found = [r.token_ids for r in small.generate(prompts, params)]
    assert small.stats().preemptions > 0
    assert [f == e[: len(f)] for f, e in zip(found, expected, strict=True)] == [True] * 3


def test_streamed_text_is_the_whole(llm: LLM) -> None:
    deltas = list(llm.stream("a", random_params(5)))
    assert "".join(d.text for d in deltas) == llm.generate("a", random_params(5))[0].text
    assert deltas[-1].finish_reason == "stop"
    assert deltas[-1].text.endswith("}")


def test_it_ends_with_ignore_eos_and_at_the_last_allowed_token(llm: LLM) -> None:
    wanted = StructuredOutputs(choice=["abc"])
    result = llm.generate("a", SamplingParams(max_tokens=3, ignore_eos=True, structured_outputs=wanted))[0]
    assert (result.text, result.finish_reason) == ("abc", "stop")
    cut = llm.generate("a", SamplingParams(max_tokens=2, structured_outputs=wanted))[0]
    assert (cut.text, cut.finish_reason) == ("ab", "length")


def test_an_open_end_takes_the_end_token(llm: LLM) -> None:
    wanted = StructuredOutputs(regex="a+")
    bias = {END: 100.0}
    result = llm.generate("a", SamplingParams(max_tokens=9, logit_bias=bias, structured_outputs=wanted))[0]
    assert (result.text, result.finish_reason, result.outputs[0].stop_reason) == ("a", "stop", END)


def test_stop_strings_cut_it(llm: LLM) -> None:
    wanted = StructuredOutputs(choice=["one, two"])
    result = llm.generate("a", SamplingParams(max_tokens=20, stop=[","], structured_outputs=wanted))[0]
    assert (result.text, result.finish_reason) == ("one", "stop")


def test_wrong_ones_are_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(RequestError, match="cannot be used"):
        llm.generate("a", SamplingParams(structured_outputs=StructuredOutputs(json={"type": "nope"})))
    with pytest.raises(RequestError, match="min_tokens"):
        SamplingParams(min_tokens=2, structured_outputs=StructuredOutputs(json_object=True))
    assert llm.stats().kv_pages_used == 0


def test_a_grammar_that_no_token_fits_fails_its_request_only(llm: LLM) -> None:
    """The tiny vocabulary has no token for byte 255 alone; the sibling goes on."""
    impossible = SamplingParams(max_tokens=5, structured_outputs=StructuredOutputs(grammar='start: "a" <|none|>'))
    with pytest.raises(RequestError):
        llm.generate("a", impossible)
    assert llm.generate("a", random_params(8))[0].finish_reason == "stop"


def test_out_of_memory_in_a_step_fails_that_steps_requests_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make(folder, max_num_seqs=1)
    loop, run = llm._loop, llm._loop._engine.runner.run
    for name in ("first", "second"):
        loop.add(Request(name, [1, 2, 3], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)))

    def broken(plan: object) -> None:
        raise MemoryError

    monkeypatch.setattr(loop._engine.runner, "run", broken)
    with pytest.raises(MemoryError):
        loop.step()
    failed = loop.fail_step("out of memory")
    assert [(d.request_id, d.finish_reason, d.error) for d in failed] == [("first", "error", "out of memory")]
    monkeypatch.setattr(loop._engine.runner, "run", run)
    deltas = []
    while loop.has_work:
        deltas += loop.step()
    assert [d.request_id for d in deltas] == ["second"] * 4
    assert loop.stats().kv_pages_used == 0


def test_logits_that_are_not_numbers_fail_their_row_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make(folder)
    loop, run = llm._loop, llm._loop._engine.runner.run
    for name in ("good", "poisoned"):
        loop.add(Request(name, [1, 2, 3], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)))

    def poison(plan: Any) -> Any:
        logits_RV = run(plan).clone()
        for row, item in enumerate(plan.scheduled):
            if item.sequence.request.request_id == "poisoned":
                logits_RV[row] = float("nan")
        return logits_RV

    monkeypatch.setattr(loop._engine.runner, "run", poison)
    deltas = []
    while loop.has_work:
        deltas += loop.step()
    ends = {d.request_id: d.finish_reason for d in deltas if d.finish_reason}
    assert ends == {"good": "length", "poisoned": "error"}
    assert loop.stats().kv_pages_used == 0
