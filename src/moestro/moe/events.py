"""What the MoE layers tell the world: one event a layer and step, and the counters that add them up.

E physical experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from moestro.moe.placement import Placement
from moestro.moe.router import Routing


@dataclass(frozen=True, eq=False)
class RoutingEvent:
    """One MoE layer has routed one step.

    layer: index among the MoE layers. offsets_E1: rows of each physical expert, executed here; padding has none.
    """

    layer: int
    routing: Routing
    offsets_E1: torch.Tensor


class EventSink(Protocol):
    def record(self, event: RoutingEvent) -> None:
        """Take note of an event without waiting for the device."""
        ...


class ExpertCounters:
    """Executed (token, choice) pairs a layer and expert since start or `reset`, kept on the device.

    Counts everything the experts computed, tokens recomputed after a preemption included; warm-up and padding are not
    in it.
    """

    def __init__(self, placement: Placement, device: torch.device) -> None:
        self.placement = placement
        # Offsets are added up as they come and taken apart when they are read: one small operation a layer.
        self._offsets = [
            torch.zeros(len(slots) + 1, dtype=torch.int64, device=device) for slots in placement.physical_to_logical
        ]

    def record(self, event: RoutingEvent) -> None:
        self._offsets[event.layer] += event.offsets_E1

    def tokens(self) -> list[list[int]]:
        """Pairs a layer and logical expert."""
        totals = []
        for slots, offsets in zip(self.placement.physical_to_logical, self._offsets, strict=True):
            experts = [0] * self.placement.num_experts
            for expert, count in zip(slots, offsets.diff().tolist(), strict=True):
                experts[expert] += count
            totals.append(experts)
        return totals

    def reset(self) -> None:
        for offsets in self._offsets:
            offsets.zero_()
