"""The decoder on Triton kernels equals the one on the CPU's, for every family: prompts, history, decoding, padding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tests.interpreter  # noqa: F401
import torch

from moestro.checkpoint.assemble import load_tensors, plan_assembly
from moestro.checkpoint.index import read_index
from moestro.checkpoint.synth import TINY, write_checkpoint
from moestro.dist.layout import Layout
from moestro.engine.batch import BatchBuilder
from moestro.engine.config import EngineConfig
from moestro.engine.load import Engine, load_engine
from moestro.engine.request import Request, SamplingParams
from moestro.engine.scheduler import ScheduledSequence, StepPlan
from moestro.engine.sequence import Sequence
from moestro.kernels.select import KernelSelector
from moestro.kv.pool import KVPool
from moestro.model.build import Builder
from moestro.model.decoder import Decoder
from moestro.model.inputs import StepInputs
from moestro.moe.events import ExpertCounters
from moestro.moe.placement import Placement
from moestro.spec.fields import MoESpec
from moestro.spec.registry import names_of

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IDS = [7, 3, 9, 30, 22, 5, 8, 41, 13, 6, 19, 77, 80, 4, 15, 16, 23, 42, 2, 91, 33, 12]


def build(engine: Engine, folder: Path) -> Decoder:
    spec = engine.spec
    tensors = load_tensors(plan_assembly(spec, names_of(spec), read_index(folder)), torch.float32, DEVICE)
    moe = [layer.mlp for layer in spec.layers if isinstance(layer.mlp, MoESpec)]
    return Builder(
        spec,
        tensors,
        KernelSelector("cuda", "triton"),
        dtype=torch.float32,
        kv_format="float32",
        placement=Placement.identity(len(moe), moe[0].router.num_experts),
        layout=Layout(),
        max_position=128,
    ).build()


def padded(step: StepInputs, rows: int) -> StepInputs:
    """A decoding step with more rows, as a captured graph has them."""
    batch = step.batch
    size = batch.num_seqs + rows
    zeros = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    batch = replace(
        batch,
        q_starts_S1=torch.arange(size + 1, dtype=torch.int32, device=DEVICE),
        context_lens_S=torch.cat([batch.context_lens_S, zeros.int()]),
        page_tables_SP=torch.cat(
            [batch.page_tables_SP, zeros.int()[:, None].expand(-1, batch.page_tables_SP.shape[1])]
        ),
        slots_T=torch.cat([batch.slots_T, zeros - 1]),
        num_seqs=size,
        num_tokens=size,
    )
    assert step.token_ids_T is not None
    return replace(
        step,
        token_ids_T=torch.cat([step.token_ids_T, zeros]),
        rope_rows_T=torch.cat([step.rope_rows_T, zeros]),
        batch=batch,
        has_padding=True,
    )


@pytest.mark.parametrize("family", sorted(TINY))
def test_equals_the_decoder_on_the_cpu(family: str, tmp_path: Path) -> None:
    folder = write_checkpoint(TINY[family], tmp_path, seed=3)
    config = EngineConfig(model=str(folder), dtype="float32", max_model_len=128, kv_memory="1MiB", device="cpu")
    engine = load_engine(config)
    decoder, spec = build(engine, folder), engine.spec
    kv = KVPool(spec, engine.resolved.num_pages, 16, torch.float32, DEVICE)
    for page in kv.layers:
        page.k.fill_(float("nan"))  # what was never written must never count
        page.v.fill_(float("nan"))
    builder = BatchBuilder(16, DEVICE, max_position=128)
    placement = engine.runner.counters.placement if engine.runner.counters else None
    assert placement is not None
    counters, expected_counters = ExpertCounters(placement, DEVICE), ExpertCounters(placement, torch.device("cpu"))
    long, short = (
        Sequence(Request("a", IDS, SamplingParams()), 0, seed=0),
        Sequence(Request("b", IDS, SamplingParams()), 0, seed=0),
    )
    long.pages, short.pages = [3, 1], [2]
    steps = [
        StepPlan((ScheduledSequence(long, 0, 9, 9, False),)),
        StepPlan((ScheduledSequence(long, 9, 8, 8, False), ScheduledSequence(short, 0, 3, 1, False))),
        StepPlan((ScheduledSequence(long, 17, 1, 1, False), ScheduledSequence(short, 3, 1, 1, False))),
        StepPlan((ScheduledSequence(long, 18, 1, 1, False), ScheduledSequence(short, 4, 1, 1, False))),
    ]
    for number, plan in enumerate(steps):
        expected = engine.runner.decoder.forward(engine.runner.batches.build(plan), engine.runner.kv, expected_counters)
        step = builder.build(plan)
        if number == 3:
            step = padded(step, 3)
        found = decoder.forward(step, kv, counters).cpu()[: expected.shape[0]]
        spread = float(expected.max() - expected.min())
        assert float((found - expected).abs().max()) < 1e-4 * spread, (number, plan)
    if DEVICE.type == "cuda":  # the counters of the CPU take offsets, which the fused experts do not make
        assert counters.tokens() == expected_counters.tokens()
