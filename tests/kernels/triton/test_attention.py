"""paged_attention: Triton against the reference."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from moestro.kernels.ops.attention import PagedBatch, reference

LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}


def mixed(rows: Sequence[Any], columns: Sequence[Any]) -> list[Any]:
    """Each row with each column, in one dtype: each row and column meets all dtypes, at a third of the time."""
    dtypes = list(LIMITS)
    pairs = itertools.product(enumerate(rows), enumerate(columns))
    return [pytest.param(row, column, dtypes[(i + j) % 3], id=f"{row}-{column}") for (i, row), (j, column) in pairs]


def close(out: torch.Tensor, expected: torch.Tensor) -> None:
    assert out.shape == expected.shape
    assert out.dtype == expected.dtype
    error = (out.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-30)
    assert float(error) < LIMITS[out.dtype], float(error)


def make_batch(
    lengths: list[int], queries: list[int], page_size: int, device: torch.device, padding: int = 0
) -> tuple[PagedBatch, int]:
    """Sequences on pages in random order, table entries beyond the context invalid; and the number of pages."""
    pages = [-(-length // page_size) for length in lengths]
    ids = torch.randperm(sum(pages) + 2).int()
    tables = torch.full((len(lengths), max(pages)), -7, dtype=torch.int32)
    slots = torch.full((sum(queries) + padding,), -1, dtype=torch.int64)
    used = row = 0
    for s, count in enumerate(pages):
        tables[s, :count] = ids[used : used + count]
        used += count
        for position in range(max(0, lengths[s] - queries[s]), lengths[s]):
            slots[row] = tables[s, position // page_size] * page_size + position % page_size
            row += 1
        row += queries[s] - min(queries[s], lengths[s])
    batch = PagedBatch(
        page_size=page_size,
        q_starts_S1=torch.tensor([0, *queries]).cumsum(0).int().to(device),
        context_lens_S=torch.tensor(lengths, dtype=torch.int32, device=device),
        page_tables_SP=tables.to(device),
        slots_T=slots.to(device),
        num_seqs=len(lengths),
        num_tokens=len(slots),
        max_query_len=max(queries),
        max_context_len=max(lengths),
    )
    return batch, len(ids)


def make_pages(
    P: int, Hk: int, page_size: int, d: int, dv: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random pages; for one kv head and dv < d the values are the front of the keys, as in latent attention."""
    k = torch.randn(P, Hk, page_size, d, device=device).to(dtype)
    return k, (k[..., :dv] if Hk == 1 and dv < d else torch.randn(P, Hk, page_size, dv, device=device).to(dtype))


def compare(
    batch: PagedBatch, P: int, heads: tuple[int, int, int, int], dtype: torch.dtype, window: int | None, sinks: bool
) -> None:
    from moestro.kernels.ops.attention import triton

    H, Hk, d, dv = heads
    device = batch.slots_T.device
    k, v = make_pages(P, Hk, batch.page_size, d, dv, dtype, device)
    q = torch.randn(batch.num_tokens, H, d, device=device).to(dtype)
    sinks_H = torch.randn(H, device=device) * 3 if sinks else None
    out = triton.paged_attention(q, k, v, batch, d**-0.5, window, sinks_H)
    close(out, reference.paged_attention(q, k, v, batch, d**-0.5, window, sinks_H))
    assert bool((out[int(batch.q_starts_S1[-1]) :] == 0).all())


CASES: list[tuple[list[int], list[int], int, int, str]] = [
    ([1], [1], 16, 0, "first token"),
    ([150], [1], 16, 0, "decode in several splits"),
    ([70, 33, 5], [1, 1, 1], 4, 2, "uneven lengths, padding rows"),
    ([9, 0, 4, 7], [1, 0, 0, 1], 4, 2, "decode beside sequences without queries"),
    ([5, 0], [1, 1], 4, 0, "a padding sequence that has a row"),
    ([33], [33], 16, 0, "fresh prompt"),
    ([40, 3, 70], [5, 1, 2], 8, 3, "chunk, decode and speculation in one step, padding rows"),
    ([9, 4], [0, 4], 4, 0, "sequence without queries in this step"),
]

HEADS = [
    (4, 2, 16, 16, "grouped"),
    (6, 2, 24, 10, "groups of 3, odd widths"),
    (2, 2, 48, 48, "a key head each"),
    (18, 1, 40, 32, "latent: values are the front of the keys; more heads than a block takes"),
]


