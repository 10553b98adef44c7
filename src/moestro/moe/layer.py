"""A mixture-of-experts block: router -> dispatch -> experts -> combine, plus the shared experts.

T tokens, D width, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moestro.kernels.ops.route import Route
from moestro.kernels.ops.route.reference import sigmoid
from moestro.layers.linear import Linear
from moestro.layers.mlp import GatedMLP
from moestro.moe.dispatch import Dispatch
from moestro.moe.events import EventSink, RoutingEvent
from moestro.moe.experts import Experts
from moestro.moe.router import mask_padding, route
from moestro.spec.fields import RouterSpec


@dataclass(frozen=True, eq=False)
class MoELayer:
    """One MoE block on one rank.

    index: among the MoE layers. router: [E, D]; runs on float32 inputs, so that logits are float32 whatever the model's
    dtype.
    """

    index: int
    spec: RouterSpec
    router: Linear
    selection_bias_E: torch.Tensor | None
    route_kernel: Route
    dispatch: Dispatch
    experts: Experts
    shared: GatedMLP | None
    shared_gate: Linear | None

    def __call__(self, x_TD: torch.Tensor, num_tokens: int, events: EventSink | None) -> torch.Tensor:
        """The block's output [T, D] in x's dtype. Rows from num_tokens on are padding; events: None during warm-up."""
        routing = route(self.router(x_TD.float()), self.spec, self.selection_bias_E, kernel=self.route_kernel)
        routing = mask_padding(routing, num_tokens)
        x_RD, meta = self.dispatch.dispatch(x_TD, routing)
        out_TD = self.dispatch.combine(self.experts(x_RD, meta.offsets_E1), meta)
        if events is not None:
            events.record(RoutingEvent(self.index, routing, meta.offsets_E1))
        if self.shared is not None:
            shared_TD = self.shared(x_TD)
            if self.shared_gate is not None:
                shared_TD = shared_TD * sigmoid(self.shared_gate(x_TD)).to(shared_TD.dtype)
            out_TD = out_TD + shared_TD
        return out_TD
