"""sort_by_expert in plain PyTorch."""

from __future__ import annotations

import torch

from moestro.kernels.ops.sort_by_expert import bad_id, check


def sort_by_expert(ids_TK: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    check(ids_TK, num_experts)
    flat = ids_TK.flatten()
    if flat.numel() and int(flat.max()) >= num_experts:
        raise bad_id(int(flat.max()), num_experts)
    pairs = torch.nonzero(flat >= 0).flatten()
    chosen = flat[pairs].long()
    order_R = pairs[torch.argsort(chosen, stable=True)].to(torch.int32)
    offsets_E1 = torch.zeros(num_experts + 1, dtype=torch.int32, device=ids_TK.device)
    offsets_E1[1:] = torch.bincount(chosen, minlength=num_experts).cumsum(0)
    return offsets_E1, order_R
