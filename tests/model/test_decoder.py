"""What a step may ask of the decoder: logits of several positions, embeddings in place of ids, padding, bf16
weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moestro.checkpoint.synth import TINY, write_checkpoint
from moestro.engine.config import EngineConfig
from moestro.engine.load import Engine, load_engine
from moestro.engine.request import Request, SamplingParams
from moestro.engine.scheduler import ScheduledSequence, StepPlan
from moestro.engine.sequence import Sequence
from moestro.kv.pool import KVPool
from moestro.model.inputs import StepInputs

IDS = [7, 3, 9, 30, 22, 5, 8, 41, 13, 6, 19, 77, 80, 4, 15, 16, 23, 42, 2, 91]


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3", "gpt_oss"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = write_checkpoint(TINY[request.param], tmp_path_factory.mktemp("decoder"), seed=2)
    return load_engine(EngineConfig(model=str(folder), dtype="float32", max_model_len=128, kv_memory="8MiB"))


def inputs(engine: Engine, start: int, count: int, num_logits: int) -> StepInputs:
    sequence = Sequence(Request("r", IDS, SamplingParams()), 0, seed=0)
    sequence.pages = [3, 1]  # not in order, so that a kernel which ignores the table is found out
    plan = StepPlan((ScheduledSequence(sequence, start, count, num_logits, False),))
    return engine.runner.batches.build(plan)


def run(engine: Engine, step: StepInputs) -> torch.Tensor:
    return engine.runner.decoder.forward(step, engine.runner.kv, None)


def test_several_tokens_can_be_verified_at_once(engine: Engine) -> None:
    whole = run(engine, inputs(engine, 0, len(IDS), len(IDS)))
    run(engine, inputs(engine, 0, 12, 0))
    verified = run(engine, inputs(engine, 12, 5, 5))
    assert torch.allclose(verified, whole[12:17], atol=1e-4)
    again = run(engine, inputs(engine, 14, 6, 6))  # three were accepted and the rest is computed over them
    assert torch.allclose(again, whole[14:], atol=1e-4)


def test_embeddings_in_place_of_ids(engine: Engine) -> None:
    step = inputs(engine, 0, len(IDS), len(IDS))
    expected = run(engine, step)
    embeds = engine.runner.decoder.embedding(step.token_ids_T)
    before = embeds.clone()
    assert torch.allclose(run(engine, replace(step, token_ids_T=None, embeds_TD=embeds)), expected, atol=1e-5)
    assert torch.equal(embeds, before), "inputs are not written"


def test_padding_rows_write_nothing_and_change_nothing(engine: Engine) -> None:
    step = inputs(engine, 0, 5, 1)
    expected = run(engine, step)
    pages = [page.k.clone() for page in engine.runner.kv.layers]
    pad = 3
    batch = replace(
        step.batch,
        slots_T=torch.cat([step.batch.slots_T, torch.full((pad,), -1)]),
        num_tokens=5 + pad,
    )
    assert step.token_ids_T is not None
    padded = replace(
        step,
        token_ids_T=torch.cat([step.token_ids_T, torch.zeros(pad, dtype=torch.int64)]),
        rope_rows_T=torch.cat([step.rope_rows_T, torch.zeros(pad, dtype=torch.int64)]),
        batch=batch,
        has_padding=True,
    )
    assert torch.allclose(run(engine, padded), expected, atol=1e-5)
    for page, before in zip(engine.runner.kv.layers, pages, strict=True):
        assert torch.allclose(page.k, before, atol=1e-5)


def test_c09_nothing_after_the_router_is_promoted(engine: Engine) -> None:
    kv = KVPool(engine.spec, 4, 16, torch.bfloat16, torch.device("cpu"))
    assert all(page.k.dtype == torch.bfloat16 for page in kv.layers)
    layer = next(x for x in engine.runner.decoder.layers if hasattr(x.mlp, "router"))
    x = torch.zeros(2, engine.spec.width)
    assert layer.mlp(x, layer.mlp.router(x, torch.float32), None, None).dtype == x.dtype


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v2", "phimoe"])
def test_bfloat16_weights_are_close_to_float32(family: str, tmp_path: Path) -> None:
    """The same bfloat16 checkpoint, computed from bfloat16 weights and from their float32 copies, differs by the KV
    cache alone.
    """
    folder = write_checkpoint(TINY[family], tmp_path, seed=4, dtype="bfloat16")
    both = []
    for dtype in ("bfloat16", "float32"):
        engine = load_engine(EngineConfig(model=str(folder), dtype=dtype, max_model_len=128, kv_memory="8MiB"))
        both.append(run(engine, inputs(engine, 0, len(IDS), len(IDS))))
    assert float((both[0] - both[1]).abs().max() / (both[1].max() - both[1].min())) < 0.02
