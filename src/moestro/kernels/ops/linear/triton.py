# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
"""linear and linear_parts for NVIDIA GPUs: kernels of our own where reading the weight is all the time, cuBLAS beyond.

T tokens, K inputs, N outputs, S splits of K.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moestro.kernels.facts import Facts
from moestro.kernels.gpu import INTERPRETED, num_sms, pdl, supports_plain
from moestro.kernels.ops.linear import check
from moestro.kernels.summands import Summands
from moestro.quant.formats import Weight

# From here on cuBLAS is as fast.
LIBRARY_TOKENS = 65


def supports(facts: Facts) -> tuple[bool, str]:
    return supports_plain(facts)


def best_chunk(size: int) -> int:
    """The power of two that covers `size` in steps with the least beyond it; the largest such up to 4096."""
    if size < 256:
        return triton.next_power_of_2(size)  # type: ignore[no-any-return]
    return min((4096, 2048, 1024, 512, 256), key=lambda chunk: triton.cdiv(size, chunk) * chunk)


def _gemv_tiles(N: int, K: int, sms: int) -> dict[str, int]:
    """BN rows of BK inputs in registers at a time (64 values a thread), TILES times BN rows a block."""
    BK = best_chunk(K)
    BN = max(1, min(16, 8192 // BK))
    return {"BN": BN, "BK": BK, "TILES": max(1, min(4, N // (BN * 4 * sms))), "num_warps": 4}


def _dot_tiles(T: int, N: int, K: int, sms: int, may_split: bool) -> dict[str, int]:
    """BN rows of the weight by BT tokens a block; SPLITS of K where whole rows would leave multiprocessors idle."""
    BT = max(16, triton.next_power_of_2(T))
    BK = 64 if BT == 64 or K % 128 else 128
    BN = 64 if may_split or triton.cdiv(N, 64) >= sms else 32
    splits = 1
    while may_split and splits < 8 and triton.cdiv(N, BN) * splits < 0.9 * sms and 512 * splits <= K:
        splits *= 2
    return {"BN": BN, "BT": BT, "BK": BK, "SPLITS": splits, "num_warps": 4, "num_stages": 5 if BK == 64 else 4}


def linear(
    x_TK: torch.Tensor, weight: Weight, bias_N: torch.Tensor | None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    check(x_TK, weight, bias_N)
    (T, K), N = x_TK.shape, weight.shape[0]
    out_dtype = out_dtype or x_TK.dtype
    if not _has_kernel(x_TK, weight):
        return library_linear(x_TK, weight.data, bias_N, out_dtype)
    # Few rows of a large K: one block a row tile would leave most of the GPU idle, two kernels do not.
    if T > 1 and K >= 4096 and triton.cdiv(N, 32) < num_sms(x_TK.device):
        parts_STN = _split(x_TK, weight.data, bias_N)
        y_TN = torch.empty(T, N, dtype=out_dtype, device=x_TK.device)
        _sum_kernel[(triton.cdiv(T * N, 1024),)](
            parts_STN, y_TN, T * N, S=parts_STN.shape[0], BLOCK=1024, num_warps=4, **pdl(x_TK)
        )
        return y_TN
    y_1TN = torch.empty(1, T, N, dtype=out_dtype, device=x_TK.device)
    if T == 1:
        _gemv(x_TK, weight.data, bias_N, y_1TN)
    else:
        _dot(x_TK, weight.data, bias_N, y_1TN, _dot_tiles(T, N, K, num_sms(x_TK.device), may_split=False))
    return y_1TN[0]


def linear_parts(x_TK: torch.Tensor, weight: Weight, bias_N: torch.Tensor | None) -> torch.Tensor | Summands:
    check(x_TK, weight, bias_N)
    if not _has_kernel(x_TK, weight):
        return library_linear(x_TK, weight.data, bias_N, x_TK.dtype)
    if x_TK.shape[0] == 1:
        y_1TN = torch.empty(1, 1, weight.shape[0], dtype=torch.float32, device=x_TK.device)
        _gemv(x_TK, weight.data, bias_N, y_1TN)
        return Summands(y_1TN)
    return Summands(_split(x_TK, weight.data, bias_N))


def library_linear(
    x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """PyTorch's product, with an output in float32 that was not rounded before."""
    if x_TK.dtype == weight_NK.dtype == out_dtype:
        return F.linear(x_TK, weight_NK, None if bias_N is None else bias_N.to(out_dtype))
    if x_TK.is_cuda and x_TK.dtype == weight_NK.dtype and out_dtype == torch.float32 and x_TK.shape[0]:
        y_TN = torch.mm(x_TK, weight_NK.T, out_dtype=torch.float32)
    else:
        y_TN = x_TK.float() @ weight_NK.float().T
    if bias_N is not None:
        y_TN = y_TN + bias_N.float()
    return y_TN.to(out_dtype)


def _has_kernel(x_TK: torch.Tensor, weight: Weight) -> bool:
    """16-bit numbers, few tokens."""
    return 0 < x_TK.shape[0] < LIBRARY_TOKENS and x_TK.dtype == weight.data.dtype != torch.float32


def _gemv(x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, y_1TN: torch.Tensor) -> None:
    N, K = weight_NK.shape
    tiles = _gemv_tiles(N, K, num_sms(x_TK.device))
    grid = (triton.cdiv(N, tiles["BN"] * tiles["TILES"]),)
    _gemv_kernel[grid](x_TK.contiguous(), weight_NK, bias_N, y_1TN, N=N, K=K, **tiles, **pdl(x_TK))


