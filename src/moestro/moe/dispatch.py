"""Bringing tokens to their experts and the outputs back. One seam for one rank now and many later.

T tokens, K top-k, R rows sorted by expert, E physical experts, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from moestro.kernels import ops
from moestro.kernels.select import KernelSelector
from moestro.moe.placement import Placement
from moestro.moe.router import Routing


@dataclass(frozen=True, eq=False)
class DispatchMeta:
    """What `combine` must know about a `dispatch`; nobody else reads it but the counters, for offsets.

    offsets_E1: int32, rows offsets[e]:offsets[e+1] belong to physical expert e. order_R: int32, the flat (token,
    choice) of each row.
    """

    offsets_E1: torch.Tensor
    order_R: torch.Tensor
    weights_TK: torch.Tensor


class Dispatch(Protocol):
    def dispatch(self, x_TD: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, DispatchMeta]:
        """Rows [R, D] for the experts held here, sorted by expert. Ids of -1 go nowhere."""
        ...

    def combine(self, y_RD: torch.Tensor, meta: DispatchMeta) -> torch.Tensor:
        """The weighted sum [T, D] of each token's expert outputs; tokens that went nowhere get 0."""
        ...


class LocalDispatch:
    """All experts are on this rank: a permutation and its inverse."""

    def __init__(self, layer: int, placement: Placement, kernels: KernelSelector, dtype: torch.dtype) -> None:
        """layer: index among the MoE layers. dtype: of the activations."""
        self.num_slots = len(placement.physical_to_logical[layer])
        self.slot_E: torch.Tensor | None = None
        if not placement.is_identity:
            self.slot_E = torch.tensor(placement.first_slots(layer), dtype=torch.int32, device=kernels.device)
        self.sort: ops.sort_by_expert.SortByExpert = kernels.sort_by_expert()
        self.combine_kernel: ops.combine.Combine = kernels.combine(dtype)

    def dispatch(self, x_TD: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, DispatchMeta]:
        ids_TK = routing.ids_TK if self.slot_E is None else self._to_slots(routing.ids_TK, self.slot_E)
        offsets_E1, order_R = self.sort(ids_TK, self.num_slots)
        return self._rows(x_TD, order_R, ids_TK.shape[1]), DispatchMeta(offsets_E1, order_R, routing.weights_TK)

    def combine(self, y_RD: torch.Tensor, meta: DispatchMeta) -> torch.Tensor:
        return self.combine_kernel(y_RD, meta.order_R, meta.weights_TK, meta.weights_TK.shape[0])

    @staticmethod
    def _rows(x_TD: torch.Tensor, order_R: torch.Tensor, top_k: int) -> torch.Tensor:
        if x_TD.shape[0] == 1:  # one token decodes: its row, as often as it is chosen
            return x_TD.expand(order_R.shape[0], -1).contiguous()
        return x_TD.index_select(0, order_R // top_k)

    @staticmethod
    def _to_slots(ids_TK: torch.Tensor, slot_E: torch.Tensor) -> torch.Tensor:
        return torch.where(ids_TK < 0, ids_TK, slot_E[ids_TK.clamp_min(0).long()])
