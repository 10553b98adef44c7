"""The two ends of the model: token ids to rows of the residual stream, and rows to logits.

T tokens, D width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moestro.layers.linear import Linear


@dataclass(frozen=True, eq=False)
class Embedding:
    """Looks up token embeddings and scales them (Granite's embedding_multiplier; 1.0 elsewhere)."""

    weight_VD: torch.Tensor
    multiplier: float
    dtype: torch.dtype

    def __call__(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        x_TD = self.weight_VD[token_ids_T].to(self.dtype)
        return x_TD if self.multiplier == 1.0 else x_TD * self.multiplier


@dataclass(frozen=True, eq=False)
class Head:
    """Projects to the vocabulary; logits are float32, divided by Granite's logits_scaling (1.0 elsewhere)."""

    linear: Linear
    divisor: float

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        logits_TV = self.linear(x_TD, torch.float32)
        return logits_TV if self.divisor == 1.0 else logits_TV / self.divisor
