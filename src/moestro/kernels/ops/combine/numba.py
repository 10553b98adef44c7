"""combine for the CPU: tokens in parallel, each summed in the order of its choices."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from moestro.errors import KernelError
from moestro.kernels.facts import Facts
from moestro.kernels.jit import float32_input, kernel, supports_formats
from moestro.kernels.memory import address_of, fetch_add, keep_alive, load, load_int32, load_int64, new_counter, store
from moestro.kernels.ops.combine import check
from moestro.kernels.pool import POOL, run, worker

# Below this many values to add, waking the threads costs more than they save.
SERIAL_VALUES = 64 * 1024


def supports(facts: Facts) -> tuple[bool, str]:
    return supports_formats(facts, ("",))


def combine(y_RD: torch.Tensor, order_R: torch.Tensor, weights_TK: torch.Tensor, num_tokens: int) -> torch.Tensor:
    check(y_RD, order_R, weights_TK, num_tokens)
    y_RD = float32_input("combine", "y", y_RD)
    order_R, weights_TK = order_R.contiguous(), weights_TK.contiguous()
    R, D = y_RD.shape
    K = weights_TK.shape[1]
    out_TD = torch.empty(num_tokens, D)
    pool = POOL.address if R * D > SERIAL_VALUES else 0
    ok = _combine(
        pool, y_RD.data_ptr(), order_R.data_ptr(), weights_TK.data_ptr(), out_TD.data_ptr(), R, D, num_tokens, K
    )
    if not ok:
        raise KernelError(
            f"combine: order holds values outside 0..{num_tokens * K - 1}, the pairs of {num_tokens} tokens"
        )
    return out_TD


@kernel
def _combine(pool: int, y: int, order: int, weights: int, out: int, R: int, D: int, T: int, K: int) -> bool:
    rows = np.full(T * K, -1, np.int64)
    for r in range(R):
        pair = load_int32(order, r)
        if pair < 0 or pair >= T * K:
            return False
        rows[pair] = r
    run(pool, _sum_tokens((y, address_of(rows), weights, out, D, K, T, new_counter())))
    keep_alive(rows)
    return True


@worker
def _sum_tokens(arguments: Any) -> None:
    y, rows, weights, out, D, K, T, shared = arguments
    f32 = np.float32(0)
    while True:
        t = fetch_add(shared, 1)
        if t >= T:
            break
        to = out + t * D * 4
        for d in range(D):
            store(f32, to, d, f32)
        for k in range(K):
            r = load_int64(rows, t * K + k)
            if r >= 0:
                weight, source = load(f32, weights, t * K + k), y + r * D * 4
                for d in range(D):
                    store(f32, to, d, load(f32, to, d) + weight * load(f32, source, d))
