"""qkv_store: Triton against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moestro.kernels.ops.attention import PagedBatch
from moestro.kernels.ops.qkv_store import QKVPlan, reference
from tests.kernels.triton.test_attention import close, mixed


def make_batch(slots: list[int], page_size: int, device: torch.device) -> PagedBatch:
    """Only the slots matter here."""
    T = len(slots)
    return PagedBatch(
        page_size=page_size,
        q_starts_S1=torch.tensor([0, T], dtype=torch.int32, device=device),
        context_lens_S=torch.tensor([T], dtype=torch.int32, device=device),
        page_tables_SP=torch.zeros(1, T, dtype=torch.int32, device=device),
        slots_T=torch.tensor(slots, dtype=torch.int64, device=device),
        num_seqs=1,
        num_tokens=T,
        max_query_len=T,
        max_context_len=T,
    )


def inputs(plan: QKVPlan, T: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, Any, Any]:
    """qkv, (q_norm, k_norm), (cos, sin)."""
    angles = torch.rand(T, plan.rotary_dim // 2, device=device) * 6
    norms = [torch.rand(n, device=device).to(dtype) for n in plan.norm_sizes] if plan.qk_norm else [None, None]
    return torch.randn(T, plan.total, device=device).to(dtype), norms, (angles.cos(), angles.sin())


def empty_pages(plan: QKVPlan, P: int, page_size: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Views into wider tensors, so that strides matter, filled with a value to be kept where nothing is written."""
    widths = (plan.head_dim, plan.v_head_dim)
    store = [torch.full((P, plan.num_kv_heads, page_size, w + 8), 9.0, dtype=dtype, device=device) for w in widths]
    return [pages[..., :w] for pages, w in zip(store, widths, strict=True)]


PLANS = [
    QKVPlan(4, 2, 16, 16, 16),
    QKVPlan(3, 1, 24, 24, 8),  # partial rotation, no width a power of two
    QKVPlan(2, 1, 16, 16, 16, interleaved=True),
    QKVPlan(4, 2, 8, 8, 8, qk_norm="head"),
    QKVPlan(4, 2, 8, 8, 8, qk_norm="full", clip=0.3),  # OLMoE: norm, then clamp
    QKVPlan(6, 2, 10, 7, 6, clip=0.5),  # value heads of another width
    QKVPlan(2, 2, 8, 8, 0),  # nothing rotates
]


@pytest.mark.parametrize(("plan", "T", "dtype"), mixed(PLANS, [1, 3, 70]))
def test_equals_reference(plan: QKVPlan, T: int, dtype: torch.dtype, device: torch.device) -> None:
    from moestro.kernels.ops.qkv_store import triton

    torch.manual_seed(T)
    P, page_size = 20, 4
    slots = torch.randperm(P * page_size)[:T].tolist()
    slots[-1 if T > 1 else 1 :] = [-1] * (T > 1)
    batch = make_batch(slots, page_size, device)
    qkv, norms, turn = inputs(plan, T, dtype, device)
    real = batch.slots_T >= 0
    for angles in (turn, (None, None)):
        mine, theirs = (empty_pages(plan, P, page_size, dtype, device) for _ in range(2))
        q = triton.qkv_store(qkv, plan, *angles, batch, *mine, *norms, 1e-6)
        expected = reference.qkv_store(qkv, plan, *angles, batch, *theirs, *norms, 1e-6)
        close(q[real], expected[real])
        for got, wanted in zip(mine, theirs, strict=True):
            close(got, wanted)
            assert torch.equal(got == 9, wanted == 9)


def test_keys_once_more(device: torch.device) -> None:
    from moestro.kernels.ops.qkv_store import triton

    plan = QKVPlan(4, 2, 16, 16, 16, qk_norm="head")
    batch = make_batch([3, 1, 10], 4, device)
    qkv, norms, turn = inputs(plan, 3, torch.float32, device)
    k_pages, v_pages = empty_pages(plan, 4, 4, torch.float32, device)
    k = torch.full((3, 2, 16), float("nan"), device=device)
    triton.store(qkv, plan, turn, batch, (k_pages, v_pages), norms, 1e-6, k)
    assert torch.equal(k, k_pages.transpose(1, 2).flatten(0, 1)[batch.slots_T])


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 32, 4099])
@pytest.mark.parametrize(
    "plan", [QKVPlan(32, 4, 128, 128, 128, qk_norm="head"), QKVPlan(16, 16, 128, 128, 128, qk_norm="full")], ids=str
)
def test_real_shapes(plan: QKVPlan, T: int, device: torch.device) -> None:
    from moestro.kernels.ops.qkv_store import triton

    batch = make_batch(torch.randperm(5000)[:T].tolist(), 16, device)
    qkv, norms, turn = inputs(plan, T, torch.bfloat16, device)
    mine, theirs = (empty_pages(plan, 313, 16, torch.bfloat16, device) for _ in range(2))
    q = triton.qkv_store(qkv, plan, *turn, batch, *mine, *norms, 1e-6)
    close(q, reference.qkv_store(qkv, plan, *turn, batch, *theirs, *norms, 1e-6))
    for got, wanted in zip(mine, theirs, strict=True):
        close(got, wanted)
