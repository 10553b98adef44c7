"""How many threads the CPU kernels and torch use: one number for both."""

from __future__ import annotations

import torch

from moestro import settings


def setup(num_threads: int | None = None) -> int:
    """Set the number of threads of torch and of the kernels' pool, for the process; returns it.

    num_threads: None takes settings.num_threads().
    """
    count = num_threads or settings.num_threads()
    torch.set_num_threads(count)
    try:
        from moestro.kernels.pool import POOL
    except ImportError:  # without Numba the reference kernels run, on torch's threads
        return count
    POOL.limit(count)
    return count
