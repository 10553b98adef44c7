"""What all Numba kernels share: the kept code and scalar functions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np

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


_CHILD = """
import torch
from moestro.kernels.ops.linear import numba as linear
from moestro.quant.formats import Weight
linear.linear(torch.randn(3, 64), Weight(torch.randn(8, 64).bfloat16()), None)
print(sum(linear._linear.stats.cache_hits.values()), sum(linear._linear.stats.cache_misses.values()))
"""


def test_second_process_compiles_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "MOESTRO_CACHE": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    outputs = [
        subprocess.run([sys.executable, "-W", "error", "-c", _CHILD], env=environment, capture_output=True, text=True)
        for _ in range(2)
    ]
    assert [out.stdout.split() for out in outputs] == [["0", "1"], ["1", "0"]], outputs[0].stderr


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
