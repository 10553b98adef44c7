"""The router's decision: logits -> Routing. The rules themselves are `kernels/ops/route`.

T tokens, K top-k, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moestro.errors import SettingError
from moestro.kernels.ops.route import Route, reference
from moestro.spec.fields import RouterSpec


@dataclass(frozen=True)
class Routing:
    """Which experts each token goes to, and how their outputs are mixed.

    ids_TK: int32, in order of falling selection score, no id twice in a row; -1 marks a place that goes nowhere
    (padding).
    weights_TK: float32, the selection bias not in it.
    """

    ids_TK: torch.Tensor
    weights_TK: torch.Tensor

    def __post_init__(self) -> None:
        assert self.ids_TK.dtype == torch.int32, self.ids_TK.dtype
        assert self.weights_TK.dtype == torch.float32, self.weights_TK.dtype
        assert self.ids_TK.shape == self.weights_TK.shape, (self.ids_TK.shape, self.weights_TK.shape)


def route(
    logits_TE: torch.Tensor,
    spec: RouterSpec,
    bias_E: torch.Tensor | None = None,
    *,
    kernel: Route = reference.route,
    slots_T: torch.Tensor | None = None,
    counts_E: torch.Tensor | None = None,
) -> Routing:
    """Choose top_k experts a token and their weights, in float32 whatever the dtype of the logits.

    logits_TE: [T, E], any floating dtype; T may be 0. bias_E: selection bias [E], float32 or float64: rounding it to 16
    bits changes which experts win. Equal scores go to the lower expert id. kernel: the implementation, by default the
    PyTorch reference. slots_T, counts_E: as in `kernels.ops.route`: rows with a negative slot are padding and go
    nowhere, and the tokens of each expert are counted.

    Raises SettingError when a shape or dtype does not fit the spec.
    """
    if logits_TE.dim() != 2 or logits_TE.shape[1] != spec.num_experts or not logits_TE.is_floating_point():
        raise SettingError(
            f"router logits must be floating point [T, {spec.num_experts}], "
            f"not {logits_TE.dtype} {list(logits_TE.shape)}"
        )
    if bias_E is not None:
        if tuple(bias_E.shape) != (spec.num_experts,) or bias_E.dtype not in (torch.float32, torch.float64):
            raise SettingError(
                f"the selection bias must be float32 [{spec.num_experts}], not {bias_E.dtype} {list(bias_E.shape)}"
            )
        if spec.scoring == "sparsemixer":
            raise SettingError("scoring='sparsemixer' takes no selection bias")
        bias_E = bias_E.float()
    return Routing(*kernel(logits_TE.float(), spec, bias_E, slots_T, counts_E))
