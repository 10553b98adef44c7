"""The routed experts of one layer: from the router's choice to what is added to the residual stream.

T tokens, R rows sorted by expert, D width.
"""

from __future__ import annotations

from typing import Protocol

import torch

from moestro.kernels.select import KernelSelector
from moestro.kernels.summands import Summands
from moestro.moe.dispatch import Dispatch
from moestro.moe.events import EventSink, RoutingEvent
from moestro.moe.router import Routing
from moestro.moe.store import ExpertStore
from moestro.spec.fields import MoESpec


class RoutedExperts(Protocol):
    def __call__(
        self, x_TD: torch.Tensor, routing: Routing, layer: int, events: EventSink | None
    ) -> torch.Tensor | Summands:
        """The weighted sum [T, D] of each token's experts, or what adds up to it. layer: index among the MoE layers."""
        ...


class SortedExperts:
    """Rows are brought to their experts (on this rank or another), computed sorted by expert, and brought back."""

    def __init__(
        self, spec: MoESpec, dispatch: Dispatch, store: ExpertStore, kernels: KernelSelector, dtype: torch.dtype
    ) -> None:
        """dtype: of the activations."""
        self.activation = spec.activation
        self.limit = spec.activation_limit
        self.dispatch = dispatch
        self.store = store
        self.kernel = kernels.experts_mlp(store.weight_format, dtype)

    def __call__(self, x_TD: torch.Tensor, routing: Routing, layer: int, events: EventSink | None) -> torch.Tensor:
        x_RD, meta = self.dispatch.dispatch(x_TD, routing)
        weights = self.store.fetch(meta.offsets_E1)
        y_RD = self.kernel(x_RD, meta.offsets_E1, weights, self.activation, self.limit)
        if events is not None:
            events.record(RoutingEvent(layer, routing, meta.offsets_E1))
        return self.dispatch.combine(y_RD, meta)


class FusedExperts:
    """One kernel op from ids to summands; for devices on which moving rows about costs more than it saves."""

    def __init__(self, spec: MoESpec, store: ExpertStore, kernels: KernelSelector, dtype: torch.dtype) -> None:
        """dtype: of the activations."""
        self.activation = spec.activation
        self.limit = spec.activation_limit
        self.store = store
        self.kernel = kernels.routed_mlp(store.weight_format, dtype)

    def __call__(self, x_TD: torch.Tensor, routing: Routing, layer: int, events: EventSink | None) -> Summands:
        if events is not None:
            events.record(RoutingEvent(layer, routing, None))
        weights = self.store.fetch(None)
        return self.kernel(x_TD, routing.ids_TK, routing.weights_TK, weights, self.activation, self.limit)
