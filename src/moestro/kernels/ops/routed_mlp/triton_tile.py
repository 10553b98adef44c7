# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
"""What the experts' kernels share: reading a tile of a weight, and the activation."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def weight_tile(base, rows, columns, N: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr):
    """Rows by columns of a weight [N, K] that is read once. EVEN: both sizes are whole numbers of tiles."""
    at = base + rows[:, None] * K + columns[None, :]
    if EVEN:
        return tl.load(at, eviction_policy="evict_first")
    else:
        return tl.load(at, mask=(rows < N)[:, None] & (columns < K)[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def activate(gate, up, limit, CLAMPED: tl.constexpr):
    """silu(gate) * up, or gpt-oss's clamped form."""
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        return (up + 1.0) * gate / (1.0 + tl.exp(-1.702 * gate))
    else:
        return gate / (1.0 + tl.exp(-gate)) * up
