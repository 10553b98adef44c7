"""How many threads the CPU kernels and torch use."""

from __future__ import annotations

import torch

from moestro import settings

# Torch's threads keep spinning after each operator and wait for each other; the pool's yield, and wait for none. On few
# cores they are in each other's way: with another process on one of two cores, a softmax of 8 x 64 between kernels
# takes 316 us on average with two torch threads and 3 us with one (2-core Zen 4). The large work is the kernels'.
ONE_TORCH_THREAD_UP_TO = 4


def setup(num_threads: int | None = None) -> int:
    """Set the number of threads of the kernels, and of torch, for the process; returns the kernels'.

    num_threads: None takes settings.num_threads(). Without Numba all work is torch's, and so are all threads.
    """
    count = num_threads or settings.num_threads()
    try:
        from moestro.kernels.pool import POOL
    except ImportError:
        torch.set_num_threads(count)
        return count
    POOL.limit(count)
    torch.set_num_threads(1 if count <= ONE_TORCH_THREAD_UP_TO else count)
    return count
