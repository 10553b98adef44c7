"""What a layer adds to the residual stream, handed on before it has been added up.

On a GPU the next kernel, which adds to the residual stream and takes the norm, reads the parts as cheaply as their sum;
so a projection that was split over K, and the experts' outputs of a token, need no kernel of their own to be summed.

S parts, T tokens, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Summands:
    """sum over s of weights[t, s] * parts[s, t] (+ plus[t]).

    parts_STD: floating point, any strides but for the last axis, which is contiguous. weights_TS: float32, None for 1;
    a part with weight 0 is not read, so it may hold anything (padding, pairs that no expert computed). plus_TD: one
    more part, without a weight (shared experts).
    """

    parts_STD: torch.Tensor
    weights_TS: torch.Tensor | None = None
    plus_TD: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(T, D), as of the sum."""
        return self.parts_STD.shape[1], self.parts_STD.shape[2]

    def total(self, dtype: torch.dtype) -> torch.Tensor:
        """The sum [T, D], in float32 in the order of s, plus last, then rounded to dtype."""
        sum_TD = torch.zeros(self.shape, dtype=torch.float32, device=self.parts_STD.device)
        for s, part_TD in enumerate(self.parts_STD.unbind(0)):
            if self.weights_TS is None:
                sum_TD += part_TD.float()
            else:
                weight_T1 = self.weights_TS[:, s, None]
                sum_TD += torch.where(weight_T1 == 0, 0.0, weight_T1 * part_TD.float())
        if self.plus_TD is not None:
            sum_TD += self.plus_TD.float()
        return sum_TD.to(dtype)

    def rows(self, index_R: torch.Tensor) -> Summands:
        """The summands of these tokens only."""
        return Summands(
            self.parts_STD[:, index_R],
            None if self.weights_TS is None else self.weights_TS[index_R],
            None if self.plus_TD is None else self.plus_TD[index_R],
        )


def total(x: torch.Tensor | Summands, dtype: torch.dtype) -> torch.Tensor:
    """x itself, or its sum."""
    return x.total(dtype) if isinstance(x, Summands) else x
