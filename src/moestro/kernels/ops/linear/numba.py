"""linear for the CPU: register tiles over the weight in its own format, for one row as for thousands.

No BLAS even for many rows: bfloat16 14336 x 4096 at 512 rows takes 278 ms here and, as float32, 346 ms in MKL; at 8
rows 5.7 ms and 33.6 ms (2-core Zen 4, benchmarks/cpu_kernels.py). And a row's result does not depend on the others.

T tokens, K inputs, N outputs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from moestro.errors import KernelError
from moestro.kernels.facts import Facts
from moestro.kernels.jit import TAGS, float32_address, float32_input, kernel, supports_formats
from moestro.kernels.memory import fetch_add, item_size, load, new_counter, store
from moestro.kernels.ops.linear import check
from moestro.kernels.pool import POOL, num_workers, run, worker
from moestro.kernels.tile import TILE_M, TILE_R, dot_rows
from moestro.quant.formats import Weight

# Weight bytes handed to a thread at a time: stays in its cache while all rows pass over it.
CHUNK_BYTES = 64 * 1024


def supports(facts: Facts) -> tuple[bool, str]:
    return supports_formats(facts)


def linear(
    x_TK: torch.Tensor, weight: Weight, bias_N: torch.Tensor | None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    check(x_TK, weight, bias_N)
    if out_dtype not in (None, torch.float32):
        raise KernelError(f"linear: out_dtype={out_dtype}; the kernels for the CPU give float32")
    x_TK = float32_input("linear", "x", x_TK)
    T, K = x_TK.shape
    data = weight.data
    N = data.shape[0]
    y_TN = torch.empty(T, N)
    bias, _keep = float32_address(bias_N)
    if T:
        _linear(POOL.address, TAGS[data.dtype], x_TK.data_ptr(), data.data_ptr(), bias, y_TN.data_ptr(), T, N, K)
    return y_TN


def linear_parts(x_TK: torch.Tensor, weight: Weight, bias_N: torch.Tensor | None) -> torch.Tensor:
    return linear(x_TK, weight, bias_N)


@kernel
def _linear(pool: int, tag: Any, x: int, w: int, bias: int, y: int, T: int, N: int, K: int) -> None:
    shared = new_counter()
    groups = (N + TILE_R - 1) // TILE_R
    workers = num_workers(pool)
    chunk = min(max(1, CHUNK_BYTES // (TILE_R * K * item_size(tag))), (groups + workers - 1) // workers)
    run(pool, _work((tag, x, w, bias, y, T, N, K, shared, groups, chunk)))


@worker
def _work(arguments: Any) -> None:
    """Take chunks of weight rows until none is left, so that a thread that was held up does less."""
    tag, x, w, bias, y, T, N, K, shared, groups, chunk = arguments
    row_bytes = K * item_size(tag)
    while True:
        first = fetch_add(shared, chunk)
        if first >= groups:
            break
        last = min(first + chunk, groups)
        for t in range(0, T, TILE_M):
            rows = min(TILE_M, T - t)
            for group in range(first, last):
                n = group * TILE_R
                dot_rows(
                    tag, w + n * row_bytes, K, min(TILE_R, N - n), x + t * K * 4, K, rows, y + (t * N + n) * 4, N, K
                )
        if bias:
            for t in range(T):
                for n in range(first * TILE_R, min(last * TILE_R, N)):
                    store(np.float32(0), y, t * N + n, load(np.float32(0), y, t * N + n) + load(np.float32(0), bias, n))
