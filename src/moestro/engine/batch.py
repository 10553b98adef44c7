"""From a plan to tensors: the step's token ids, positions, pages and the rows whose logits are wanted.

T tokens, S sequences, R rows.
"""

from __future__ import annotations

import torch

from moestro.engine.scheduler import StepPlan
from moestro.kernels.ops.attention import PagedBatch
from moestro.model.inputs import StepInputs


class BatchBuilder:
    """Builds StepInputs on one device. max_position: rows of one set in the rope tables."""

    def __init__(self, page_size: int, device: torch.device, *, max_position: int) -> None:
        self.page_size = page_size
        self.device = device
        self.max_position = max_position

    def build(self, plan: StepPlan, *, counted: bool = True) -> StepInputs:
        """Inputs of a plan with at least one token; rows with logits come in the order of the plan."""
        token_ids: list[int] = []
        rope_rows: list[int] = []
        slots: list[int] = []
        logit_rows: list[int] = []
        q_starts = [0]
        context_lens: list[int] = []
        tables: list[list[int]] = []
        size = self.page_size
        for item in plan.scheduled:
            end = item.start + item.num_tokens
            pages = item.sequence.pages
            token_ids += item.sequence.token_ids[item.start : end]
            shift = self.max_position if item.sequence.uses_long_rope else 0
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
        return StepInputs(
            token_ids_T=self._tensor(token_ids, torch.int64),
            embeds_TD=None,
            rope_rows_T=self._tensor(rope_rows, torch.int64),
            batch=batch,
            logit_rows_R=self._tensor(logit_rows, torch.int64),
            num_tokens=len(token_ids),
            counted=counted,
        )

    def _tensor(self, values: list[int] | list[list[int]], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)
