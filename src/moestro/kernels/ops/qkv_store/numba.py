"""qkv_store for the CPU: token by token, all steps in a scratch row, then q copied out, k and v to their slot."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from moestro.kernels.facts import Facts
from moestro.kernels.jit import TAGS, device, float32_address, float32_input, kernel, supports_formats
from moestro.kernels.memory import address_of, fetch_add, item_size, keep_alive, load, load_int64, new_counter, store
from moestro.kernels.ops.attention import PagedBatch
from moestro.kernels.ops.qkv_store import QKVPlan, bad_slot, check
from moestro.kernels.pool import POOL, run, worker

# Below this many values waking the threads costs more than they save.
SERIAL_VALUES = 32 * 1024


def supports(facts: Facts) -> tuple[bool, str]:
    return supports_formats(facts)


def qkv_store(
    qkv_TN: torch.Tensor,
    plan: QKVPlan,
    cos_TR: torch.Tensor | None,
    sin_TR: torch.Tensor | None,
    batch: PagedBatch,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    check(qkv_TN, plan, cos_TR, sin_TR, batch, k_pages, v_pages, q_norm, k_norm)
    qkv_TN = float32_input("qkv_store", "qkv", qkv_TN)
    T, N = qkv_TN.shape
    q_THd = torch.empty(T, plan.num_heads, plan.head_dim)
    cos, _keep_cos = float32_address(cos_TR)
    sin, _keep_sin = float32_address(sin_TR)
    q_weight, _keep_q = float32_address(q_norm)
    k_weight, _keep_k = float32_address(k_norm)
    num_slots = k_pages.shape[0] * batch.page_size
    norm_q, norm_k = plan.norm_sizes
    bad = _store(
        POOL.address if T * N > SERIAL_VALUES else 0,
        TAGS[k_pages.dtype],
        qkv_TN.data_ptr(),
        q_THd.data_ptr(),
        batch.slots_T.data_ptr(),
        num_slots,
        batch.page_size,
        (k_pages.data_ptr(), *k_pages.stride()),
        (v_pages.data_ptr(), *v_pages.stride()),
        (T, N, plan.num_heads, plan.num_kv_heads, plan.head_dim, plan.v_head_dim),
        (cos, sin, plan.rotary_dim if cos else 0, plan.interleaved),
        (q_weight, k_weight, norm_q, norm_k, float(eps)),
        float("inf") if plan.clip is None else float(plan.clip),
    )
    if bad >= 0:
        raise bad_slot(bad, num_slots)
    return q_THd


@kernel
def _store(
    pool: int,
    tag: Any,
    qkv: int,
    q: int,
    slots: int,
    num_slots: int,
    page_size: int,
    k_pages: Any,
    v_pages: Any,
    sizes: Any,
    rope: Any,
    norms: Any,
    clip: float,
) -> int:
    """Returns a slot beyond num_slots, before anything is written, or -1."""
    for t in range(sizes[0]):
        if load_int64(slots, t) >= num_slots:
            bad: int = load_int64(slots, t)
            return bad
    shared = new_counter()
    run(pool, _tokens((tag, qkv, q, slots, page_size, k_pages, v_pages, sizes, rope, norms, np.float32(clip), shared)))
    return -1


@worker
def _tokens(arguments: Any) -> None:
    tag, qkv, q, slots, page_size, k_pages, v_pages, sizes, rope, norms, clip, shared = arguments
    f32 = np.float32(0)
    T, N, H, Hk, d, dv = sizes
    q_weight, k_weight, norm_q, norm_k, eps = norms
    scratch = np.empty(N, np.float32)
    row = address_of(scratch)
    keys, values = row + H * d * 4, row + (H + Hk) * d * 4
    while True:
        t = fetch_add(shared, 1)
        if t >= T:
            break
        for i in range(N):
            store(f32, row, i, load(f32, qkv + t * N * 4, i))
        if q_weight:
            for i in range(0, H * d, norm_q):
                _norm(row + i * 4, q_weight, norm_q, np.float32(eps))
            for i in range(0, Hk * d, norm_k):
                _norm(keys + i * 4, k_weight, norm_k, np.float32(eps))
        if clip < np.inf:
            for i in range(N):
                store(f32, row, i, min(max(load(f32, row, i), -clip), clip))
        if rope[2]:
            for h in range(H + Hk):
                _rotate(row + h * d * 4, rope, t)
        for i in range(H * d):
            store(f32, q + t * H * d * 4, i, load(f32, row, i))
        slot = load_int64(slots, t)
        if slot >= 0:
            _write(tag, keys, d, Hk, k_pages, slot // page_size, slot % page_size)
            _write(tag, values, dv, Hk, v_pages, slot // page_size, slot % page_size)
    keep_alive(scratch)


@device
def _norm(values: int, weight: int, count: int, eps: np.float32) -> None:
    f32 = np.float32(0)
    total = f32
    for i in range(count):
        total += load(f32, values, i) * load(f32, values, i)
    factor = np.float32(1) / np.sqrt(total / np.float32(count) + eps)
    for i in range(count):
        store(f32, values, i, load(f32, values, i) * factor * load(f32, weight, i))


@device
def _rotate(head: int, rope: Any, t: int) -> None:
    f32 = np.float32(0)
    cos, sin, rotary_dim, interleaved = rope
    half = rotary_dim // 2
    cos, sin = cos + t * half * 4, sin + t * half * 4
    if interleaved:
        for i in range(half):
            a, b, c, s = load(f32, head, 2 * i), load(f32, head, 2 * i + 1), load(f32, cos, i), load(f32, sin, i)
            store(f32, head, 2 * i, a * c - b * s)
            store(f32, head, 2 * i + 1, b * c + a * s)
    else:
        back = head + half * 4
        for i in range(half):
            a, b, c, s = load(f32, head, i), load(f32, back, i), load(f32, cos, i), load(f32, sin, i)
            store(f32, head, i, a * c - b * s)
            store(f32, back, i, b * c + a * s)


@device
def _write(tag: Any, rows: int, width: int, Hk: int, pages: Any, page: int, offset: int) -> None:
    base, page_stride, head_stride, token_stride, item_stride = pages
    for h in range(Hk):
        to = base + (page * page_stride + h * head_stride + offset * token_stride) * item_size(tag)
        if item_stride == 1:
            for i in range(width):
                store(tag, to, i, load(np.float32(0), rows + h * width * 4, i))
        else:
            for i in range(width):
                store(tag, to, i * item_stride, load(np.float32(0), rows + h * width * 4, i))
