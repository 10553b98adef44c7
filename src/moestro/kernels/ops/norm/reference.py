"""rms_norm and add_rms_norm_ in plain PyTorch."""

from __future__ import annotations

import torch

from moestro.kernels.checks import require_shape
from moestro.kernels.ops.norm import check


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    check("rms_norm", x_TD, weight_D)
    x = x_TD.float()
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight_D.float()
    return y.to(x_TD.dtype)


def add_rms_norm_(
    residual_TD: torch.Tensor, x_TD: torch.Tensor, scale: float, weight_D: torch.Tensor, eps: float
) -> torch.Tensor:
    require_shape("add_rms_norm_", "x", x_TD, residual_TD.shape)
    check("add_rms_norm_", residual_TD, weight_D)
    residual_TD.add_(x_TD, alpha=scale)
    return rms_norm(residual_TD, weight_D, eps)
