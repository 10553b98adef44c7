# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
"""sort_by_expert for NVIDIA GPUs: a block an expert, each counts what lies before it and then places its own pairs.

T tokens, K top-k, E experts, P = T * K pairs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moestro.kernels.facts import Facts
from moestro.kernels.gpu import pdl, supports_plain
from moestro.kernels.ops.sort_by_expert import check


def supports(facts: Facts) -> tuple[bool, str]:
    return supports_plain(Facts(facts.device, facts.format, torch.float32))


def sort_by_expert(ids_TK: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As the op says, but order always has T * K entries, -1 from offsets[E] on: its length must not depend on what is
    on the device.
    """
    offsets_E1, order_P, _ = sort_with_inverse(ids_TK, num_experts)
    return offsets_E1, order_P


def sort_with_inverse(ids_TK: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """offsets_E1, order_P, and each pair's row in the sorted order, int32 [P]; -1 for a pair without an expert."""
    check(ids_TK, num_experts)
    pairs, device = ids_TK.numel(), ids_TK.device
    offsets_E1 = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    order_P = torch.empty(pairs, dtype=torch.int32, device=device)
    inverse_P = torch.empty(pairs, dtype=torch.int32, device=device)
    block = max(128, min(2048, triton.next_power_of_2(pairs)))
    _sort_kernel[(num_experts + 1,)](
        ids_TK.contiguous(),
        offsets_E1,
        order_P,
        inverse_P,
        pairs,
        E=num_experts,
        BLOCK=block,
        num_warps=4,
        **pdl(ids_TK),
    )
    return offsets_E1, order_P, inverse_P


@triton.jit(do_not_specialize=["pairs"])
def _sort_kernel(ids, offsets, order, inverse, pairs, E: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Block e of expert e; the last block takes the pairs without an expert to the end."""
    e = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    before = 0
    for first in tl.range(0, pairs, BLOCK):
        found = tl.load(ids + first + i, mask=first + i < pairs, other=-1)
        before += tl.sum(((found >= 0) & (found < e)).to(tl.int32))
    tl.store(offsets + e, before)
    row = before
    for first in tl.range(0, pairs, BLOCK):
        inside = first + i < pairs
        found = tl.load(ids + first + i, mask=inside, other=-1)
        mine = inside & ((found == e) | ((e == E) & (found < 0)))
        rank = tl.cumsum(mine.to(tl.int32), 0)
        place = row + rank - 1
        tl.store(order + place, tl.where(e == E, -1, first + i), mask=mine)
        tl.store(inverse + first + i, tl.where(e == E, -1, place), mask=mine)
        row += tl.sum(mine.to(tl.int32))