def _split(x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> torch.Tensor:
    """The product as float32 summands [S, T, N], the bias in the first."""
    (T, K), N = x_TK.shape, weight_NK.shape[0]
    tiles = _dot_tiles(T, N, K, num_sms(x_TK.device), may_split=True)
    parts_STN = torch.empty(tiles["SPLITS"], T, N, dtype=torch.float32, device=x_TK.device)
    _dot(x_TK, weight_NK, bias_N, parts_STN, tiles)
    return parts_STN


def _dot(
    x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, y_STN: torch.Tensor, tiles: dict[str, int]
) -> None:
    N, K = weight_NK.shape
    grid = (triton.cdiv(N, tiles["BN"]), tiles["SPLITS"])
    _dot_kernel[grid](
        x_TK.contiguous(), weight_NK, bias_N, y_STN, x_TK.shape[0], N=N, K=K, UPCAST=INTERPRETED, **tiles, **pdl(x_TK)
    )


@triton.jit
def load_tile(pointers, rows, columns, num_rows, num_columns, WHOLE: tl.constexpr):
    """A tile of a weight that is read once; WHOLE: all of it lies inside."""
    if WHOLE:
        tile = tl.load(pointers, eviction_policy="evict_first")
    else:
        inside = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
        tile = tl.load(pointers, mask=inside, other=0.0, eviction_policy="evict_first")
    return tile


@triton.jit
def _gemv_kernel(
    x, weight, bias, y, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TILES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A block: TILES times BN outputs of one token; each step's weights are requested before the step before is summed.

    The first step's are requested before the wait for x.
    """
    n = tl.program_id(0) * (BN * TILES) + tl.arange(0, BN)
    k = tl.arange(0, BK)
    CHUNKS: tl.constexpr = (K + BK - 1) // BK
    WHOLE: tl.constexpr = N % (BN * TILES) == 0 and K % BK == 0
    weight += tl.program_id(0).to(tl.int64) * (BN * TILES * K)
    row = tl.arange(0, BN)
    ahead = load_tile(weight + row[:, None] * K + k[None, :], n, k, N, K, WHOLE)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros((BN, BK), tl.float32)
    for step in tl.static_range(TILES * CHUNKS):
        tile = ahead
        at = (step % CHUNKS) * BK + k
        if step + 1 < TILES * CHUNKS:
            next_row = (step + 1) // CHUNKS * BN + row
            next_k = (step + 1) % CHUNKS * BK + k
            next_n = (step + 1) // CHUNKS * BN + n
            ahead = load_tile(weight + next_row[:, None] * K + next_k[None, :], next_n, next_k, N, K, WHOLE)
        values = tl.load(x + at, mask=at < K, other=0.0).to(tl.float32)
        total += tile.to(tl.float32) * values[None, :]
        if (step + 1) % CHUNKS == 0:
            outputs = step // CHUNKS * BN + n
            result = tl.sum(total, 1)
            if bias is not None:
                result += tl.load(bias + outputs, mask=outputs < N, other=0.0).to(tl.float32)
            tl.store(y + outputs, result.to(y.dtype.element_ty), mask=outputs < N)
            total = tl.zeros((BN, BK), tl.float32)


@triton.jit(do_not_specialize=["T"])
def _dot_kernel(
    x, weight, bias, y, T, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    SPLITS: tl.constexpr, UPCAST: tl.constexpr, PDL: tl.constexpr, num_stages: tl.constexpr,
):  # fmt: skip
    """Block (i, s): BN outputs of all T <= BT tokens over slice s of K. The weight is the operand with BN rows."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    s = tl.program_id(1)
    t = tl.arange(0, BT)
    k = tl.arange(0, BK)
    SLICE: tl.constexpr = ((K + BK * SPLITS - 1) // (BK * SPLITS)) * BK
    WHOLE: tl.constexpr = N % BN == 0 and K % BK == 0
    row = weight + n.to(tl.int64)[:, None] * K
    acc = tl.zeros((BN, BT), tl.float32)
    for start in tl.range(s * SLICE, min(K, (s + 1) * SLICE), BK, num_stages=num_stages):
        at = start + k
        tile = load_tile(row + at[None, :], n, at, N, K, WHOLE)
        inside = (t < T)[None, :] if WHOLE else (t < T)[None, :] & (at < K)[:, None]
        values = tl.load(x + t[None, :] * K + at[:, None], mask=inside, other=0.0)
        if UPCAST:
            tile, values = tile.to(tl.float32), values.to(tl.float32)
        acc = tl.dot(tile, values, acc)
    if bias is not None:
        if s == 0:
            acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    at = y + s * T * N + t[None, :] * N + n[:, None]
    tl.store(at, acc.to(y.dtype.element_ty), mask=(t < T)[None, :] & (n < N)[:, None])


@triton.jit(do_not_specialize=["size"])
def _sum_kernel(parts, y, size, S: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """A block: BLOCK numbers of the sum of S parts."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for s in tl.static_range(S):
        total += tl.load(parts + s * size + i, mask=i < size, other=0.0)
    tl.store(y + i, total.to(y.dtype.element_ty), mask=i < size)
