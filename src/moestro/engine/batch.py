"""From a plan to tensors: the step's token ids, positions, pages and the rows whose logits are wanted.

T tokens, S sequences, R rows.
"""

from __future__ import annotations

import torch

from moestro.engine.scheduler import StepPlan
from moestro.engine.sequence import PENDING
from moestro.kernels.ops.attention import PagedBatch
from moestro.model.inputs import StepInputs


class BatchBuilder:
    """Builds StepInputs on one device. max_position: rows of one set in the rope tables."""

    def __init__(self, page_size: int, device: torch.device, *, max_position: int) -> None:
        self.page_size = page_size
        self.device = device
        self.max_position = max_position

    def build(self, plan: StepPlan, *, counted: bool = True, last_tokens: torch.Tensor | None = None) -> StepInputs:
        """Inputs of a plan with at least one token; rows with logits come in the order of the plan.

        last_tokens: int64, the tokens that the step before has chosen, on the device; each sequence with a pending
        token knows its row.
        """
        token_ids: list[int] = []
        pending: list[tuple[int, int]] = []
        rope_rows: list[int] = []
        slots: list[int] = []
        logit_rows: list[int] = []
        q_starts = [0]
        context_lens: list[int] = []
        tables: list[list[int]] = []
        size = self.page_size
        for item in plan.scheduled:
            sequence, end = item.sequence, item.start + item.num_tokens
            pages = sequence.pages
            token_ids += sequence.token_ids[item.start : end]
            if token_ids[-1] == PENDING:
                pending.append((len(token_ids) - 1, sequence.pending_row))
            shift = self.max_position if sequence.uses_long_rope else 0
            rope_rows += range(item.start + shift, end + shift)
            slots += [pages[p // size] * size + p % size for p in range(item.start, end)]
            logit_rows += range(len(token_ids) - item.num_logits, len(token_ids))
            q_starts.append(len(token_ids))
            context_lens.append(end)
            tables.append(pages[: -(-end // size)])
        width = max(len(t) for t in tables)
        batch = PagedBatch(
            page_size=size,
            q_starts_S1=self._tensor(q_starts, torch.int32),
            context_lens_S=self._tensor(context_lens, torch.int32),
            page_tables_SP=self._tensor([t + [0] * (width - len(t)) for t in tables], torch.int32),
            slots_T=self._tensor(slots, torch.int64),
            num_seqs=len(tables),
            num_tokens=len(token_ids),
            max_query_len=max(item.num_tokens for item in plan.scheduled),
            max_context_len=max(context_lens),
        )
        token_ids_T = self._tensor(token_ids, torch.int64)
        if pending:
            assert last_tokens is not None
            rows, sources = (self._tensor(list(column), torch.int64) for column in zip(*pending, strict=True))
            token_ids_T[rows] = last_tokens[sources].clamp_min(0)
        return StepInputs(
            token_ids_T=token_ids_T,
            embeds_TD=None,
            rope_rows_T=self._tensor(rope_rows, torch.int64),
            batch=batch,
            logit_rows_R=self._tensor(logit_rows, torch.int64),
            counted=counted,
        )

    def _tensor(self, values: list[int] | list[list[int]], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)
