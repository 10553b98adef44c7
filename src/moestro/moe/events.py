"""What the MoE layers tell the world: one event a layer and step, and the counters that add them up.

E experts.
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

    layer: index among the MoE layers. offsets_E1: rows of each physical expert, executed here; padding has none. None
    where the router has counted its choices itself (`EventSink.counts`).
    """

    layer: int
    routing: Routing
    offsets_E1: torch.Tensor | None


class EventSink(Protocol):
    def counts(self, layer: int) -> torch.Tensor | None:
        """Where the router adds up the tokens of each logical expert, int64 [E]; None: it does not count."""
        ...

    def record(self, event: RoutingEvent) -> None:
        """Take note of an event without waiting for the device."""
        ...


class ExpertCounters:
    """Executed (token, choice) pairs a layer and expert since start or `reset`, kept on the device.

    Counts everything the experts computed, tokens recomputed after a preemption included; warm-up and padding are not
    in it. On a GPU the router's kernel counts; on the CPU the offsets of sorted rows are added up as they come and
    taken apart when they are read, one small operation a layer.
    """

    def __init__(self, placement: Placement, device: torch.device) -> None:
        self.placement = placement
        layers = placement.physical_to_logical
        self._counts = torch.zeros(len(layers), placement.num_experts, dtype=torch.int64, device=device)
        self._offsets = [torch.zeros(len(slots) + 1, dtype=torch.int64, device=device) for slots in layers]

    def counts(self, layer: int) -> torch.Tensor | None:
        return self._counts[layer] if self._counts.is_cuda else None

    def record(self, event: RoutingEvent) -> None:
        if event.offsets_E1 is not None:
            self._offsets[event.layer] += event.offsets_E1

    def tokens(self) -> list[list[int]]:
        """Pairs a layer and logical expert."""
        totals: list[list[int]] = self._counts.tolist()
        for experts, slots, offsets in zip(totals, self.placement.physical_to_logical, self._offsets, strict=True):
            for expert, count in zip(slots, offsets.diff().tolist(), strict=True):
                experts[expert] += count
        return totals

    def reset(self) -> None:
        self._counts.zero_()
        for offsets in self._offsets:
            offsets.zero_()
