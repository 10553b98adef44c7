"""What this machine can do at best: the limits that the benchmarks compare with."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from moestro import settings


def num_threads() -> int:
    return settings.num_threads()


def read_bandwidth(num_bytes: int = 1 << 30, times: int = 5) -> float:
    """Bytes a second of reading memory once, all threads, best of several: a float32 sum over far more than the caches
    hold.
    """
    torch.set_num_threads(num_threads())
    data = torch.ones(num_bytes // 4)
    return num_bytes / _best(lambda: data.sum(), times)


def gemm_rate(size: int = 1024, times: int = 10) -> float:
    """Float32 operations a second of a square matrix product, all threads, best of several."""
    torch.set_num_threads(num_threads())
    a, b = torch.rand(size, size), torch.rand(size, size)
    return 2 * size**3 / _best(lambda: a @ b, times)


def _best(work: Callable[[], object], times: int) -> float:
    work()
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
