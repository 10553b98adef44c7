"""sort_by_expert for the CPU: a counting sort, one pass to count and one to place."""

from __future__ import annotations

import numpy as np
import torch

from moestro.kernels.facts import Facts
from moestro.kernels.jit import kernel, supports_formats
from moestro.kernels.memory import load_int32, store_int32
from moestro.kernels.ops.sort_by_expert import bad_id, check


def supports(facts: Facts) -> tuple[bool, str]:
    return supports_formats(Facts(facts.device, facts.format, torch.float32), ("",))


def sort_by_expert(ids_TK: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    check(ids_TK, num_experts)
    ids_TK = ids_TK.contiguous()
    pairs = ids_TK.numel()
    offsets_E1 = torch.empty(num_experts + 1, dtype=torch.int32)
    order_R = torch.empty(pairs, dtype=torch.int32)
    rows = _sort(ids_TK.data_ptr(), pairs, num_experts, offsets_E1.data_ptr(), order_R.data_ptr())
    if rows < 0:
        raise bad_id(int(ids_TK.max()), num_experts)
    return offsets_E1, (order_R if rows == pairs else order_R[:rows])


@kernel
def _sort(ids: int, pairs: int, E: int, offsets: int, order: int) -> int:
    """Fill offsets and order; returns the number of pairs that have an expert, -1 when an id is too large."""
    next_row = np.zeros(E + 1, np.int64)
    for i in range(pairs):
        e = load_int32(ids, i)
        if e >= E:
            return -1
        if e >= 0:
            next_row[e + 1] += 1
    for e in range(E):
        next_row[e + 1] += next_row[e]
    for e in range(E + 1):
        store_int32(offsets, e, next_row[e])
    rows: int = next_row[E]
    for i in range(pairs):
        e = load_int32(ids, i)
        if e >= 0:
            store_int32(order, next_row[e], i)
            next_row[e] += 1
    return rows
