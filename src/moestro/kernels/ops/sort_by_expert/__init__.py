"""sort_by_expert: which (token, choice) pairs go to which expert.

T tokens, K top-k, E experts, R = pairs that have an expert.
"""

from __future__ import annotations

from typing import Protocol

import torch

from moestro.errors import KernelError
from moestro.kernels.checks import require_dtype


class SortByExpert(Protocol):
    def __call__(self, ids_TK: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Sort the (token, choice) pairs by expert, keeping their order within an expert.

        ids_TK: int32 [T, K], values in 0..num_experts-1, or negative for "no expert here" (padding, or an expert of
        another rank).
        Returns offsets_E1 int32 [E + 1], where pairs offsets[e]:offsets[e + 1] belong to expert e, and order_R int32
        [R], the flat index t * K + k of each pair in sorted order. Pairs with a negative id are left out: R =
        offsets[E] <= T * K.
        Raises KernelError for ids of another dtype, or beyond num_experts.
        """
        ...


def check(ids_TK: torch.Tensor, num_experts: int) -> None:
    require_dtype("sort_by_expert", "ids", ids_TK, torch.int32)
    if ids_TK.dim() != 2:
        raise KernelError(f"sort_by_expert: ids have shape {list(ids_TK.shape)}; expected [T, K]")
    if num_experts < 1:
        raise KernelError(f"sort_by_expert: num_experts={num_experts} must be at least 1")


def bad_id(value: int, num_experts: int) -> KernelError:
    return KernelError(
        f"sort_by_expert: expert id {value} is beyond the {num_experts} experts; -1 marks a pair without one"
    )
