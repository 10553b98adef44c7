"""qkv_store: reference against a plain loop, CPU kernel against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moestro.errors import KernelError
from moestro.kernels.ops.attention import PagedBatch
from moestro.kernels.ops.qkv_store import QKVPlan, numba, reference


def make_batch(slots: list[int], page_size: int) -> PagedBatch:
    """Only the slots matter here."""
    T = len(slots)
    return PagedBatch(
        page_size=page_size,
        q_starts_S1=torch.tensor([0, T], dtype=torch.int32),
        context_lens_S=torch.tensor([T], dtype=torch.int32),
        page_tables_SP=torch.zeros(1, T, dtype=torch.int32),
        slots_T=torch.tensor(slots, dtype=torch.int64),
        num_seqs=1,
        num_tokens=T,
        max_query_len=T,
        max_context_len=T,
    )


def run(
    module: Any, plan: QKVPlan, qkv: torch.Tensor, batch: PagedBatch, dtype: torch.dtype, norms: Any, turn: Any
) -> Any:
    pages = 6
    k = torch.full((pages, plan.num_kv_heads, batch.page_size, plan.head_dim), 9.0, dtype=dtype)
    v = torch.full((pages, plan.num_kv_heads, batch.page_size, plan.v_head_dim), 9.0, dtype=dtype)
    return module.qkv_store(qkv, plan, *turn, batch, k, v, *norms, 1e-6), k, v


def inputs(plan: QKVPlan, T: int) -> tuple[torch.Tensor, Any, Any]:
    angles = torch.rand(T, plan.rotary_dim // 2) * 6
    norms = [torch.rand(size) for size in plan.norm_sizes] if plan.qk_norm else [None, None]
    return torch.randn(T, plan.total), norms, (angles.cos(), angles.sin())


def plain_head(
    row: list[float], norm: list[float] | None, cos: list[float], sin: list[float], plan: QKVPlan
) -> list[float]:
    """Norm, clamp and rotation of one head, by the definitions."""
    if norm is not None:
        size = (sum(v * v for v in row) / len(row) + 1e-6) ** 0.5
        row = [v / size * w for v, w in zip(row, norm, strict=True)]
    if plan.clip is not None:
        row = [max(-plan.clip, min(plan.clip, v)) for v in row]
    out = list(row)
    half = plan.rotary_dim // 2
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if plan.interleaved else (i, i + half)
        out[a] = row[a] * cos[i] - row[b] * sin[i]
        out[b] = row[b] * cos[i] + row[a] * sin[i]
    return out


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_reference_equals_plain_loop(interleaved: bool, clip: float | None) -> None:
    plan = QKVPlan(4, 2, 8, 6, 4, interleaved, "head", clip)
    batch = make_batch([9, 2, -1, 0], 4)
    qkv, norms, turn = inputs(plan, 4)
    q, k, v = run(reference, plan, qkv, batch, torch.float32, norms, turn)
    untouched = torch.ones(6, 4, dtype=torch.bool)
    for t, slot in enumerate(batch.slots_T.tolist()):
        cos, sin = turn[0][t].tolist(), turn[1][t].tolist()
        heads = [
            plain_head(qkv[t, h * 8 : h * 8 + 8].tolist(), norms[h >= 4].tolist(), cos, sin, plan) for h in range(6)
        ]
        torch.testing.assert_close(q[t], torch.tensor(heads[:4]))
        if slot < 0:
            continue
        page, offset = divmod(slot, 4)
        untouched[page, offset] = False
        values = qkv[t, 48:].reshape(2, 6)
        torch.testing.assert_close(k[page, :, offset], torch.tensor(heads[4:]))
        torch.testing.assert_close(v[page, :, offset], values if clip is None else values.clamp(-clip, clip))
    # Everything else keeps what it had: padding writes nothing (C48).
    assert bool((k.transpose(1, 2)[untouched] == 9).all())
    assert bool((v.transpose(1, 2)[untouched] == 9).all())


PLANS = [
    QKVPlan(4, 2, 8, 8, 8),  # plain grouped-query
    QKVPlan(4, 4, 16, 16, 8),  # partial rotation
    QKVPlan(2, 1, 8, 8, 8, interleaved=True),
    QKVPlan(4, 2, 8, 8, 8, qk_norm="head"),
    QKVPlan(4, 2, 8, 8, 8, qk_norm="full", clip=0.3),  # OLMoE: norm, then clamp
    QKVPlan(6, 2, 10, 7, 6, clip=8.0),  # value heads of another width; no size a whole vector
    QKVPlan(64, 8, 64, 64, 64),  # enough for several threads
    QKVPlan(2, 2, 8, 8, 0),  # nothing rotates
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("slots", [[5], [3, -1, 17, 0, 1, 2, 23, 8], []], ids=["one", "some", "C54: none"])
def test_equals_reference(plan: QKVPlan, slots: list[int], dtype: torch.dtype) -> None:
    batch = make_batch(slots, 4)
    qkv, norms, turn = inputs(plan, len(slots))
    for angles in (turn, (None, None)):
        got = run(numba, plan, qkv, batch, dtype, norms, angles)
        expected = run(reference, plan, qkv, batch, dtype, norms, angles)
        torch.testing.assert_close(got[0], expected[0], rtol=1e-5, atol=1e-5)
        for mine, theirs in zip(got[1:], expected[1:], strict=True):
            # A last bit before rounding to 16 bits can become one step of the stored format.
            torch.testing.assert_close(mine, theirs, rtol={torch.float32: 1e-5}.get(dtype, 8e-3), atol=1e-5)


def test_bfloat16_rounds_to_nearest_even() -> None:
    plan = QKVPlan(1, 1, 4, 4, 0)
    row = torch.tensor([1.00390625, 1.01171875, float("nan"), float("inf")])  # two exact ties: down, up
    k = torch.zeros(1, 1, 4, 4, dtype=torch.bfloat16)
    numba.qkv_store(row.repeat(3)[None], plan, None, None, make_batch([0], 4), k, k.clone(), None, None, 1e-6)
    torch.testing.assert_close(k[0, 0, 0], row.bfloat16(), rtol=0, atol=0, equal_nan=True)


def test_strided_pages_are_written_in_place() -> None:
    plan = QKVPlan(1, 1, 4, 4, 0)
    store = torch.zeros(2, 1, 4, 12)
    numba.qkv_store(
        torch.ones(1, 12), plan, None, None, make_batch([6], 4), store[..., :4], store[..., 6:10], None, None, 1e-6
    )
    assert store[1, 0, 2].tolist() == [1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 0]
    assert int(store.sum()) == 8


@pytest.mark.parametrize("module", [reference, numba])
def test_refuses(module: Any) -> None:
    plan = QKVPlan(2, 1, 4, 4, 4, qk_norm="head")
    qkv, norms, turn = inputs(plan, 2)
    with pytest.raises(KernelError, match="slot 24 is beyond the 24 slots"):
        run(module, plan, qkv, make_batch([0, 24], 4), torch.float32, norms, turn)
    with pytest.raises(KernelError, match=r"qkv has shape \[2, 15\]; expected \[2, 16\]"):
        run(module, plan, qkv[:, :15], make_batch([0, 1], 4), torch.float32, norms, turn)
    with pytest.raises(KernelError, match="asks for q_norm and k_norm exactly when it is set"):
        run(module, plan, qkv, make_batch([0, 1], 4), torch.float32, (None, None), turn)
    with pytest.raises(KernelError, match=r"cos has shape \[2, 1\]; expected \[2, 2\]"):
        run(module, plan, qkv, make_batch([0, 1], 4), torch.float32, norms, (turn[0][:, :1], turn[1]))
    with pytest.raises(KernelError, match="given together or not at all"):
        run(module, plan, qkv, make_batch([0, 1], 4), torch.float32, norms, (turn[0], None))
    with pytest.raises(KernelError, match="rotary_dim=6 must be even and at most head_dim=4"):
        QKVPlan(2, 1, 4, 4, 6)
