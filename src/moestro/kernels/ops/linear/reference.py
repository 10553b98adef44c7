"""linear in plain PyTorch, any device and weight format."""

from __future__ import annotations

import torch

from moestro.kernels.ops.linear import check
from moestro.quant.formats import Weight


def linear(
    x_TK: torch.Tensor, weight: Weight, bias_N: torch.Tensor | None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    check(x_TK, weight, bias_N)
    y_TN = x_TK.float() @ weight.unpack(torch.float32).T
    if bias_N is not None:
        y_TN = y_TN + bias_N.float()
    return y_TN.to(out_dtype or x_TK.dtype)


def linear_parts(x_TK: torch.Tensor, weight: Weight, bias_N: torch.Tensor | None) -> torch.Tensor:
    return linear(x_TK, weight, bias_N)
