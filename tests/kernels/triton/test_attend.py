"""attend: Triton, fused or in two steps, against the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from moestro.kernels.ops.attend import reference
from moestro.kernels.ops.attention import PagedBatch
from moestro.kernels.ops.qkv_store import QKVPlan
from tests.kernels.triton.test_attention import close, make_batch, make_pages, mixed
from tests.kernels.triton.test_qkv_store import inputs


def compare(
    plan: QKVPlan, batch: PagedBatch, P: int, dtype: torch.dtype, window: int | None = None, sinks: bool = False
) -> None:
    from moestro.kernels.ops.attend import triton

    device = batch.slots_T.device
    qkv, norms, turn = inputs(plan, batch.num_tokens, dtype, device)
    k, v = make_pages(P, plan.num_kv_heads, batch.page_size, plan.head_dim, plan.v_head_dim, dtype, device)
    sinks_H = torch.randn(plan.num_heads, device=device) * 3 if sinks else None
    mine, theirs = (k.clone(), v.clone()), (k.clone(), v.clone())
    scale = plan.head_dim**-0.5
    out = triton.attend(qkv, plan, *turn, batch, *mine, *norms, 1e-6, scale, window, sinks_H)
    expected = reference.attend(qkv, plan, *turn, batch, *theirs, *norms, 1e-6, scale, window, sinks_H)
    used = batch.slots_T >= 0
    close(out[used], expected[used])
    assert bool((out[~used] == 0).all())
    written = torch.zeros(P * batch.page_size, dtype=torch.bool, device=device)
    written[batch.slots_T[used]] = True
    for got, wanted, before in zip(mine, theirs, (k, v), strict=True):
        close(got, wanted)
        kept = ~written.view(P, 1, batch.page_size, 1)
        assert torch.equal(got * kept, before * kept)


PLANS = [
    QKVPlan(4, 2, 16, 16, 16, qk_norm="head"),
    QKVPlan(6, 2, 16, 16, 8),  # partial rotation, groups of 3
    QKVPlan(2, 2, 24, 10, 24, interleaved=True, clip=0.8),  # odd widths
    QKVPlan(18, 1, 16, 16, 0),  # more heads than a block takes
    QKVPlan(4, 2, 16, 16, 16, qk_norm="full"),  # two steps
]
CASES: list[tuple[list[int], list[int], int, int]] = [
    ([1], [1], 16, 0),
    ([150], [1], 16, 0),
    ([70, 33, 5, 0, 4], [1, 1, 1, 1, 1], 4, 2),
    ([9, 0, 7], [1, 0, 1], 4, 1),
    ([40, 3], [5, 1], 8, 1),
]


@pytest.mark.parametrize(("case", "plan", "dtype"), mixed(CASES, PLANS))
def test_equals_reference(case: Any, plan: QKVPlan, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    lengths, queries, page_size, padding = case
    compare(plan, *make_batch(lengths, queries, page_size, device, padding), dtype)


@pytest.mark.parametrize("window", [None, 1, 50])
@pytest.mark.parametrize("case", CASES[1:3], ids=str)
def test_windows_and_sinks(case: Any, window: int | None, device: torch.device) -> None:
    torch.manual_seed(1)
    lengths, queries, page_size, padding = case
    batch, P = make_batch(lengths, queries, page_size, device, padding)
    compare(QKVPlan(4, 1, 16, 16, 16), batch, P, torch.float32, window, sinks=True)


QWEN = QKVPlan(32, 4, 128, 128, 128, qk_norm="head")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "plan",
    [QWEN, QKVPlan(64, 8, 64, 64, 64), QKVPlan(32, 8, 128, 128, 128), QKVPlan(96, 8, 128, 128, 64)],
    ids=["Qwen3-30B", "gpt-oss", "Mixtral", "partial rotation, groups of 12"],
)
@pytest.mark.parametrize("window", [None, 128])
def test_real_decoding(plan: QKVPlan, window: int | None, device: torch.device) -> None:
    torch.manual_seed(2)
    for lengths in ([1], [512], [9000], [32000, 3, 700], [600] * 33, [1, 0, 2000, 64, 65, 129, 0, 5]):
        batch, P = make_batch(lengths, [1] * len(lengths), 16, device)
        compare(plan, batch, P, torch.bfloat16, window, sinks=plan.head_dim == 64)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sdpa", [True, False])
def test_fresh_prompt(sdpa: bool, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from moestro.kernels.ops.attend import triton

    torch.manual_seed(3)
    if not sdpa:
        monkeypatch.setattr(triton, "SDPA_MIN_TOKENS", None)
    for T in (256, 1000):
        compare(QWEN, *make_batch([T], [T], 16, device), dtype)


@pytest.mark.gpu
def test_dependent_launch_and_graph_change_nothing(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays with other lengths equal plain launches, bit by bit."""
    from moestro.kernels.ops.attend import triton
    from moestro.kernels.ops.attention import triton_decode

    torch.manual_seed(4)
    batch, _ = make_batch([700, 3000, 40, 0], [1, 1, 1, 1], 16, device)
    batch = replace(batch, max_context_len=batch.page_tables_SP.shape[1] * 16)
    batch.page_tables_SP.copy_(torch.arange(batch.page_tables_SP.numel()).view(4, -1))  # room for any length
    pages = make_pages(batch.page_tables_SP.numel(), 4, 16, 128, 128, torch.bfloat16, device)
    k, v = (x.clone() for x in pages)
    qkv, norms, turn = inputs(QWEN, 4, torch.bfloat16, device)

    def step() -> torch.Tensor:
        return triton.attend(qkv, QWEN, *turn, batch, k, v, *norms, 1e-6, 0.1, None, None)

    def start(lengths: list[int]) -> None:
        position = torch.tensor(lengths) - 1
        first_slot = batch.page_tables_SP[:, 0].cpu().long() * 16
        batch.context_lens_S.copy_(position + 1)
        batch.slots_T.copy_(torch.where(position >= 0, first_slot + position, -1))
        k.copy_(pages[0])
        v.copy_(pages[1])

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [step() for _ in range(3)]
    for lengths in ([700, 3000, 40, 0], [1, 17, 2999, 2], [0, 0, 1, 0]):
        start(lengths)
        graph.replay()
        k_after, v_after = k.clone(), v.clone()
        start(lengths)
        with monkeypatch.context() as patch:
            for module in (triton, triton_decode):
                patch.setattr(module, "pdl", lambda tensor: {"PDL": False})
            plain = step()
        for out in outs:
            assert torch.equal(out, plain)
        assert torch.equal(k, k_after)
        assert torch.equal(v, v_after)
