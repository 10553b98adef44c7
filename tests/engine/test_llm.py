"""LLM as its users meet it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from moestro import LLM, EngineConfig, SamplingParams
from moestro.checkpoint.synth import TINY, write_checkpoint
from moestro.errors import CapacityError, CheckpointError, RequestError, SettingError

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny: Path) -> LLM:
    return LLM(tiny, dtype="float32", max_model_len=256, kv_memory="32MiB")


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """A random model whose tokens are single bytes."""
    folder = write_checkpoint(TINY["mixtral"], tmp_path_factory.mktemp("speaking"), seed=3)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return LLM(folder, dtype="float32", max_model_len=256, kv_memory="32MiB")


def test_forms_of_prompts(llm: LLM, speaking: LLM) -> None:
    one = llm.generate([5, 6, 7], GREEDY)
    many = llm.generate([[5, 6, 7], [8]], GREEDY)
    assert len(one) == 1
    assert len(many) == 2
    assert one[0].token_ids == many[0].token_ids
    assert one[0].prompt_token_ids == [5, 6, 7]
    assert (one[0].finish_reason, one[0].logprobs) == ("length", None)
    texts = speaking.generate(["ab", "c"], [GREEDY, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)])
    assert [len(r.token_ids) for r in texts] == [8, 2]
    assert llm.generate([], GREEDY) == []
    with pytest.raises(RequestError, match="no tokenizer files"):
        llm.generate("text", GREEDY)
    with pytest.raises(RequestError, match="2 sampling parameters for 1 prompts"):
        llm.generate([1], [GREEDY, GREEDY])


def test_text_is_what_the_tokens_say(speaking: LLM) -> None:
    result = speaking.generate("hello", SamplingParams(temperature=1.0, seed=1, max_tokens=60, ignore_eos=True))[0]
    assert speaking.tokenizer is not None
    assert result.text == speaking.tokenizer.decode(result.token_ids)


def test_stop_strings_and_ids(speaking: LLM) -> None:
    free = speaking.generate("hello", SamplingParams(temperature=1.0, seed=2, max_tokens=60, ignore_eos=True))[0]
    stop = next(free.text[i : i + 2] for i in range(10, 50) if free.text[i : i + 2].isascii())
    cut = speaking.generate(
        "hello", SamplingParams(temperature=1.0, seed=2, max_tokens=60, ignore_eos=True, stop=[stop])
    )[0]
    assert cut.finish_reason == "stop"
    assert cut.outputs[0].stop_reason == stop
    assert cut.text == free.text[: free.text.index(stop)]
    end = free.token_ids[5]
    by_id = speaking.generate(
        "hello", SamplingParams(temperature=1.0, seed=2, max_tokens=60, ignore_eos=True, stop_token_ids=[end])
    )[0]
    assert by_id.token_ids == free.token_ids[: free.token_ids.index(end) + 1]
    assert by_id.outputs[0].stop_reason == end


def test_c97_every_source_of_end_tokens_counts(tmp_path: Path) -> None:
    folder = write_checkpoint(TINY["qwen3_moe"] | {"eos_token_id": [11, 12]}, tmp_path, seed=5)
    (folder / "generation_config.json").write_text('{"eos_token_id": 13}')
    llm = LLM(folder, dtype="float32", max_model_len=64, kv_memory="8MiB")
    for end in (11, 12, 13):
        pushed = SamplingParams(temperature=0, max_tokens=5, logit_bias={end: 100.0})
        result = llm.generate([5], pushed)[0]
        assert (result.token_ids, result.finish_reason, result.outputs[0].stop_reason) == ([end], "stop", end)
        ignoring = SamplingParams(temperature=0, max_tokens=5, logit_bias={end: 100.0}, ignore_eos=True)
        assert llm.generate([5], ignoring)[0].token_ids == [end] * 5


def test_n_completions(llm: LLM) -> None:
    result = llm.generate(
        list(range(40)), SamplingParams(n=4, temperature=1.5, seed=3, max_tokens=10, ignore_eos=True)
    )[0]
    assert [o.index for o in result.outputs] == [0, 1, 2, 3]
    assert len({tuple(o.token_ids) for o in result.outputs}) > 1
    again = llm.generate(list(range(40)), SamplingParams(n=1, temperature=1.5, seed=3, max_tokens=10, ignore_eos=True))[
        0
    ]
    assert again.token_ids == result.token_ids


def test_logprobs_are_those_of_the_logits(llm: LLM) -> None:
    prompt = list(range(3, 43))
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    result = llm.generate(prompt, params)[0]
    expected = torch.log_softmax(llm.logits(prompt + result.token_ids), dim=-1)
    assert result.logprobs is not None
    for i, position in enumerate(result.logprobs):
        assert position.chosen.token_id == result.token_ids[i]
        assert position.chosen.logprob == pytest.approx(
            float(expected[len(prompt) - 1 + i, result.token_ids[i]]), abs=1e-4
        )
        assert [t.rank for t in position.top] == [1, 2]
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None
    assert len(result.prompt_logprobs) == len(prompt)
    for p in range(1, len(prompt)):
        entry = result.prompt_logprobs[p]
        assert entry is not None
        assert entry.chosen.logprob == pytest.approx(float(expected[p - 1, prompt[p]]), abs=1e-4)


def test_prompt_logprobs_in_chunks_are_the_same(llm: LLM, tiny: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    small = LLM(tiny, dtype="float32", max_model_len=256, kv_memory="32MiB", max_num_batched_tokens=7)
    prompt = list(range(3, 43))
    ours, theirs = (x.generate(prompt, params)[0].prompt_logprobs for x in (small, llm))
    assert ours is not None
    assert theirs is not None
    for a, b in zip(ours[1:], theirs[1:], strict=True):
        assert a is not None
        assert b is not None
        assert math.isclose(a.chosen.logprob, b.chosen.logprob, abs_tol=1e-4)


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ([], {}, "prompt"),
        ([999999], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([1] * 256, {}, "prompt"),
        ([1], {"stop": ["x"]}, "stop"),
        ([1], {"logit_bias": {10**6: 1.0}}, "logit_bias"),
        ([1], {"stop_token_ids": [10**6]}, "stop_token_ids"),
    ],
)
def test_requests_that_cannot_be_served_name_the_field(
    llm: LLM, prompt: list[int], params: dict[str, object], field: str
) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate([[1, 2], prompt], SamplingParams(**params))  # type: ignore[arg-type]
    assert caught.value.field == field
    assert llm.stats().kv_pages_used == 0
    assert llm.generate([1], GREEDY)[0].finish_reason == "length", "the engine goes on"


def test_c92_prompts_around_the_context_limit(llm: LLM) -> None:
    for length, expected in ((254, 2), (255, 1)):
        result = llm.generate([1] * length, SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))[0]
        assert (len(result.token_ids), result.finish_reason) == (expected, "length")
    with pytest.raises(RequestError, match=r"256 tokens.*at most 255"):
        llm.generate([1] * 256, GREEDY)


def test_closing_a_stream_stops_the_work(llm: LLM) -> None:
    stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    stats = llm.stats()
    assert (stats.num_running, stats.kv_pages_used) == (1, 1)
    assert stats.kv_waste == 13 / 16, "three of a page's sixteen places are filled"
    stream.close()
    stats = llm.stats()
    assert (stats.num_running, stats.kv_pages_used) == (0, 0)


def test_bad_options_are_named(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="no option 'max_len'"):
        LLM(tiny, max_len=3)
    with pytest.raises(SettingError, match="max_num_seqs=0"):
        EngineConfig(max_num_seqs=0)
    with pytest.raises(SettingError, match="kv_memory='lots'"):
        EngineConfig(kv_memory="lots")
    with pytest.raises(SettingError, match="dtype='int3'"):
        EngineConfig(dtype="int3")
    with pytest.raises(SettingError, match="512 positions"):
        LLM(tiny, max_model_len=100_000)
    with pytest.raises(CapacityError, match=r"fewer than one sequence .* raise --kv-memory"):
        LLM(tiny, max_model_len=512, kv_memory="64KiB")
    with pytest.raises(CapacityError, match="does not fit"):
        LLM(tiny, kv_memory="100000GiB")
    with pytest.raises(CheckpointError, match="neither a folder"):
        LLM(tmp_path / "nothing here")


def test_expert_loads_count_what_was_computed(tiny: Path) -> None:
    llm = LLM(tiny, dtype="float32", max_model_len=256, kv_memory="32MiB", enable_prefix_caching=False)
    assert llm.expert_loads()["tokens"] == 0, "warm-up is not counted (C48)"
    llm.generate([[1] * 20, [2] * 30], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    loads = llm.expert_loads()
    assert loads["tokens"] == 20 + 30 + 2 * 4, "the last token chosen is not computed"
    assert all(sum(layer) == loads["tokens"] * loads["top_k"] for layer in loads["loads"])
    assert len(loads["loads"]) == len(loads["layers"]) == len(llm.info.moe_layers)


def test_choices_can_be_printed(llm: LLM) -> None:
    assert {op for op, _, _ in llm.info.kernels} >= {"linear", "experts_mlp", "route", "attend"}
    assert all(reason for _, _, reason in llm.info.kernels)
    assert {name for name, _, _ in llm.info.decisions} >= {"dtype", "max_model_len", "kv_memory", "num_threads"}


def test_streams_side_by_side_keep_their_own(llm: LLM) -> None:
    alone = [[t for d in llm.stream(p, GREEDY) for t in d.token_ids] for p in ([5, 6, 7], [9, 10, 11])]
    first, second = llm.stream([5, 6, 7], GREEDY), llm.stream([9, 10, 11], GREEDY)
    both: list[list[int]] = [[], []]
    for a, b in zip(first, second, strict=True):
        both[0] += a.token_ids
        both[1] += b.token_ids
    assert both == alone
    third = llm.stream([5, 6, 7], GREEDY)
    start = next(third).token_ids
    assert llm.generate([9, 10, 11], GREEDY)[0].token_ids == alone[1]
    assert start + [t for d in third for t in d.token_ids] == alone[0]


def test_a_tokenizer_that_is_not_there_is_named(tiny: Path) -> None:
    with pytest.raises(SettingError, match="/nope"):
        LLM(tiny, tokenizer="/nope")
