"""rms_norm, add_rms_norm_ and add_rms_norm_logits_: root-mean-square norm (arXiv 1910.07467), alone, after adding to
the residual stream, and with the router's logits of what it gives.

T tokens, D width, E experts.
"""

from __future__ import annotations

from typing import Protocol

import torch

from moestro.errors import KernelError
from moestro.kernels.checks import require_shape
from moestro.kernels.summands import Summands
from moestro.quant.formats import Weight


class RMSNorm(Protocol):
    def __call__(self, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last axis, in float32; [T, D] in x's dtype. T may be 0."""
        ...


class AddRMSNorm(Protocol):
    def __call__(
        self,
        residual_TD: torch.Tensor,
        x: torch.Tensor | Summands,
        scale: float,
        weight_D: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        """Add scale * x to the residual in place and return the RMS norm of the new residual.

        residual_TD: [T, D], contiguous, written in place. x: [T, D], or what adds up to it. weight_D: [D]. Returns
        [T, D] in the residual's dtype.
        """
        ...


class AddRMSNormLogits(Protocol):
    def __call__(
        self,
        residual_TD: torch.Tensor,
        x: torch.Tensor | Summands,
        scale: float,
        weight_D: torch.Tensor,
        eps: float,
        router: Weight,
        router_bias_E: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """add_rms_norm_, and the router's logits of its result as it was rounded: normed [T, D], logits float32 [T, E].

        router: [E, D]. router_bias_E: [E] or None.
        """
        ...


def check(op: str, x_TD: torch.Tensor, weight_D: torch.Tensor) -> None:
    if x_TD.dim() != 2:
        raise KernelError(f"{op}: x has shape {list(x_TD.shape)}; expected [T, D]")
    require_shape(op, "weight", weight_D, x_TD.shape[1:])
