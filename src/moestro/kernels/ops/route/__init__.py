"""route: expert choice, logits [T, E] -> ids [T, K] and mixing weights [T, K].

T tokens, E experts, K top-k.
"""

from __future__ import annotations

from typing import Protocol

import torch

from moestro.spec.fields import RouterSpec


class Route(Protocol):
    def __call__(
        self,
        logits_TE: torch.Tensor,
        spec: RouterSpec,
        bias_E: torch.Tensor | None = None,
        slots_T: torch.Tensor | None = None,
        counts_E: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose top_k experts a token.

        logits_TE, bias_E: float32; the bias takes part in the choice only. T may be 0. slots_T: int64 [T]; rows with a
        negative one are padding, and get ids of -1 and weights of 0 (C48). counts_E: int64 [E], to which each expert's
        number of tokens is added. Returns ids int32 [T, K] in order of falling selection score, equal scores by rising
        id, and weights float32 [T, K].
        """
        ...
