"""Checks at the border of an op: shapes, dtypes and layout, before a kernel that trusts its addresses runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from moestro.errors import KernelError


class HasShape(Protocol):
    @property
    def shape(self) -> Sequence[int]: ...


def require_shape(op: str, name: str, tensor: HasShape, shape: Sequence[int]) -> None:
    """Raise KernelError unless `tensor` (or Summands) has exactly this shape."""
    if tuple(tensor.shape) != tuple(shape):
        raise KernelError(f"{op}: {name} has shape {list(tensor.shape)}; expected {list(shape)}")


def require_dtype(op: str, name: str, tensor: torch.Tensor, *accepted: torch.dtype) -> None:
    """Raise KernelError unless `tensor` has one of the accepted dtypes."""
    if tensor.dtype not in accepted:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in accepted)
        raise KernelError(f"{op}: {name} has dtype {tensor.dtype}; expected {names}")
