"""A linear layer: a weight in its format, an optional bias, and the kernel chosen for them when the model was built."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moestro.kernels import ops
from moestro.kernels.select import KernelSelector
from moestro.kernels.summands import Summands
from moestro.quant.formats import Weight


@dataclass(frozen=True, eq=False)
class Linear:
    """y = x @ weight.T + bias. weight: [N, K]; bias: [N] or None."""

    weight: Weight
    bias_N: torch.Tensor | None
    kernel: ops.linear.Linear
    parts_kernel: ops.linear.LinearParts

    @classmethod
    def build(cls, weight: Weight, bias_N: torch.Tensor | None, kernels: KernelSelector, dtype: torch.dtype) -> Linear:
        """dtype: of the activations."""
        return cls(weight, bias_N, kernels.linear(weight.format, dtype), kernels.linear_parts(weight.format, dtype))

    def __call__(self, x_TK: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """out_dtype: x's where None."""
        return self.kernel(x_TK, self.weight, self.bias_N, out_dtype)

    def parts(self, x_TK: torch.Tensor) -> torch.Tensor | Summands:
        """The same for an output that goes to the residual stream, perhaps not added up."""
        return self.parts_kernel(x_TK, self.weight, self.bias_N)
