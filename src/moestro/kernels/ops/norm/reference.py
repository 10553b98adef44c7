"""rms_norm, add_rms_norm_ and add_rms_norm_logits_ in plain PyTorch."""

from __future__ import annotations

import torch

from moestro.kernels.checks import require_shape
from moestro.kernels.ops.linear.reference import linear
from moestro.kernels.ops.norm import check
from moestro.kernels.summands import Summands, total
from moestro.quant.formats import Weight


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    check("rms_norm", x_TD, weight_D)
    x = x_TD.float()
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight_D.float()
    return y.to(x_TD.dtype)


def add_rms_norm_(
    residual_TD: torch.Tensor, x: torch.Tensor | Summands, scale: float, weight_D: torch.Tensor, eps: float
) -> torch.Tensor:
    require_shape("add_rms_norm_", "x", x, residual_TD.shape)
    check("add_rms_norm_", residual_TD, weight_D)
    residual_TD.add_(total(x, residual_TD.dtype), alpha=scale)
    return rms_norm(residual_TD, weight_D, eps)


def add_rms_norm_logits_(
    residual_TD: torch.Tensor,
    x: torch.Tensor | Summands,
    scale: float,
    weight_D: torch.Tensor,
    eps: float,
    router: Weight,
    router_bias_E: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    normed_TD = add_rms_norm_(residual_TD, x, scale, weight_D, eps)
    return normed_TD, linear(normed_TD, router, router_bias_E, torch.float32)
