"""Scalar functions for Numba kernels, in a form that the vectoriser turns into vector code."""

from __future__ import annotations

from typing import Any

import numpy as np

from moestro.kernels.jit import exact_device
from moestro.kernels.memory import float_from_bits

_LOG2E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_LOWEST, _HIGHEST = np.float32(-87.0), np.float32(88.0)


@exact_device
def exp(x: Any) -> Any:
    """e^x in float32 to 2 units in the last place, x held within -87..88 (the Cephes library's method)."""
    x = min(max(x, _LOWEST), _HIGHEST)
    n = np.floor(x * _LOG2E + np.float32(0.5))
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    return p * float_from_bits(np.int32((np.int32(n) + np.int32(127)) << np.int32(23)))


@exact_device
def sigmoid(x: Any) -> Any:
    return np.float32(1.0) / (np.float32(1.0) + exp(-x))
