"""Runs planned steps on the model: one rank's decoder, its KV cache and its counters."""

from __future__ import annotations

import torch

from moestro.engine.batch import BatchBuilder
from moestro.engine.request import Request, SamplingParams
from moestro.engine.sampler import Choice, Chosen, Grammars, sample
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

    def choose(self, logits_RV: torch.Tensor, sequences: list[Sequence], grammars: Grammars) -> Choice:
        """Choose a token a row; the logits may be changed in place."""
        return Chosen(sample(logits_RV, sequences, grammars))

    def warm_up(self, max_tokens: int) -> None:
        """Run the shapes of decoding and prefill once, so that kernels are compiled and memory is touched; nothing is
        counted.

        Writes into the first pages, which nobody holds yet.
        """
        for num_tokens in sorted({1, min(4, self.room), min(max_tokens, self.room, 64)}):
            self.warm_up_prompt(num_tokens)

    @property
    def room(self) -> int:
        """Tokens that the KV cache holds."""
        return self.kv.num_pages * self.kv.page_size

    def warm_up_prompt(self, num_tokens: int, *, start: int = 0) -> None:
        """Compute tokens start..start + num_tokens of one sequence, counted nowhere, in the first pages."""
        sequence = Sequence(Request("warm-up", [0] * (start + num_tokens), SamplingParams()), 0, seed=0)
        sequence.pages = list(range(-(-(start + num_tokens) // self.kv.page_size)))
        plan = StepPlan((ScheduledSequence(sequence, start, num_tokens, 1, True),))
        self.decoder.forward(self.batches.build(plan, counted=False), self.kv, None)
