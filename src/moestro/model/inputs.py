"""Everything a step gives the model; there is no other way in.

T tokens of the step (padding included), D width, R rows that need logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moestro.kernels.ops.attention import PagedBatch


@dataclass(frozen=True, eq=False)
class StepInputs:
    """One step's tokens and where they lie.

    token_ids_T: int64 [T]; or embeds_TD in the activations' dtype, for inputs that are not tokens (images); exactly one
    of the two.
    rope_rows_T: int64 [T], each token's row of the rope tables: its position, shifted for long longrope sequences.
    batch: sequences, pages and slots. logit_rows_R: int64 [R], the rows of the step whose logits are wanted; None for
    all of them. has_padding: whether there may be rows without a slot, which take part in nothing. counted: False for
    warm-up and profiling, which no statistic may see.
    """

    token_ids_T: torch.Tensor | None
    embeds_TD: torch.Tensor | None
    rope_rows_T: torch.Tensor
    batch: PagedBatch
    logit_rows_R: torch.Tensor | None
    has_padding: bool = False
    counted: bool = True

    def __post_init__(self) -> None:
        assert (self.token_ids_T is None) != (self.embeds_TD is None), "give token ids or embeddings, not both"
