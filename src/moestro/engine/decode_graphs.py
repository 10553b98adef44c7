"""CUDA graphs of decoding steps: one captured forward pass for each of a few batch sizes, replayed for every step in
which all sequences compute one token.

A smaller batch is padded up to the next size. Padding has no slot in the KV cache and no context: it writes nothing,
goes to no expert and is not counted.

B sequences of a graph, M sequences of the largest one, P pages of the longest context, V vocabulary.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import torch

from moestro.engine.scheduler import StepPlan
from moestro.engine.sequence import PENDING
from moestro.kernels.ops.attention import PagedBatch
from moestro.kv.pool import KVPool
from moestro.model.decoder import Decoder
from moestro.model.inputs import StepInputs
from moestro.moe.events import ExpertCounters

# Steps between them cost little: the kernels' work grows with the experts touched, and padding touches none.
SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)

_IDS, _SOURCES, _ROPE, _SLOTS, _LENGTHS = range(5)


@dataclass(frozen=True, eq=False)
class _Graph:
    graph: torch.cuda.CUDAGraph
    logits_BV: torch.Tensor


class DecodeGraphs:
    """Captured decoding steps of one decoder over one KV cache.

    last_tokens: int64 [M], which tokens the step before chose, on the device. max_position: rows of one set in the rope
    tables.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: KVPool,
        counters: ExpertCounters | None,
        last_tokens: torch.Tensor,
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_position: int,
    ) -> None:
        self._decoder, self._kv, self._counters = decoder, kv, counters
        self._last_tokens = last_tokens
        self._max_model_len, self._max_position = max_model_len, max_position
        self.sizes = [s for s in SIZES if s < max_num_seqs] + [max_num_seqs]
        device = last_tokens.device
        most, pages = self.sizes[-1], -(-max_model_len // kv.page_size)
        self._rows_5M = torch.zeros(5, most, dtype=torch.int64, device=device)
        self._tables_MP = torch.zeros(most, pages, dtype=torch.int32, device=device)
        self._starts = torch.arange(most + 1, dtype=torch.int32, device=device)
        # A step is prepared while the one before it runs, so the copies of two steps may be on their way.
        self._host_rows = [torch.zeros(5, most, dtype=torch.int64, pin_memory=True) for _ in range(3)]
        self._host_tables = [torch.zeros(most, pages, dtype=torch.int32, pin_memory=True) for _ in range(3)]
        self._written: list[list[tuple[int, int, int]]] = [[(-1, 0, 0)] * most for _ in range(3)]
        self._turn = 0
        self._graphs: dict[int, _Graph] = {}

    def takes(self, plan: StepPlan) -> bool:
        """Whether the plan is a decoding step of a size that was captured."""
        return len(plan.scheduled) <= self.sizes[-1] and all(
            item.num_tokens == 1 and item.num_logits == 1 for item in plan.scheduled
        )

    def capture(self) -> None:
        """Capture all sizes. Kernels are compiled on the way; nothing is written to the KV cache or counted."""
        pool = None
        self._rows_5M[_SLOTS].fill_(-1)
        for size in reversed(self.sizes):
            self._forward(size)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                logits_BV = self._forward(size)
            pool = graph.pool()
            self._graphs[size] = _Graph(graph, logits_BV)

    def run(self, plan: StepPlan) -> torch.Tensor:
        """Launch the step; returns its logits [B, V], which the next launch overwrites."""
        count = len(plan.scheduled)
        size = self.sizes[bisect_left(self.sizes, count)]
        self._turn = (self._turn + 1) % len(self._host_rows)
        self._fill_rows(plan, size)
        self._fill_tables(plan, count)
        captured = self._graphs[size]
        captured.graph.replay()
        return captured.logits_BV[:count]

    def _fill_rows(self, plan: StepPlan, size: int) -> None:
        page_size, columns = self._kv.page_size, []
        for item in plan.scheduled:
            sequence, position = item.sequence, item.start
            token_id, source = sequence.token_ids[position], -1
            if token_id == PENDING:
                token_id, source = 0, sequence.pending_row
            rope = position + self._max_position if sequence.uses_long_rope else position
            slot = sequence.pages[position // page_size] * page_size + position % page_size
            columns.append((token_id, source, rope, slot, position + 1))
        columns += [(0, -1, 0, -1, 0)] * (size - len(columns))
        host = self._host_rows[self._turn]
        host[:, :size] = torch.tensor(columns, dtype=torch.int64).T
        self._rows_5M.copy_(host, non_blocking=True)

    def _fill_tables(self, plan: StepPlan, count: int) -> None:
        """Bring each row's page table up to date; what was written three steps ago mostly still holds."""
        tables, written = self._host_tables[self._turn].numpy(), self._written[self._turn]
        for row, item in enumerate(plan.scheduled):
            sequence = item.sequence
            owner, preemptions, done = written[row]
            pages = sequence.pages
            if owner != sequence.serial or preemptions != sequence.num_preemptions:
                done = 0
            if done < len(pages):
                tables[row, done : len(pages)] = pages[done:]
                written[row] = (sequence.serial, sequence.num_preemptions, len(pages))
        self._tables_MP[:count].copy_(self._host_tables[self._turn][:count], non_blocking=True)

    @torch.inference_mode()
    def _forward(self, size: int) -> torch.Tensor:
        rows = self._rows_5M[:, :size]
        chosen = self._last_tokens[rows[_SOURCES].clamp_min(0)].clamp_min(0)
        batch = PagedBatch(
            page_size=self._kv.page_size,
            q_starts_S1=self._starts[: size + 1],
            context_lens_S=rows[_LENGTHS].to(torch.int32),
            page_tables_SP=self._tables_MP[:size],
            slots_T=rows[_SLOTS],
            num_seqs=size,
            num_tokens=size,
            max_query_len=1,
            max_context_len=self._max_model_len,
        )
        inputs = StepInputs(
            token_ids_T=torch.where(rows[_SOURCES] >= 0, chosen, rows[_IDS]),
            embeds_TD=None,
            rope_rows_T=rows[_ROPE],
            batch=batch,
            logit_rows_R=None,
            has_padding=True,
        )
        return self._decoder.forward(inputs, self._kv, self._counters)
