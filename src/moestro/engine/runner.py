"""Runs planned steps on the model: one rank's decoder, its KV cache and its counters."""

from __future__ import annotations

import torch

from moestro.engine.batch import BatchBuilder
from moestro.engine.request import Request, SamplingParams
from moestro.engine.scheduler import ScheduledSequence, StepPlan
from moestro.engine.sequence import Sequence
from moestro.kv.pool import KVPool
from moestro.model.decoder import Decoder
from moestro.moe.events import ExpertCounters


class Runner:
    """Owns what a step reads and writes on the device."""

    def __init__(
        self,
        decoder: Decoder,
        kv: KVPool,
        counters: ExpertCounters | None,
        batches: BatchBuilder,
    ) -> None:
        """counters: None for a model without experts."""
        self.decoder = decoder
        self.kv = kv
        self.counters = counters
        self.batches = batches
        self.steps = 0

    def run(self, plan: StepPlan) -> torch.Tensor:
        """Compute a step: logits float32 [R, V], the wanted rows of each scheduled sequence in order."""
        self.steps += 1
        return self.decoder.forward(self.batches.build(plan), self.kv, self.counters)

    def warm_up(self, max_tokens: int) -> None:
        """Run the shapes of decoding and prefill once, so that kernels are compiled and memory is touched; nothing is
        counted.

        Writes into the first pages, which nobody holds yet.
        """
        room = self.kv.num_pages * self.kv.page_size
        for num_tokens in sorted({1, min(4, room), min(max_tokens, room, 64)}):
            sequence = Sequence(Request("warm-up", [0] * num_tokens, SamplingParams()), 0, seed=0)
            sequence.pages = list(range(-(-num_tokens // self.kv.page_size)))
            plan = StepPlan((ScheduledSequence(sequence, 0, num_tokens, 1, True),))
            self.decoder.forward(self.batches.build(plan, counted=False), self.kv, None)
