"""The engine on a GPU against the engine on the CPU: logits, greedy tokens, counters, memory."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from moestro import LLM, SamplingParams
from moestro.checkpoint.synth import TINY, write_checkpoint
from moestro.errors import CapacityError

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def prompts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 90) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def load(folder: Path, device: str, dtype: str = "float32", **options: object) -> LLM:
    return LLM(folder, device=device, dtype=dtype, **({"max_model_len": 512, "kv_memory": "256MiB"} | options))


@pytest.fixture(scope="module", params=sorted(TINY))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(TINY[request.param], tmp_path_factory.mktemp("gpu"), seed=6)


def test_logits_and_greedy_tokens_equal_the_cpus(folder: Path) -> None:
    ids = prompts(1, 1)[0] + [random.Random(1).randrange(3, 90) for _ in range(299)]
    many = [*prompts(7, 60), [5]]  # one token alone too
    cpu = load(folder, "cpu")
    expected, tokens = cpu.logits(ids), [r.token_ids for r in cpu.generate(many, GREEDY)]
    spread = float(expected.max() - expected.min())
    for options in ({"max_num_seqs": 8}, {"enforce_eager": True, "max_num_batched_tokens": 13, "max_num_seqs": 8}):
        gpu = load(folder, "cuda", **options)
        assert float((gpu.logits(ids).cpu() - expected).abs().max()) < 1e-4 * spread, options
        assert [r.token_ids for r in gpu.generate(many, GREEDY)] == tokens, options
        assert gpu.expert_loads()["tokens"] == cpu.expert_loads()["tokens"], (
            "graphs count as launches do, warm-up does not"
        )
        del gpu


def test_bfloat16_is_close_to_float32(folder: Path) -> None:
    ids = [random.Random(2).randrange(3, 90) for _ in range(200)]
    expected = load(folder, "cpu", "bfloat16").logits(ids)
    found = load(folder, "cuda", "bfloat16", max_num_seqs=4).logits(ids).cpu()
    error = float((found - expected).norm() / expected.norm())
    assert error < 0.05, error


@pytest.mark.parametrize("batch", [1, 3, 33, 257])
def test_batches_of_any_size(batch: int, tmp_path: Path) -> None:
    folder = write_checkpoint(TINY["qwen3_moe"], tmp_path, seed=6)
    many = prompts(batch, 40, seed=batch)
    cpu, gpu = load(folder, "cpu"), load(folder, "cuda", max_num_seqs=300)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    expected = [r.token_ids for r in cpu.generate(many, params)]
    assert [r.token_ids for r in gpu.generate(many, params)] == expected
    assert gpu.expert_loads()["loads"] == cpu.expert_loads()["loads"]


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_a_long_prompt_in_one_piece_and_in_odd_chunks(family: str, tmp_path: Path) -> None:
    config = TINY[family] | {"max_position_embeddings": 40000}
    folder = write_checkpoint(config, tmp_path, seed=6)
    ids = [random.Random(3).randrange(3, 90) for _ in range(32000)]
    options = {"max_model_len": 32768, "kv_memory": "2GiB", "max_num_seqs": 2, "enable_prefix_caching": False}
    found = []
    for chunk in (32768, 4099):
        gpu = load(folder, "cuda", max_num_batched_tokens=chunk, **options)
        found.append(gpu.generate([ids], SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))[0].token_ids)
        del gpu
    assert found[0] == found[1]


def test_what_does_not_fit_is_said_with_numbers(tmp_path: Path) -> None:
    folder = write_checkpoint(TINY["qwen3_moe"], tmp_path, seed=6)
    with pytest.raises(CapacityError, match=r"GiB"):
        LLM(folder, device="cuda", gpu_memory_utilization=0.0001)
    with pytest.raises(CapacityError, match=r"kv_memory=9999GiB"):
        LLM(folder, device="cuda", kv_memory="9999GiB")


def test_the_kv_cache_gets_the_share_that_was_asked_for(tmp_path: Path) -> None:
    folder = write_checkpoint(TINY["qwen3_moe"] | {"max_position_embeddings": 100000}, tmp_path, seed=6)
    llm = LLM(
        folder, device="cuda", gpu_memory_utilization=0.05, max_model_len=100000, max_num_seqs=16, dtype="bfloat16"
    )
    free, total = torch.cuda.mem_get_info()
    assert (total - free) / total < 0.06
    assert llm.info.max_model_len <= 100000
