"""What an implementation is asked about before it is chosen."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Facts:
    """The situation one op will run in, known when the model is built.

    device: "cpu" or "cuda".
    format: the weight's format name; the pages' dtype name for ops on the KV cache; "" for ops without either.
    dtype: of the activations.
    """

    device: str
    format: str
    dtype: torch.dtype
