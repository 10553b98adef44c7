"""routed_mlp: each token's experts, from the router's choice to outputs that only wait to be added up.

For devices on which sorting rows by expert is the kernel's own matter. T tokens, K top-k, D width.
"""

from __future__ import annotations

from typing import Protocol

import torch

from moestro.kernels.checks import require_dtype, require_shape
from moestro.kernels.ops.experts import ExpertWeights
from moestro.kernels.ops.gated_mlp import check_activation
from moestro.kernels.summands import Summands
from moestro.spec.fields import Activation


class RoutedMLP(Protocol):
    def __call__(
        self,
        x_TD: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        experts: ExpertWeights,
        activation: Activation,
        limit: float | None,
    ) -> Summands:
        """The weighted sum over each token's experts, not yet added up.

        x_TD: [T, D]. ids_TK: int32 [T, K], -1 where nothing is to be computed; weights_TK: float32, 0 there. Weights
        of experts without tokens are not read. activation, limit: as in gated_mlp. Returns summands of [T, D].
        """
        ...


def check(
    x_TD: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    experts: ExpertWeights,
    activation: Activation,
    limit: float | None,
) -> None:
    check_activation("routed_mlp", activation, limit)
    require_dtype("routed_mlp", "ids", ids_TK, torch.int32)
    require_dtype("routed_mlp", "weights", weights_TK, torch.float32)
    require_shape("routed_mlp", "weights", weights_TK, ids_TK.shape)
    require_shape("routed_mlp", "x", x_TD, (ids_TK.shape[0], experts.width))
