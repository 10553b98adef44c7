"""combine in plain PyTorch."""

from __future__ import annotations

import torch

from moestro.kernels.ops.combine import check


def combine(y_RD: torch.Tensor, order_R: torch.Tensor, weights_TK: torch.Tensor, num_tokens: int) -> torch.Tensor:
    check(y_RD, order_R, weights_TK, num_tokens)
    K, D = weights_TK.shape[1], y_RD.shape[1]
    pairs_PD = torch.zeros(num_tokens * K, D, dtype=torch.float32, device=y_RD.device)
    pairs_PD[order_R.long()] = y_RD.float()
    # A pair without a row may have any weight, NaN too.
    used_P = torch.zeros(num_tokens * K, dtype=torch.bool, device=y_RD.device)
    used_P[order_R.long()] = True
    weights_TK = weights_TK.masked_fill(~used_P.view(num_tokens, K), 0.0)
    out_TD = torch.zeros(num_tokens, D, dtype=torch.float32, device=y_RD.device)
    for k, part_TD in enumerate(pairs_PD.view(num_tokens, K, D).unbind(1)):
        out_TD += weights_TK[:, k, None] * part_TD
    return out_TD.to(y_RD.dtype)
