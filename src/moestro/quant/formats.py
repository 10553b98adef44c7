"""The weight-format seam: a matrix, or one matrix an expert, behind an object that names its format.

Layers and kernels take a `Weight` and look at `format` to choose an implementation; only this package knows the bits. A
quantised format adds a subclass with its own tensors and an `unpack` that is the reference for all its kernels.

N outputs, K inputs, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

FormatName = Literal["float32", "bfloat16", "float16"]

_PLAIN: dict[torch.dtype, FormatName] = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True, eq=False)
class Weight:
    """A linear weight [N, K], or experts' weights [E, N, K], stored as plain floating-point numbers.

    data: contiguous, float32, bfloat16 or float16.
    """

    data: torch.Tensor

    def __post_init__(self) -> None:
        assert self.data.dtype in _PLAIN, f"no plain weight format for {self.data.dtype}"
        assert self.data.dim() in (2, 3), self.data.shape

    @property
    def format(self) -> FormatName:
        return _PLAIN[self.data.dtype]

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape, [N, K] or [E, N, K]."""
        return tuple(self.data.shape)

    @property
    def nbytes(self) -> int:
        """Bytes a kernel reads when it uses all of the weight."""
        return self.data.nbytes

    def unpack(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight's values in `dtype`, same logical shape."""
        return self.data.to(dtype)

    def expert(self, index: int) -> Weight:
        """The [N, K] weight of one expert, a view."""
        assert self.data.dim() == 3
        return Weight(self.data[index])
