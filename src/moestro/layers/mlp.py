"""The dense gated MLP of dense layers and shared experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moestro.kernels import ops
from moestro.kernels.select import KernelSelector
from moestro.quant.formats import Weight
from moestro.spec.fields import Activation


@dataclass(frozen=True, eq=False)
class GatedMLP:
    """down(act(gate(x), up(x))). gate_up: [2F, D]; down: [D, F]."""

    gate_up: Weight
    down: Weight
    activation: Activation
    limit: float | None
    kernel: ops.gated_mlp.GatedMLP

    @classmethod
    def build(
        cls,
        gate_up: Weight,
        down: Weight,
        activation: Activation,
        limit: float | None,
        kernels: KernelSelector,
        dtype: torch.dtype,
    ) -> GatedMLP:
        return cls(gate_up, down, activation, limit, kernels.gated_mlp(gate_up.format, dtype))

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.kernel(x_TD, self.gate_up, self.down, self.activation, self.limit)
