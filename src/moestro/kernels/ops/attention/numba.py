"""paged_attention for the CPU: flash attention on register tiles, straight from the pages.

The rows of one kv head are its queries times its heads, row = query * group + head in group. An item of work is a block
of rows over one stretch of SPLIT keys (a sequence with one query) or over all keys, stretch by stretch (a prompt).
Stretches begin at multiples of SPLIT and are joined in order: a result is the same however the work was cut up.

S sequences, H heads, Hk kv heads, d key width, dv value width.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from moestro.errors import KernelError
from moestro.kernels.facts import Facts
from moestro.kernels.jit import TAGS, device, float32_address, float32_input, kernel, supports_formats
from moestro.kernels.memory import address_of, fetch_add, item_size, keep_alive, load, load_int32, new_counter, store
from moestro.kernels.ops.attention import PagedBatch, check
from moestro.kernels.pool import POOL, run, worker
from moestro.kernels.scalar import exp, larger
from moestro.kernels.tile import TILE_M, TILE_R, dot_rows, mix_rows

ROWS = 24  # rows of an item: a multiple of the tile's, few enough for scores and sums to stay in the cache
SPLIT = 256  # keys of a stretch
KEYS = 64  # keys scored at a time


def supports(facts: Facts) -> tuple[bool, str]:
    return supports_formats(facts)


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
    q_THd = float32_input("paged_attention", "q", q_THd)
    T, H, d = q_THd.shape
    P, Hk, page_size, dv = v_pages.shape
    k_strides, v_strides = k_pages.stride(), v_pages.stride()
    if k_strides[3] != 1 or v_strides[3] != 1:
        raise KernelError(
            f"paged_attention: the last axis of the pages has strides {k_strides[3]}, {v_strides[3]}; expected 1"
        )
    out_THd = torch.empty(T, H, dv)
    tables = batch.page_tables_SP
    sinks, _keep = float32_address(sinks_H)
    problem = _attend(
        POOL.address,
        TAGS[k_pages.dtype],
        (q_THd.data_ptr(), out_THd.data_ptr(), sinks),
        (k_pages.data_ptr(), *k_strides[:3]),
        (v_pages.data_ptr(), *v_strides[:3]),
        (batch.q_starts_S1.data_ptr(), batch.context_lens_S.data_ptr(), tables.data_ptr(), tables.stride(0)),
        (batch.num_seqs, T, H, Hk, d, dv, P, page_size, tables.shape[1]),
        float(scale),
        0 if window is None else window,
    )
    if problem:
        raise KernelError(f"paged_attention: {_PROBLEMS[problem]} (q_starts, context_lens or page_tables of the batch)")
    return out_THd


_PROBLEMS = {
    1: "query rows of the sequences do not rise within the rows of q",
    2: "a sequence has fewer keys than queries, or more keys than its page table holds",
    3: "a page id lies outside the pages",
}


@kernel
def _attend(
    pool: int, tag: Any, rows: Any, keys: Any, values: Any, seqs: Any, sizes: Any, scale: float, window: int
) -> int:
    problem = _check_batch(seqs, sizes)
    if problem:
        return problem
    S, T, H, Hk, _, dv, _, _, _ = sizes
    q_starts, context_lens, _, _ = seqs
    group = H // Hk
    # Per sequence: where its items begin, into how many stretches its keys are cut, where its partial results begin.
    items = np.zeros(S + 1, np.int64)
    stretches = np.empty(S, np.int64)
    partials = np.zeros(S + 1, np.int64)
    for s in range(S):
        n = load_int32(q_starts, s + 1) - load_int32(q_starts, s)
        length = load_int32(context_lens, s)
        begin = max(0, length - window) // SPLIT if window else 0
        blocks = Hk * ((n * group + ROWS - 1) // ROWS)
        stretches[s] = max(1, (length + SPLIT - 1) // SPLIT - begin) if n == 1 else 1
        items[s + 1] = items[s] + blocks * stretches[s]
        partials[s + 1] = partials[s] + (blocks * stretches[s] if stretches[s] > 1 else 0)
    partial = np.empty((partials[S], ROWS, dv + 2), np.float32)
    plan = (items, stretches, partials, partial, new_counter())
    run(pool if items[S] > 1 else 0, _work((tag, rows, keys, values, seqs, sizes, np.float32(scale), window, plan)))
    keep_alive(items)
    for s in range(S):
        if stretches[s] > 1:
            _join(rows, seqs, sizes, s, stretches[s], partial[partials[s] : partials[s + 1]])
    filled = load_int32(q_starts, S) * H * dv
    for i in range(filled, T * H * dv):
        store(np.float32(0), rows[1], i, np.float32(0))
    return 0


@device
def _check_batch(seqs: Any, sizes: Any) -> int:
    """0, or the number of the problem: kernels below trust every index."""
    S, T, _, _, _, _, P, page_size, table_pages = sizes
    q_starts, context_lens, tables, table_stride = seqs
    if load_int32(q_starts, 0) != 0 or load_int32(q_starts, S) > T:
        return 1
    for s in range(S):
        n, length = load_int32(q_starts, s + 1) - load_int32(q_starts, s), load_int32(context_lens, s)
        if n < 0:
            return 1
        if n == 0:
            continue
        pages = (length + page_size - 1) // page_size
        if length < n or pages > table_pages:
            return 2
        for i in range(pages):
            page = load_int32(tables, s * table_stride + i)
            if page < 0 or page >= P:
                return 3
    return 0


@worker
def _work(arguments: Any) -> None:
    """Take items until none is left."""
    tag, rows, keys, values, seqs, sizes, scale, window, plan = arguments
    items, stretches, partials, partial, shared = plan
    S, _, H, Hk, d, dv, _, _, _ = sizes
    group = H // Hk
    q = np.empty((ROWS, d), np.float32)
    scores = np.empty((ROWS, KEYS), np.float32)
    # Each row: dv sums, then the largest score and the sum of weights.
    part, total = np.empty((ROWS, dv + 2), np.float32), np.empty((ROWS, dv + 2), np.float32)
    s = 0
    while True:
        item = fetch_add(shared, 1)
        if item >= items[S]:
            break
        while item >= items[s + 1]:
            s += 1
        start = load_int32(seqs[0], s)
        n, length = load_int32(seqs[0], s + 1) - start, load_int32(seqs[1], s)
        index = item - items[s]
        block, stretch = index // stretches[s], index % stretches[s]
        head, first_row = block % Hk, block // Hk * ROWS
        count = min(ROWS, n * group - first_row)
        for m in range(count):
            token, h = start + (first_row + m) // group, head * group + (first_row + m) % group
            for i in range(d):
                q[m, i] = load(np.float32(0), rows[0], (token * H + h) * d + i) * scale
        # Positions of the block's first and last query bound the keys that it sees.
        first = length - n + first_row // group
        last = length - n + (first_row + count - 1) // group
        low = max(0, first - window + 1) if window else 0
        begin, end = low // SPLIT, last // SPLIT + 1
        if stretches[s] > 1:
            begin += stretch
            end = begin + 1
        for i in range(begin, end):
            to = part if i > begin else total
            _attend_stretch(
                tag, keys, values, seqs, sizes, s, head, q, count, first, first_row % group, window, i * SPLIT,
                min((i + 1) * SPLIT, last + 1), scores, to,
            )  # fmt: skip
            if i > begin:
                _merge(total, part, count, dv)
        if stretches[s] > 1:
            to = partial[partials[s] + index]
            for m in range(count):
                to[m] = total[m]
        else:
            for m in range(count):
                token, h = start + (first_row + m) // group, head * group + (first_row + m) % group
                _finish(total[m], rows[1] + (token * H + h) * dv * 4, dv, rows[2], h)


@device
def _attend_stretch(
    tag: Any,
    keys: Any,
    values: Any,
    seqs: Any,
    sizes: Any,
    s: int,
    head: int,
    q: Any,
    count: int,
    first: int,
    row_in_group: int,
    window: int,
    low: int,
    high: int,
    scores: Any,
    out: Any,
) -> None:
    """Attention of `count` rows over the keys low..high-1, into rows of sums, largest score and sum of weights."""
    _, _, H, Hk, d, dv, _, page_size, _ = sizes
    group = H // Hk
    for m in range(count):
        for i in range(dv):
            out[m, i] = np.float32(0)
        out[m, dv], out[m, dv + 1] = np.float32(-np.inf), np.float32(0)
    if window:
        low = max(low, first - window + 1)
    key = low
    while key < high:
        # Blocks end at multiples of KEYS wherever they began, and may span pages.
        size = min(high - key, KEYS - key % KEYS)
        for m in range(0, count, TILE_M):
            tile = min(TILE_M, count - m)
            done = 0
            while done < size:
                part = min(size - done, page_size - (key + done) % page_size)
                k = _address(keys, seqs, s, head, key + done, page_size, item_size(tag))
                for j in range(0, part, TILE_R):
                    to = address_of(scores) + (m * KEYS + done + j) * 4
                    k_row, q_row = k + j * keys[3] * item_size(tag), address_of(q) + m * d * 4
                    dot_rows(tag, k_row, keys[3], min(TILE_R, part - j), q_row, d, tile, to, KEYS, d)
                done += part
            for row in range(m, m + tile):
                position = first + (row_in_group + row) // group
                visible = min(size, position + 1 - key)
                hidden = max(0, position - window + 1 - key) if window else 0
                _weigh(address_of(scores) + row * KEYS * 4, out[row], dv, hidden, visible, size)
            done = 0
            while done < size:
                part = min(size - done, page_size - (key + done) % page_size)
                v = _address(values, seqs, s, head, key + done, page_size, item_size(tag))
                mix_rows(
                    tag, v, values[3], part, address_of(scores) + (m * KEYS + done) * 4, KEYS, tile,
                    address_of(out) + m * (dv + 2) * 4, dv + 2, dv,
                )  # fmt: skip
                done += part
        key += size


@device
def _address(pages: Any, seqs: Any, s: int, head: int, key: int, page_size: int, size: int) -> int:
    """Where the key, or the value, of a position lies."""
    base, page_stride, head_stride, token_stride = pages
    page = load_int32(seqs[2], s * seqs[3] + key // page_size)
    address: int = base + (page * page_stride + head * head_stride + key % page_size * token_stride) * size
    return address


@device
def _weigh(scores: int, out: Any, dv: int, hidden: int, visible: int, size: int) -> None:
    """Turn scores hidden..visible-1 into weights, the others into 0, and scale earlier sums to the new maximum."""
    f32 = np.float32(0)
    hidden, visible = min(hidden, size), max(visible, 0)
    for j in range(hidden):
        store(f32, scores, j, f32)
    if visible < size:
        for j in range(size - visible):
            store(f32, scores + visible * 4, j, f32)
    count, first = visible - hidden, scores + hidden * 4
    if count <= 0:
        return
    before = out[dv]
    largest = np.float32(before)
    for j in range(count):
        largest = larger(largest, load(f32, first, j))
    total = f32
    for j in range(count):
        weight = exp(load(f32, first, j) - largest)
        store(f32, first, j, weight)
        total += weight
    if largest > before:
        factor = exp(before - largest) if before > -np.inf else f32
        for i in range(dv):
            out[i] *= factor
        out[dv + 1] *= factor
        out[dv] = largest
    out[dv + 1] += total


@device
def _merge(total: Any, part: Any, count: int, dv: int) -> None:
    """Join the result of the next stretch to those before it."""
    for m in range(count):
        _merge_row(total[m], part[m], dv)


@device
def _merge_row(total: Any, part: Any, dv: int) -> None:
    if part[dv + 1] == np.float32(0):
        return
    largest = max(total[dv], part[dv])
    old = exp(total[dv] - largest) if total[dv + 1] > np.float32(0) else np.float32(0)
    new = exp(part[dv] - largest)
    for i in range(dv):
        total[i] = total[i] * old + part[i] * new
    total[dv + 1] = total[dv + 1] * old + part[dv + 1] * new
    total[dv] = largest


@device
def _finish(row: Any, out: int, dv: int, sinks: int, head: int) -> None:
    """Divide by the sum of weights, in which the head's sink takes part once."""
    f32 = np.float32(0)
    largest, weight = row[dv], row[dv + 1]
    factor = np.float32(1)
    if sinks:
        sink = load(f32, sinks, head)
        top = max(largest, sink)
        factor = exp(largest - top)
        weight = weight * factor + exp(sink - top)
    for i in range(dv):
        store(f32, out, i, row[i] * factor / weight)


@device
def _join(rows: Any, seqs: Any, sizes: Any, s: int, stretches: int, partial: Any) -> None:
    """Join the stretches of a sequence that has one query."""
    _, _, H, Hk, _, dv, _, _, _ = sizes
    group = H // Hk
    token = load_int32(seqs[0], s)
    for block in range(partial.shape[0] // stretches):
        head, first_row = block % Hk, block // Hk * ROWS
        total = partial[block * stretches]
        for m in range(min(ROWS, group - first_row)):
            for i in range(1, stretches):
                _merge_row(total[m], partial[block * stretches + i, m], dv)
            h = head * group + first_row + m
            _finish(total[m], rows[1] + (token * H + h) * dv * 4, dv, rows[2], h)
