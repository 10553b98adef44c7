"""A mixture-of-experts block: router -> experts -> combine, plus the shared experts.

T tokens, D width, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moestro.kernels.ops.norm import AddRMSNormLogits
from moestro.kernels.ops.route import Route
from moestro.kernels.ops.route.reference import sigmoid
from moestro.kernels.summands import Summands
from moestro.layers.linear import Linear
from moestro.layers.mlp import GatedMLP
from moestro.layers.norm import Norm, RMSNorm
from moestro.moe.events import EventSink
from moestro.moe.experts import RoutedExperts
from moestro.moe.router import route
from moestro.spec.fields import RouterSpec


@dataclass(frozen=True, eq=False)
class MoELayer:
    """One MoE block on one rank.

    index: among the MoE layers. router: [E, D]; its logits are float32 whatever the model's dtype.
    """

    index: int
    spec: RouterSpec
    router: Linear
    selection_bias_E: torch.Tensor | None
    logits_kernel: AddRMSNormLogits
    route_kernel: Route
    experts: RoutedExperts
    shared: GatedMLP | None
    shared_gate: Linear | None

    def score(
        self, norm: Norm, residual_TD: torch.Tensor, x: torch.Tensor | Summands, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add scale * x to the residual in place; returns its norm [T, D] and the router's logits of that, float32
        [T, E].
        """
        if isinstance(norm, RMSNorm):
            router, bias_E = self.router.weight, self.router.bias_N
            return self.logits_kernel(residual_TD, x, scale, norm.weight_D, norm.eps, router, bias_E)
        x_TD = norm.add_(residual_TD, x, scale)
        return x_TD, self.router(x_TD, torch.float32)

    def __call__(
        self, x_TD: torch.Tensor, logits_TE: torch.Tensor, slots_T: torch.Tensor | None, events: EventSink | None
    ) -> torch.Tensor | Summands:
        """The block's output [T, D], or what adds up to it.

        slots_T: the tokens' places in the KV cache, negative for padding; None when there is no padding. events: None
        during warm-up.
        """
        counts_E = None if events is None else events.counts(self.index)
        routing = route(
            logits_TE, self.spec, self.selection_bias_E, kernel=self.route_kernel, slots_T=slots_T, counts_E=counts_E
        )
        routed = self.experts(x_TD, routing, self.index, events)
        if self.shared is None:
            return routed
        shared_TD = self.shared(x_TD)
        if self.shared_gate is not None:
            shared_TD = shared_TD * sigmoid(self.shared_gate(x_TD)).to(shared_TD.dtype)
        if isinstance(routed, Summands):
            return Summands(routed.parts_STD, routed.weights_TS, shared_TD)
        return routed + shared_TD
