"""The pool of threads: every share is done once, whoever comes, and nobody is waited for who does not."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from moestro.kernels import threads
from moestro.kernels.jit import kernel
from moestro.kernels.memory import address_of, fetch_add, keep_alive, load_int64, store_int64
from moestro.kernels.ops.linear import numba as linear
from moestro.kernels.pool import HELPERS, POOL, Pool, num_workers, run, worker
from moestro.quant.formats import Weight


@worker
def _count_shares(arguments: Any) -> None:
    """Count each share where it lies, and each thread that takes part."""
    seen, shares, shared, entered = arguments
    fetch_add(entered, 1)
    while True:
        share = fetch_add(shared, 1)
        if share >= shares:
            break
        store_int64(seen, share, load_int64(seen, share) + 1)


@kernel
def _count(pool, shares):  # type: ignore[no-untyped-def]
    seen = np.zeros(shares, np.int64)
    counters = np.zeros(2, np.int64)
    run(pool, _count_shares((address_of(seen), shares, address_of(counters), address_of(counters) + 8)))
    keep_alive(seen)
    keep_alive(counters)
    return seen, counters[1], num_workers(pool)


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool(4)
    yield pool
    pool.stop()


def test_every_share_is_done_once(pool: Pool) -> None:
    for jobs in range(2000):
        seen, entered, workers = _count(pool.address, 50 + jobs % 7)
        assert (seen == 1).all()
        assert workers == 4
        assert 1 <= entered <= 4


def test_helpers_take_part(pool: Pool) -> None:
    # More threads than cores, and a busy machine perhaps: so many long jobs that a helper must get its turn in one.
    assert any(_count(pool.address, 200_000)[1] > 1 for _ in range(1000))


def test_helpers_wake_after_sleeping(pool: Pool) -> None:
    _count(pool.address, 10)
    for _ in range(3):
        time.sleep(0.1)  # long enough for all helpers to lie down
        assert any(_count(pool.address, 200_000)[1] > 1 for _ in range(1000))


def test_no_pool_and_a_pool_of_one_work_alone() -> None:
    seen, entered, workers = _count(0, 9)
    assert (seen.tolist(), entered, workers) == ([1] * 9, 1, 1)
    one = Pool(1)
    assert (_count(one.address, 9)[0] == 1).all()
    one.stop()


def test_callers_from_several_threads(pool: Pool) -> None:
    """Kernels release the GIL; a second caller finds the pool taken and works alone."""
    wrong: list[int] = []

    def call() -> None:
        for i in range(500):
            if not (_count(pool.address, 100)[0] == 1).all():
                wrong.append(i)

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_limit_and_stop(pool: Pool) -> None:
    pool.limit(2)
    assert _count(pool.address, 5)[2] == 2
    pool.limit(1)
    assert all(_count(pool.address, 100)[1] == 1 for _ in range(100))
    pool.stop()
    assert (_count(pool.address, 5)[0] == 1).all()


@pytest.mark.parametrize(("count", "of_torch"), [(2, 1), (6, 6)])
def test_setup_sets_the_pool_and_torch(count: int, of_torch: int) -> None:
    before = torch.get_num_threads()
    try:
        assert threads.setup(count) == count
        assert torch.get_num_threads() == of_torch
        assert POOL._state[HELPERS] == count - 1
    finally:
        POOL.stop()
        threads.setup(None)
        torch.set_num_threads(before)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_forked_child_can_call_kernels() -> None:
    """The parent's helpers do not exist in the child; it must neither wait for them nor crash."""
    x, weight = torch.randn(2, 512), Weight(torch.randn(600, 512).bfloat16())
    expected = linear.linear(x, weight, None)
    child = os.fork()
    if child == 0:
        same = all(torch.equal(linear.linear(x, weight, None), expected) for _ in range(20))
        os._exit(0 if same else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
