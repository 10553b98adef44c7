"""linear: y = x @ weight.T + bias for a weight in any format; and linear_parts, which may leave it split over K.

T tokens, K inputs, N outputs.
"""

from __future__ import annotations

from typing import Protocol

import torch

from moestro.errors import KernelError
from moestro.kernels.checks import require_shape
from moestro.kernels.summands import Summands
from moestro.quant.formats import Weight


class Linear(Protocol):
    def __call__(
        self, x_TK: torch.Tensor, weight: Weight, bias_N: torch.Tensor | None, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Apply a linear layer.

        x_TK: [T, K] floating point, T may be 0. weight: [N, K]. bias_N: [N] or None. out_dtype: x's where None.
        Returns [T, N], accumulated in float32. Raises KernelError when shapes do not fit.
        """
        ...


class LinearParts(Protocol):
    def __call__(self, x_TK: torch.Tensor, weight: Weight, bias_N: torch.Tensor | None) -> torch.Tensor | Summands:
        """As Linear, for an output that goes to the residual stream: the sum over K may be left to the add."""
        ...


def check(x_TK: torch.Tensor, weight: Weight, bias_N: torch.Tensor | None) -> None:
    shape = weight.shape
    if len(shape) != 2:
        raise KernelError(f"linear: weight has shape {list(shape)}; expected [N, K]")
    if x_TK.dim() != 2 or x_TK.shape[1] != shape[1]:
        raise KernelError(f"linear: x has shape {list(x_TK.shape)}; expected [T, {shape[1]}]")
    if bias_N is not None:
        require_shape("linear", "bias", bias_N, shape[:1])
