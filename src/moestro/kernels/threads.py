"""How many threads the CPU kernels and torch use: one number, and one pool for both.

Numba's OpenMP layer runs on the libgomp that torch loaded, so a kernel after a torch operator wakes the same, still
spinning threads: 171 us for a product and a kernel in turn, 169 us apart; with Numba's own pool (workqueue) 246 us
(2-core Zen 4). libgomp's default wait policy stays: with OMP_WAIT_POLICY=passive a call of a small kernel takes
20-130 us in place of 6.
"""

from __future__ import annotations

import logging

import torch

from moestro import settings
from moestro.logs import log_once


def setup(num_threads: int | None = None) -> int:
    """Set the number of threads that torch and the kernels use when called from this thread; returns it.

    num_threads: None takes settings.num_threads(), which is also the most the kernels' pool can have; more is cut, and
    said so.
    """
    most = settings.num_threads()
    count = num_threads or most
    if count > most:
        log_once(f"num_threads={count} is cut to {most}; raise MOESTRO_NUM_THREADS for more", logging.WARNING)
        count = most
    torch.set_num_threads(count)
    try:
        from moestro.kernels import jit
    except ImportError:  # without Numba the reference kernels run, on torch's threads
        return count
    jit.numba.set_num_threads(count)
    return count
