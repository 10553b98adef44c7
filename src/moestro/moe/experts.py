"""The experts' arithmetic: a gated MLP an expert over rows sorted by expert.

R rows, E experts, D width.
"""

from __future__ import annotations

import torch

from moestro.kernels.ops.experts import ExpertsMLP
from moestro.kernels.select import KernelSelector
from moestro.moe.store import ExpertStore
from moestro.spec.fields import MoESpec


class Experts:
    """Applies each row's expert, with weights from a store. Experts without rows are not read."""

    def __init__(self, spec: MoESpec, store: ExpertStore, kernels: KernelSelector, dtype: torch.dtype) -> None:
        self.activation = spec.activation
        self.limit = spec.activation_limit
        self.store = store
        self.kernel: ExpertsMLP = kernels.experts_mlp(store.weight_format, dtype)

    def __call__(self, x_RD: torch.Tensor, offsets_E1: torch.Tensor) -> torch.Tensor:
        return self.kernel(x_RD, offsets_E1, self.store.fetch(offsets_E1), self.activation, self.limit)