@pytest.mark.parametrize(("case", "heads", "dtype"), mixed(CASES, HEADS))
def test_equals_reference(case: Any, heads: Any, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    lengths, queries, page_size, padding, _ = case
    batch, P = make_batch(lengths, queries, page_size, device, padding)
    compare(batch, P, heads[:4], dtype, None, False)


@pytest.mark.parametrize(("window", "sinks"), [(None, True), (1, False), (1, True), (3, False), (50, True)])
@pytest.mark.parametrize("case", [CASES[2], CASES[6]], ids=lambda c: c[4])
def test_windows_and_sinks(case: Any, window: int | None, sinks: bool, device: torch.device) -> None:
    torch.manual_seed(1)
    lengths, queries, page_size, padding, _ = case
    batch, P = make_batch(lengths, queries, page_size, device, padding)
    compare(batch, P, (6, 2, 16, 16), torch.float32, window, sinks)


def test_sink_joins_once_over_splits(device: torch.device) -> None:
    torch.manual_seed(2)
    batch, P = make_batch([300], [1], 16, device)
    compare(batch, P, (4, 1, 16, 16), torch.float32, None, True)


def test_garbage_in_pages_is_not_read(device: torch.device) -> None:
    """Slots beyond a context may hold anything, NaN too."""
    from moestro.kernels.ops.attention import triton

    torch.manual_seed(3)
    for queries in (1, 3):
        batch, P = make_batch([21], [queries], 16, device)
        k, v = make_pages(P, 1, 16, 16, 16, torch.float32, device)
        q = torch.randn(queries, 2, 16, device=device)
        expected = reference.paged_attention(q, k, v, batch, 0.3, None, None)
        last = int(batch.page_tables_SP[0, 1])
        for pages in (k, v):
            pages[last, :, 5:] = float("nan")
        close(triton.paged_attention(q, k, v, batch, 0.3, None, None), expected)


def test_padding_only(device: torch.device) -> None:
    from moestro.kernels.ops.attention import triton

    batch, P = make_batch([0, 0], [0, 0], 4, device, padding=3)
    batch = replace(batch, max_context_len=0)
    k, v = make_pages(P, 1, 4, 16, 16, torch.float32, device)
    out = triton.paged_attention(torch.randn(3, 2, 16, device=device), k, v, batch, 1.0, None, None)
    assert out.shape == (3, 2, 16)
    assert not out.any()


REAL = [
    (32, 4, 128, 128, "Qwen3-30B"),
    (64, 8, 64, 64, "gpt-oss"),
    (24, 8, 96, 96, "a width between powers of two"),
    (16, 16, 192, 128, "wide keys"),
    (128, 1, 576, 512, "latent"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("heads", REAL, ids=lambda h: h[4])
@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize(
    "case",
    [([4096], [1]), ([32768, 5, 700], [1, 1, 1]), ([900] * 33, [1] * 33), ([2500, 700, 9], [1000, 1, 9])],
    ids=str,
)
def test_real_shapes(case: Any, window: int | None, heads: Any, device: torch.device) -> None:
    torch.manual_seed(4)
    batch, P = make_batch(*case, 16, device, padding=1)
    compare(batch, P, heads[:4], torch.bfloat16, window, heads[4] == "gpt-oss")


@pytest.mark.gpu
def test_long_prompt(device: torch.device) -> None:
    torch.manual_seed(5)
    batch, P = make_batch([4096], [4096], 16, device)
    compare(batch, P, (8, 2, 128, 128), torch.bfloat16, None, False)


@pytest.mark.gpu
def test_graph_replays_with_other_lengths(device: torch.device) -> None:
    from moestro.kernels.ops.attention import triton

    torch.manual_seed(6)
    batch, P = make_batch([700, 3000, 40, 0], [1, 1, 1, 1], 16, device)
    batch = replace(batch, max_context_len=batch.page_tables_SP.shape[1] * 16)
    k, v = make_pages(P, 4, 16, 128, 128, torch.bfloat16, device)
    q = torch.randn(4, 32, 128, device=device).bfloat16()
    triton.paged_attention(q, k, v, batch, 0.1, None, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = triton.paged_attention(q, k, v, batch, 0.1, None, None)
    for lengths in ([700, 3000, 40, 0], [1, 17, 3000, 2], [0, 0, 1, 0]):
        batch.context_lens_S.copy_(torch.tensor(lengths, dtype=torch.int32))
        batch.page_tables_SP.copy_(torch.randint(0, P, batch.page_tables_SP.shape, dtype=torch.int32))
        q.normal_()
        out.fill_(7)
        graph.replay()
        expected = torch.zeros_like(out)
        for s, length in enumerate(lengths):
            if length:
                one, _ = make_batch([length], [1], 16, device)
                one = replace(one, page_tables_SP=batch.page_tables_SP[s : s + 1])
                expected[s] = reference.paged_attention(q[s : s + 1], k, v, one, 0.1, None, None)[0]
        close(out, expected)
