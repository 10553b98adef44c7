"""paged_attention: reference against a plain loop, CPU kernel against the reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from moestro.errors import KernelError
from moestro.kernels.ops.attention import PagedBatch, numba, reference


def make_batch(lengths: list[int], queries: list[int], page_size: int, padding: int = 0) -> tuple[PagedBatch, int]:
    """Sequences on pages in random order, table entries beyond the context invalid; and the number of pages."""
    pages = [-(-length // page_size) for length in lengths]
    ids = torch.randperm(sum(pages) + 2).int()
    tables = torch.full((len(lengths), max([*pages, 1])), -7, dtype=torch.int32)
    used = 0
    for s, count in enumerate(pages):
        tables[s, :count] = ids[used : used + count]
        used += count
    T = sum(queries) + padding
    batch = PagedBatch(
        page_size=page_size,
        q_starts_S1=torch.tensor([0, *queries]).cumsum(0).int(),
        context_lens_S=torch.tensor(lengths, dtype=torch.int32),
        page_tables_SP=tables,
        slots_T=torch.zeros(T, dtype=torch.int64),
        num_seqs=len(lengths),
        num_tokens=T,
        max_query_len=max([*queries, 0]),
        max_context_len=max([*lengths, 0]),
    )
    return batch, len(ids)


def make_pages(
    P: int, Hk: int, page_size: int, d: int, dv: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    k = torch.randn(P, Hk, page_size, d).to(dtype)
    return k, (k[..., :dv] if Hk == 1 and dv < d else torch.randn(P, Hk, page_size, dv).to(dtype))


def plain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: PagedBatch, scale: float, window: int | None, sinks: Any
) -> torch.Tensor:
    """One score at a time."""
    T, H, _ = q.shape
    out = torch.zeros(T, H, v.shape[-1])
    for s in range(batch.num_seqs):
        start, end = batch.q_starts_S1[s : s + 2].tolist()
        length = int(batch.context_lens_S[s])
        for t in range(start, end):
            position = length - (end - t)
            for h in range(H):
                head = h // (H // k.shape[1])
                scores, values = [], []
                for j in range(position + 1):
                    if window is None or j > position - window:
                        page = int(batch.page_tables_SP[s, j // batch.page_size])
                        key = k[page, head, j % batch.page_size].float()
                        scores.append(float(q[t, h] @ key) * scale)
                        values.append(v[page, head, j % batch.page_size].float())
                total = sum(math.exp(x) for x in scores) + (math.exp(float(sinks[h])) if sinks is not None else 0)
                for x, value in zip(scores, values, strict=True):
                    out[t, h] += math.exp(x) / total * value
    return out


@pytest.mark.parametrize("module", [reference, numba])
@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_equals_plain_loop(module: Any, window: int | None, with_sinks: bool) -> None:
    """C78: lengths around the window, in one go and token by token."""
    batch, P = make_batch([3, 4, 5, 9, 9], [3, 1, 2, 9, 1], 4)
    k, v = make_pages(P, 2, 4, 8, 6, torch.float32)
    q, sinks = torch.randn(batch.num_tokens, 4, 8), torch.randn(4) if with_sinks else None
    out = module.paged_attention(q, k, v, batch, 0.4, window, sinks)
    torch.testing.assert_close(out, plain_attention(q, k, v, batch, 0.4, window, sinks), rtol=1e-5, atol=1e-5)


BATCHES = [
    ([1], [1], 16, 0, "first token"),
    ([300], [1], 16, 0, "decode beyond one stretch of keys"),
    ([256, 257, 512, 513], [1, 1, 1, 1], 16, 2, "stretches that end with the context, or one key later; padding rows"),
    ([70, 5, 600, 33], [70, 1, 1, 2], 32, 0, "prompt, decode and speculation in one step"),
    ([300], [40], 8, 0, "later chunk of a prompt"),
    ([200], [3], 128, 1, "page larger than a block of keys"),
    ([9, 4], [0, 4], 4, 0, "sequence without queries in this step"),
    ([], [], 4, 0, "C54: nothing to do"),
    ([], [], 4, 3, "padding only"),
]

HEADS = [
    (4, 2, 64, 64, "grouped"),
    (6, 6, 40, 24, "a key head each, widths that are no whole vectors"),
    (8, 1, 72, 64, "latent: values are the front of the keys"),
    (56, 1, 16, 16, "more rows than one block"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=lambda h: h[4])
@pytest.mark.parametrize("case", BATCHES, ids=lambda b: b[4])
def test_equals_reference(case: Any, heads: Any, dtype: torch.dtype) -> None:
    lengths, queries, page_size, padding, _ = case
    H, Hk, d, dv, _ = heads
    batch, P = make_batch(lengths, queries, page_size, padding)
    k, v = make_pages(P, Hk, page_size, d, dv, dtype)
    q = torch.randn(batch.num_tokens, H, d)
    for window in (None, 1, 7, 260):
        for sinks in (None, torch.randn(H) * 3):
            out = numba.paged_attention(q, k, v, batch, d**-0.5, window, sinks)
            expected = reference.paged_attention(q, k, v, batch, d**-0.5, window, sinks)
            assert out.shape == (batch.num_tokens, H, dv)
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("module", [reference, numba])
def test_sink_joins_the_denominator_once(module: Any) -> None:
    """C80: logits [0, 0] and sink 0 give thirds; the scale does not touch the sink; stretches count it once."""
    batch, P = make_batch([2], [1], 4)
    k, v = torch.zeros(P, 1, 4, 8), torch.ones(P, 1, 4, 8)
    for scale in (1.0, 0.01):
        out = module.paged_attention(torch.ones(1, 1, 8), k, v, batch, scale, None, torch.zeros(1))
        assert out.flatten().tolist() == pytest.approx([2 / 3] * 8)
    batch, P = make_batch([600], [1], 4)
    k, v = torch.zeros(P, 1, 4, 8), torch.ones(P, 1, 4, 8)
    out = module.paged_attention(torch.ones(1, 1, 8), k, v, batch, 1.0, None, torch.tensor([math.log(600)]))
    assert out.flatten().tolist() == pytest.approx([0.5] * 8)


@pytest.mark.parametrize("module", [reference, numba])
def test_extreme_sink_and_scores(module: Any) -> None:
    batch, P = make_batch([3], [1], 4)
    k, v = torch.full((P, 1, 4, 8), 100.0), torch.ones(P, 1, 4, 8)
    q = torch.full((1, 1, 8), 100.0)
    for sign in (1, -1):
        out = module.paged_attention(q * sign, k, v, batch, 1.0, None, torch.tensor([80.0]))
        assert out.flatten().tolist() == pytest.approx([max(sign, 0)] * 8)


def test_row_does_not_depend_on_how_the_step_was_cut() -> None:
    """A prompt in one go, in chunks, and its last token alone in a batch with others: the same bits."""
    batch, P = make_batch([600], [600], 16)
    k, v = make_pages(P, 2, 16, 32, 32, torch.bfloat16)
    q = torch.randn(600, 8, 32)
    whole = numba.paged_attention(q, k, v, batch, 0.2, None, None)
    for first, last in ((0, 1), (250, 300), (597, 600), (599, 600)):
        part = PagedBatch(
            page_size=16,
            q_starts_S1=torch.tensor([0, last - first, last - first + 1], dtype=torch.int32),
            context_lens_S=torch.tensor([last, 1], dtype=torch.int32),
            page_tables_SP=batch.page_tables_SP.repeat(2, 1),
            slots_T=torch.zeros(last - first + 1, dtype=torch.int64),
            num_seqs=2,
            num_tokens=last - first + 1,
            max_query_len=last - first,
            max_context_len=last,
        )
        out = numba.paged_attention(q[[*range(first, last), 0]], k, v, part, 0.2, None, None)
        assert torch.equal(out[:-1], whole[first:last])


def test_refuses_batches_that_do_not_fit() -> None:
    batch, P = make_batch([5], [1], 4)
    k, v = make_pages(P, 1, 4, 8, 8, torch.float32)
    q = torch.zeros(1, 2, 8)
    batch.page_tables_SP[0, 1] = P
    with pytest.raises(KernelError, match="a page id lies outside the pages"):
        numba.paged_attention(q, k, v, batch, 1.0, None, None)
    batch, _ = make_batch([5], [1], 4)
    batch.context_lens_S[0] = 9
    with pytest.raises(KernelError, match="more keys than its page table holds"):
        numba.paged_attention(q, k, v, batch, 1.0, None, None)
    batch.context_lens_S[0] = 0
    with pytest.raises(KernelError, match="fewer keys than queries"):
        numba.paged_attention(q, k, v, batch, 1.0, None, None)
    batch.q_starts_S1[1] = 2
    with pytest.raises(KernelError, match="do not rise within the rows of q"):
        numba.paged_attention(q, k, v, batch, 1.0, None, None)


@pytest.mark.parametrize("module", [reference, numba])
def test_refuses_shapes_that_do_not_fit(module: Any) -> None:
    batch, P = make_batch([5], [1], 4)
    k, v = make_pages(P, 2, 4, 8, 8, torch.float32)
    q = torch.zeros(1, 4, 8)
    with pytest.raises(KernelError, match=r"q has shape \[2, 4, 8\]; expected \[1, H, d\]"):
        module.paged_attention(torch.zeros(2, 4, 8), k, v, batch, 1.0, None, None)
    with pytest.raises(KernelError, match="Hk dividing 3 heads"):
        module.paged_attention(torch.zeros(1, 3, 8), k, v, batch, 1.0, None, None)
    with pytest.raises(KernelError, match=r"v_pages is torch\.bfloat16"):
        module.paged_attention(q, k, v.bfloat16(), batch, 1.0, None, None)
    with pytest.raises(KernelError, match="window=0 must be at least 1"):
        module.paged_attention(q, k, v, batch, 1.0, 0, None)
    with pytest.raises(KernelError, match=r"sinks has dtype torch\.bfloat16; expected float32"):
        module.paged_attention(q, k, v, batch, 1.0, None, torch.zeros(4).bfloat16())


def test_batch_refuses_inconsistent_facts() -> None:
    batch, _ = make_batch([5], [1], 4)
    facts = {f: getattr(batch, f) for f in batch.__dataclass_fields__}
    with pytest.raises(KernelError, match=r"context_lens_S has dtype torch\.int64; expected int32"):  # C16
        PagedBatch(**{**facts, "context_lens_S": batch.context_lens_S.long()})
    with pytest.raises(KernelError, match=r"slots_T has shape \[1\]; expected \[2\]"):
        PagedBatch(**{**facts, "num_tokens": 2})
    with pytest.raises(KernelError, match="for a context of 9"):
        PagedBatch(**{**facts, "max_context_len": 9})
