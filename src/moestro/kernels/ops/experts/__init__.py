"""experts_mlp: the gated MLPs of all routed experts over rows that are sorted by expert.

R rows after the expert sort, E experts, D width, F expert width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from moestro.errors import KernelError
from moestro.kernels.checks import require_dtype, require_shape
from moestro.kernels.ops.gated_mlp import check_activation
from moestro.quant.formats import Weight
from moestro.spec.fields import Activation


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """The weights of one layer's experts.

    gate_up: [E, 2F, D], gate rows then up rows. down: [E, D, F]. The biases are optional.
    Raises KernelError for other shapes.
    """

    gate_up: Weight
    down: Weight
    gate_up_bias_E2F: torch.Tensor | None = None
    down_bias_ED: torch.Tensor | None = None

    def __post_init__(self) -> None:
        gate_up, down = self.gate_up.shape, self.down.shape
        if len(down) != 3 or gate_up != (down[0], 2 * down[2], down[1]):
            raise KernelError(
                f"experts_mlp: gate_up {list(gate_up)}, down {list(down)} do not fit; expected [E, 2F, D], [E, D, F]"
            )
        E, D, F = down
        if self.gate_up_bias_E2F is not None:
            require_shape("experts_mlp", "gate_up_bias", self.gate_up_bias_E2F, (E, 2 * F))
        if self.down_bias_ED is not None:
            require_shape("experts_mlp", "down_bias", self.down_bias_ED, (E, D))

    @property
    def num_experts(self) -> int:
        return self.down.shape[0]

    @property
    def width(self) -> int:
        return self.down.shape[1]

    @property
    def expert_width(self) -> int:
        return self.down.shape[2]


class ExpertsMLP(Protocol):
    def __call__(
        self,
        x_RD: torch.Tensor,
        offsets_E1: torch.Tensor,
        experts: ExpertWeights,
        activation: Activation,
        limit: float | None,
    ) -> torch.Tensor:
        """Apply to each row the MLP of its expert; weights of experts without rows are not read.

        x_RD: [R, D] floating point, R may be 0. offsets_E1: int32 [E + 1], rows offsets[e]:offsets[e + 1] belong to
        expert e and offsets[E] = R. activation, limit: as in gated_mlp.
        Returns [R, D] in x's dtype, computed in float32. Raises KernelError when shapes, dtypes or offsets do not fit.
        """
        ...


def check(
    x_RD: torch.Tensor, offsets_E1: torch.Tensor, experts: ExpertWeights, activation: Activation, limit: float | None
) -> None:
    check_activation("experts_mlp", activation, limit)
    require_dtype("experts_mlp", "offsets", offsets_E1, torch.int32)
    require_shape("experts_mlp", "offsets", offsets_E1, (experts.num_experts + 1,))
    if x_RD.dim() != 2 or x_RD.shape[1] != experts.width:
        raise KernelError(f"experts_mlp: x has shape {list(x_RD.shape)}; expected [R, {experts.width}]")


def bad_offsets(offsets: list[int], num_rows: int) -> KernelError:
    return KernelError(f"experts_mlp: offsets {offsets} must rise from 0 to the {num_rows} rows of x and never fall")
