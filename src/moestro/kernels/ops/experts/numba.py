"""experts_mlp for the CPU: one job for gate, up and activation of all experts, one for down.

A thread takes a chunk of one expert's weight rows at a time and passes all rows of that expert over it. So a single
expert, or eight with a row each, occupy all threads, and a thread that was held up does less.

R rows sorted by expert, E experts, D width, F expert width.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from moestro.kernels.facts import Facts
from moestro.kernels.jit import TAGS, device, float32_address, float32_input, kernel, supports_formats
from moestro.kernels.memory import (
    address_of,
    fetch_add,
    item_size,
    keep_alive,
    load,
    load_int32,
    load_int64,
    new_counter,
    store,
)
from moestro.kernels.ops.experts import ExpertWeights, bad_offsets, check
from moestro.kernels.pool import POOL, num_workers, run, worker
from moestro.kernels.scalar import sigmoid
from moestro.kernels.tile import TILE_M, TILE_R, dot_rows
from moestro.quant.formats import Weight
from moestro.spec.fields import Activation

# Weight bytes in a chunk: stays in a thread's cache while the rows pass over it, and keeps the last chunks short.
CHUNK_BYTES = 64 * 1024


def supports(facts: Facts) -> tuple[bool, str]:
    return supports_formats(facts)


def experts_mlp(
    x_RD: torch.Tensor, offsets_E1: torch.Tensor, experts: ExpertWeights, activation: Activation, limit: float | None
) -> torch.Tensor:
    check(x_RD, offsets_E1, experts, activation, limit)
    x_RD = float32_input("experts_mlp", "x", x_RD)
    gate_up_bias, _keep_gate_up = float32_address(experts.gate_up_bias_E2F)
    down_bias, _keep_down = float32_address(experts.down_bias_ED)
    y_RD, rows = run_experts(
        x_RD,
        offsets_E1.contiguous().data_ptr(),
        experts.num_experts,
        experts.gate_up,
        experts.down,
        gate_up_bias,
        down_bias,
        activation,
        limit,
    )
    if rows != x_RD.shape[0]:
        raise bad_offsets(offsets_E1.tolist(), x_RD.shape[0])
    return y_RD


def run_experts(
    x_RD: torch.Tensor,
    offsets: int,
    num_experts: int,
    gate_up: Weight,
    down: Weight,
    gate_up_bias: int,
    down_bias: int,
    activation: Activation,
    limit: float | None,
) -> tuple[torch.Tensor, int]:
    """The MLP of one or many experts on checked arguments; offsets and biases are addresses, 0 for none.

    Without offsets all rows belong to expert 0. Returns y [R, D] and R, or -1 when the offsets are not R rows in order.
    """
    R, D = x_RD.shape
    w1, w2 = gate_up.data, down.data
    F = w2.shape[-1]
    h_RF = torch.empty(R, F)
    y_RD = torch.empty(R, D)
    rows = _experts(
        POOL.address,
        TAGS[w1.dtype],
        TAGS[w2.dtype],
        x_RD.data_ptr(),
        offsets,
        num_experts,
        w1.data_ptr(),
        w2.data_ptr(),
        gate_up_bias,
        down_bias,
        h_RF.data_ptr(),
        y_RD.data_ptr(),
        R,
        D,
        F,
        activation == "swiglu_clamped",
        0.0 if limit is None else float(limit),
    )
    return y_RD, rows


@kernel
def _experts(
    pool: int,
    tag1: Any,
    tag2: Any,
    x: int,
    offsets: int,
    E: int,
    w1: int,
    w2: int,
    bias1: int,
    bias2: int,
    h: int,
    y: int,
    R: int,
    D: int,
    F: int,
    clamped: bool,
    limit: float,
) -> int:
    starts = np.empty(E + 1, np.int64)
    starts[0], starts[E] = 0, R
    if offsets:
        for e in range(E + 1):
            starts[e] = load_int32(offsets, e)
            if starts[e] < (starts[e - 1] if e else 0):
                return -1
        if starts[0] != 0 or starts[E] != R:
            return -1
    touched = np.empty(min(E, R) + 1, np.int64)
    count = 0
    for e in range(E):
        if starts[e + 1] > starts[e]:
            touched[count] = e
            count += 1
    experts = (address_of(starts), address_of(touched), count)
    workers = num_workers(pool)
    groups = (F + TILE_R - 1) // TILE_R
    chunk = _groups_in_chunk(2 * TILE_R * D * item_size(tag1), groups, workers)
    share = (new_counter(), groups, chunk)
    run(pool, _gate_up_work((tag1, x, w1, bias1, h, D, F, clamped, np.float32(limit), experts, share)))
    groups = (D + TILE_R - 1) // TILE_R
    chunk = _groups_in_chunk(TILE_R * F * item_size(tag2), groups, workers)
    share = (new_counter(), groups, chunk)
    run(pool, _down_work((tag2, h, w2, bias2, y, D, F, experts, share)))
    keep_alive(starts)
    keep_alive(touched)
    return R


@device
def _groups_in_chunk(group_bytes: int, groups: int, workers: int) -> int:
    return min(max(1, CHUNK_BYTES // group_bytes), (groups + workers - 1) // workers)


@worker
def _gate_up_work(arguments: Any) -> None:
    """h = act(gate, up) for chunks of F; gate and up of one chunk lie side by side in a scratch of this thread."""
    tag, x, w, bias, h, D, F, clamped, limit, (starts, touched, count), (shared, groups, chunk) = arguments
    row_bytes = D * item_size(tag)
    stride = chunk * TILE_R
    scratch = np.empty(2 * TILE_M * stride, np.float32)
    gate, up = address_of(scratch), address_of(scratch) + TILE_M * stride * 4
    chunks = (groups + chunk - 1) // chunk
    while True:
        item = fetch_add(shared, 1)
        if item >= count * chunks:
            break
        e = load_int64(touched, item // chunks)
        begin, end = load_int64(starts, e), load_int64(starts, e + 1)
        first = (item % chunks) * chunk
        last = min(first + chunk, groups)
        f0, f1 = first * TILE_R, min(last * TILE_R, F)
        for r in range(begin, end, TILE_M):
            rows = min(TILE_M, end - r)
            for group in range(first, last):
                f = group * TILE_R
                size = min(TILE_R, F - f)
                for half in range(2):
                    w_rows = w + (e * 2 * F + half * F + f) * row_bytes
                    to = gate + (half * TILE_M * stride + f - f0) * 4
                    dot_rows(tag, w_rows, D, size, x + r * D * 4, D, rows, to, stride, D)
            for m in range(rows):
                gate_row, up_row = gate + m * stride * 4, up + m * stride * 4
                if bias:
                    _add(gate_row, bias + (e * 2 * F + f0) * 4, f1 - f0)
                    _add(up_row, bias + (e * 2 * F + F + f0) * 4, f1 - f0)
                _activate(gate_row, up_row, h + ((r + m) * F + f0) * 4, f1 - f0, clamped, limit)
    keep_alive(scratch)


@device
def _add(y: int, bias: int, count: int) -> None:
    for i in range(count):
        store(np.float32(0), y, i, load(np.float32(0), y, i) + load(np.float32(0), bias, i))


@device
def _activate(gate: int, up: int, h: int, count: int, clamped: bool, limit: np.float32) -> None:
    f32, one = np.float32(0), np.float32(1)
    if clamped:
        for i in range(count):
            g = min(load(f32, gate, i), limit)
            u = min(max(load(f32, up, i), -limit), limit)
            store(f32, h, i, (u + one) * g * sigmoid(np.float32(1.702) * g))
    else:
        for i in range(count):
            g = load(f32, gate, i)
            store(f32, h, i, g * sigmoid(g) * load(f32, up, i))


@worker
def _down_work(arguments: Any) -> None:
    tag, h, w, bias, y, D, F, (starts, touched, count), (shared, groups, chunk) = arguments
    row_bytes = F * item_size(tag)
    chunks = (groups + chunk - 1) // chunk
    while True:
        item = fetch_add(shared, 1)
        if item >= count * chunks:
            break
        e = load_int64(touched, item // chunks)
        begin, end = load_int64(starts, e), load_int64(starts, e + 1)
        first = (item % chunks) * chunk
        last = min(first + chunk, groups)
        d0, d1 = first * TILE_R, min(last * TILE_R, D)
        for r in range(begin, end, TILE_M):
            rows = min(TILE_M, end - r)
            for group in range(first, last):
                d = group * TILE_R
                w_rows, y_rows = w + (e * D + d) * row_bytes, y + (r * D + d) * 4
                dot_rows(tag, w_rows, F, min(TILE_R, D - d), h + r * F * 4, F, rows, y_rows, D, F)
            if bias:
                for m in range(rows):
                    _add(y + ((r + m) * D + d0) * 4, bias + (e * D + d0) * 4, d1 - d0)
