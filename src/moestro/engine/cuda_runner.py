"""Running steps on a GPU: graphs for decoding, launches one by one for prompts, tokens chosen on the device."""

from __future__ import annotations

import torch

from moestro.engine.batch import BatchBuilder
from moestro.engine.decode_graphs import DecodeGraphs
from moestro.engine.device_sampler import DeviceSampler, is_plain
from moestro.engine.runner import Runner
from moestro.engine.sampler import Choice, Grammars
from moestro.engine.scheduler import StepPlan
from moestro.engine.sequence import Sequence
from moestro.kv.pool import KVPool
from moestro.model.decoder import Decoder
from moestro.moe.events import ExpertCounters


class CudaRunner(Runner):
    """A runner whose next step may be launched before the tokens of the last one are known."""

    def __init__(
        self,
        decoder: Decoder,
        kv: KVPool,
        counters: ExpertCounters | None,
        batches: BatchBuilder,
        *,
        max_num_seqs: int,
    ) -> None:
        super().__init__(decoder, kv, counters, batches)
        self.sampler = DeviceSampler(max_num_seqs, batches.device)
        self.graphs: DecodeGraphs | None = None

    def capture(self, *, max_num_seqs: int, max_model_len: int) -> None:
        """Capture the decoding steps. Everything counted so far is forgotten: it was warm-up."""
        self.graphs = DecodeGraphs(
            self.decoder,
            self.kv,
            self.counters,
            self.sampler.last_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_position=self.batches.max_position,
        )
        self.graphs.capture()
        if self.counters is not None:
            self.counters.reset()

    def run(self, plan: StepPlan) -> torch.Tensor:
        self.steps += 1
        if self.graphs is not None and self.graphs.takes(plan):
            return self.graphs.run(plan)
        inputs = self.batches.build(plan, last_tokens=self.sampler.last_tokens)
        return self.decoder.forward(inputs, self.kv, self.counters)

    def choose(self, logits_RV: torch.Tensor, sequences: list[Sequence], grammars: Grammars) -> Choice:
        if all(is_plain(s) for s in sequences):
            return self.sampler.choose(logits_RV, sequences)
        return super().choose(logits_RV, sequences, grammars)
