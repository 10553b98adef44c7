"""paged_attention in plain PyTorch: gather a sequence's pages, then a masked softmax.

n queries of one sequence, L its keys.
"""

from __future__ import annotations

import torch

from moestro.kernels.ops.attention import PagedBatch, check


def paged_attention(
    q_THd: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: PagedBatch,
    scale: float,
    window: int | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    check(q_THd, k_pages, v_pages, batch, window, sinks_H)
    T, H, _ = q_THd.shape
    Hk, dv = k_pages.shape[1], v_pages.shape[3]
    out_THd = torch.zeros(T, H, dv, dtype=q_THd.dtype, device=q_THd.device)
    starts, lengths = batch.q_starts_S1.tolist(), batch.context_lens_S.tolist()
    for s in range(batch.num_seqs):
        start, n, L = starts[s], starts[s + 1] - starts[s], lengths[s]
        if n == 0:
            continue
        pages = batch.page_tables_SP[s, : -(-L // batch.page_size)].long()
        k_HLd = k_pages[pages].transpose(0, 1).flatten(1, 2)[:, :L].float().repeat_interleave(H // Hk, 0)
        v_HLd = v_pages[pages].transpose(0, 1).flatten(1, 2)[:, :L].float().repeat_interleave(H // Hk, 0)
        scores_HnL = q_THd[start : start + n].transpose(0, 1).float() @ k_HLd.transpose(1, 2) * scale
        position_n1 = torch.arange(L - n, L, device=q_THd.device)[:, None]
        key_L = torch.arange(L, device=q_THd.device)
        hidden_nL = key_L > position_n1
        if window is not None:
            hidden_nL |= key_L <= position_n1 - window
        scores_HnL = scores_HnL.masked_fill(hidden_nL, float("-inf"))
        if sinks_H is not None:
            scores_HnL = torch.cat([scores_HnL, sinks_H[:, None, None].expand(H, n, 1)], dim=-1)
        weights_HnL = scores_HnL.softmax(-1)[..., :L]
        out_THd[start : start + n] = (weights_HnL @ v_HLd).transpose(0, 1).to(q_THd.dtype)
    return out_THd
