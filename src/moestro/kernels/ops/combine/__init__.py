"""combine: the weighted sum of a token's expert outputs, back in token order.

T tokens, K top-k, R rows sorted by expert, D width.
"""

from __future__ import annotations

from typing import Protocol

import torch

from moestro.errors import KernelError
from moestro.kernels.checks import require_dtype, require_shape


class Combine(Protocol):
    def __call__(
        self, y_RD: torch.Tensor, order_R: torch.Tensor, weights_TK: torch.Tensor, num_tokens: int
    ) -> torch.Tensor:
        """Sum the expert outputs of each token: out[t] = sum over k of weights[t, k] * y[row of (t, k)].

        y_RD: [R, D]. order_R: int32 [R] from sort_by_expert. weights_TK: float32 [T, K]. num_tokens: T.
        Pairs without a row add nothing; a token without rows gets 0. The sum runs in the order of k in float32, so it
        is the same in every run and batch. Returns [T, D] in y's dtype. Raises KernelError when shapes or dtypes do
        not fit.
        """
        ...


def check(y_RD: torch.Tensor, order_R: torch.Tensor, weights_TK: torch.Tensor, num_tokens: int) -> None:
    if y_RD.dim() != 2:
        raise KernelError(f"combine: y has shape {list(y_RD.shape)}; expected [R, D]")
    require_dtype("combine", "order", order_R, torch.int32)
    require_shape("combine", "order", order_R, y_RD.shape[:1])
    require_dtype("combine", "weights", weights_TK, torch.float32)
    if weights_TK.dim() != 2 or weights_TK.shape[0] != num_tokens:
        raise KernelError(f"combine: weights have shape {list(weights_TK.shape)}; expected [{num_tokens}, K]")
