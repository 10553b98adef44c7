"""Where expert weights come from: the seam between the experts' arithmetic and their memory."""

from __future__ import annotations

from typing import Protocol

import torch

from moestro.kernels.ops.experts import ExpertWeights


class ExpertStore(Protocol):
    """The weights of one MoE layer's experts."""

    def fetch(self, offsets_E1: torch.Tensor | None) -> ExpertWeights:
        """Weights that hold every expert with rows in this step (offsets as in DispatchMeta; None: any expert may have
        some), valid until the next fetch.
        """
        ...

    @property
    def weight_format(self) -> str:
        """Name of the weights' format, for the choice of a kernel."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes that the weights occupy here."""
        ...


class ResidentStore:
    """All experts of the layer in memory, all the time."""

    def __init__(self, weights: ExpertWeights) -> None:
        self.weights = weights

    def fetch(self, offsets_E1: torch.Tensor | None) -> ExpertWeights:
        return self.weights

    @property
    def weight_format(self) -> str:
        return self.weights.gate_up.format

    @property
    def nbytes(self) -> int:
        w = self.weights
        biases = [b for b in (w.gate_up_bias_E2F, w.down_bias_ED) if b is not None]
        return w.gate_up.nbytes + w.down.nbytes + sum(b.nbytes for b in biases)
