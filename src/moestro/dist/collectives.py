"""Sums and exchanges between ranks. With one rank there is nothing to do, and `SingleRank` does it."""

from __future__ import annotations

from typing import Protocol

import torch

from moestro.kernels.summands import Summands

Partial = torch.Tensor | Summands


class Collectives(Protocol):
    """What a rank needs from the others during a step."""

    def all_reduce_(self, x: Partial) -> Partial:
        """Sum x over the ranks, in place where it is a tensor; every rank gets the sum."""
        ...


class SingleRank:
    """The collectives of a group of one."""

    def all_reduce_(self, x: Partial) -> Partial:
        return x
