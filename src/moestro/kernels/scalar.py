"""Scalar functions for Numba kernels, in a form that the vectoriser turns into vector code."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types

from moestro.kernels.jit import exact_device, intrinsic
from moestro.kernels.memory import F32, power_of_two

_LOG2E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_LOWEST, _HIGHEST = np.float32(-87.0), np.float32(88.0)


@exact_device
def exp(x: Any) -> Any:
    """e^x in float32 to 2 units in the last place, x held within -87..88 (the Cephes library's method)."""
    given = x
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
    power = p * power_of_two(n)
    return power if given == given else given


@intrinsic
def larger(typingctx: Any, a: Any, b: Any) -> Any:
    """The larger of two float32, either of them when one is NaN; in this form the vectoriser takes maxima of rows."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(F32, [F32, F32]), "llvm.maxnum.f32")
        return builder.call(function, args, fastmath=("nnan", "nsz"))

    return types.float32(types.float32, types.float32), codegen


@exact_device
def sigmoid(x: Any) -> Any:
    return np.float32(1.0) / (np.float32(1.0) + exp(-x))
