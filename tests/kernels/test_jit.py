"""What all Numba kernels share: threads, the kept code, scalar functions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest
import torch

from moestro.kernels import threads
from moestro.kernels.jit import NUM_THREADS
from moestro.kernels.scalar import exp, sigmoid


@numba.njit
def _map_exp(x):  # type: ignore[no-untyped-def]
    y = np.empty_like(x)
    for i in range(len(x)):
        y[i] = exp(x[i])
    return y


@numba.njit
def _map_sigmoid(x):  # type: ignore[no-untyped-def]
    y = np.empty_like(x)
    for i in range(len(x)):
        y[i] = sigmoid(x[i])
    return y


def test_exp_is_accurate_and_bounded() -> None:
    x = np.concatenate([np.linspace(-87, 88, 100_001), np.linspace(-1, 1, 10_001)]).astype(np.float32)
    expected = np.exp(x.astype(np.float64))
    assert np.max(np.abs(_map_exp(x) - expected) / expected) < 3e-7
    ends = _map_exp(np.array([-1e30, -np.inf, 1e30, np.inf, 0.0], np.float32))
    assert ends[0] == ends[1] < 1e-37
    assert np.isfinite(ends[2:]).all()
    assert ends[4] == 1.0


def test_sigmoid() -> None:
    x = np.linspace(-100, 100, 10_001).astype(np.float32)
    np.testing.assert_allclose(_map_sigmoid(x), 1 / (1 + np.exp(-x.astype(np.float64))), rtol=3e-7, atol=1e-37)


def test_setup_limits_threads() -> None:
    before = torch.get_num_threads()
    try:
        assert threads.setup(1) == 1
        assert (torch.get_num_threads(), numba.get_num_threads()) == (1, 1)
        assert threads.setup(10_000) == NUM_THREADS
    finally:
        threads.setup(None)
        torch.set_num_threads(before)


_CHILD = """
import os, torch
from moestro.kernels.ops.linear import numba as linear
from moestro.quant.formats import Weight
tasks = lambda: len(os.listdir("/proc/self/task"))
x = torch.randn(600, 600)
x @ x
before = tasks()
linear.linear(x, Weight(x.bfloat16()), None)
linear.linear(x, Weight(x.bfloat16()), None)
hits = sum(linear._linear.stats.cache_hits.values())
print(tasks() - before, hits)
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_second_process_compiles_nothing_and_shares_torchs_threads(tmp_path: Path) -> None:
    environment = {**os.environ, "MOESTRO_CACHE": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    outputs = [
        subprocess.run(
            [sys.executable, "-c", _CHILD], env=environment, capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    ]
    assert outputs[0].split() == ["0", "0"]
    assert outputs[1].split() == ["0", "1"]


def test_unwritable_cache_still_runs(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    environment = {**os.environ, "MOESTRO_CACHE": str(blocker), "PYTHONPATH": os.pathsep.join(sys.path)}
    code = (
        "import logging; logging.basicConfig()\n"
        "import torch; from moestro.kernels.ops.sort_by_expert import numba\n"
        "print(numba.sort_by_expert(torch.tensor([[1, 0]], dtype=torch.int32), 2)[1].tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[1, 0]"
    assert "compiled kernels are not kept" in done.stderr
