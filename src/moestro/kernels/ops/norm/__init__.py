"""rms_norm and add_rms_norm_: root-mean-square norm (arXiv 1910.07467), alone or after adding to the residual stream.

T tokens, D width.
"""

from __future__ import annotations

from typing import Protocol

import torch

from moestro.errors import KernelError
from moestro.kernels.checks import require_shape


class RMSNorm(Protocol):
    def __call__(self, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last axis, in float32; [T, D] in x's dtype. T may be 0."""
        ...


class AddRMSNorm(Protocol):
    def __call__(
        self, residual_TD: torch.Tensor, x_TD: torch.Tensor, scale: float, weight_D: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add scale * x to the residual in place and return the RMS norm of the new residual.

        residual_TD: [T, D], contiguous, written in place. x_TD: [T, D]. weight_D: [D]. Returns [T, D] in the
        residual's dtype.
        """
        ...


def check(op: str, x_TD: torch.Tensor, weight_D: torch.Tensor) -> None:
    if x_TD.dim() != 2:
        raise KernelError(f"{op}: x has shape {list(x_TD.shape)}; expected [T, D]")
    require_shape(op, "weight", weight_D, x_TD.shape[1:])
