"""The two norms of decoder layers, each alone and after adding to the residual stream.

T tokens, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from moestro.kernels import ops
from moestro.kernels.select import KernelSelector
from moestro.kernels.summands import Summands, total


class Norm(Protocol):
    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        """The norm of x."""
        ...

    def add_(self, residual_TD: torch.Tensor, x: torch.Tensor | Summands, scale: float) -> torch.Tensor:
        """Add scale * x to the residual in place and return the norm of the sum."""
        ...


@dataclass(frozen=True, eq=False)
class RMSNorm:
    """Root-mean-square norm with a weight (arXiv 1910.07467)."""

    weight_D: torch.Tensor
    eps: float
    kernel: ops.norm.RMSNorm
    add_kernel: ops.norm.AddRMSNorm

    @classmethod
    def build(cls, weight_D: torch.Tensor, eps: float, kernels: KernelSelector, dtype: torch.dtype) -> RMSNorm:
        """The weight is kept in the activations' dtype."""
        return cls(weight_D.to(dtype), eps, kernels.rms_norm(dtype), kernels.add_rms_norm_(dtype))

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.kernel(x_TD, self.weight_D, self.eps)

    def add_(self, residual_TD: torch.Tensor, x: torch.Tensor | Summands, scale: float) -> torch.Tensor:
        return self.add_kernel(residual_TD, x, scale, self.weight_D, self.eps)


@dataclass(frozen=True, eq=False)
class LayerNorm:
    """LayerNorm with weight and bias (Phi-3.5-MoE)."""

    weight_D: torch.Tensor
    bias_D: torch.Tensor
    eps: float

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x_TD, self.weight_D.shape, self.weight_D, self.bias_D, self.eps)

    def add_(self, residual_TD: torch.Tensor, x: torch.Tensor | Summands, scale: float) -> torch.Tensor:
        return self(residual_TD.add_(total(x, residual_TD.dtype), alpha=scale))
