# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
"""rms_norm, add_rms_norm_ and add_rms_norm_logits_ for NVIDIA GPUs: a row of the residual stays in one block.

T tokens, D width, E experts, S parts that add up to what a layer gives.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moestro.errors import KernelError
from moestro.kernels.checks import require_shape
from moestro.kernels.facts import Facts
from moestro.kernels.gpu import num_sms, pdl, supports_plain
from moestro.kernels.ops.linear.triton import library_linear
from moestro.kernels.ops.norm import check
from moestro.kernels.summands import Summands
from moestro.quant.formats import Weight

# More tokens than this: the row is not computed again for each slice of the router, whose product is the library's.
FUSED_LOGITS_TOKENS = 32


def supports(facts: Facts) -> tuple[bool, str]:
    return supports_plain(facts)


def _tiles(T: int, D: int, E: int, sms: int) -> dict[str, int]:
    """BLOCK_D: a row; BE, TILES: experts whose router rows are in registers at a time, and how often a block takes so
    many.
    """
    BLOCK_D = triton.next_power_of_2(D)
    num_warps = 4 if BLOCK_D <= 4096 else 8
    BE = max(1, min(triton.next_power_of_2(E), num_warps * 2048 // BLOCK_D))
    slices = triton.cdiv(E, BE)
    tiles = max(1, min(slices, slices * T // (4 * sms)))
    return {"BLOCK_D": BLOCK_D, "BE": BE, "TILES": tiles, "num_warps": num_warps}


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    check("rms_norm", x_TD, weight_D)
    if x_TD.stride(-1) != 1:
        x_TD = x_TD.contiguous()
    (T, D), y_TD = x_TD.shape, torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    if T:
        block, num_warps = _row_block(D)
        _norm_kernel[(T,)](
            x_TD, x_TD.stride(0), weight_D, eps, y_TD, D=D, BLOCK_D=block, num_warps=num_warps, **pdl(x_TD)
        )
    return y_TD


def add_rms_norm_(
    residual_TD: torch.Tensor, x: torch.Tensor | Summands, scale: float, weight_D: torch.Tensor, eps: float
) -> torch.Tensor:
    added = _checked("add_rms_norm_", residual_TD, x, weight_D)
    T, D = residual_TD.shape
    y_TD = torch.empty(T, D, dtype=residual_TD.dtype, device=residual_TD.device)
    if T:
        block, num_warps = _row_block(D)
        _add_norm_kernel[(T,)](
            residual_TD, *added, scale, weight_D, eps, y_TD, D=D, BLOCK_D=block,
            S=added[0].shape[0], num_warps=num_warps, **pdl(residual_TD),
        )  # fmt: skip
    return y_TD


def add_rms_norm_logits_(
    residual_TD: torch.Tensor,
    x: torch.Tensor | Summands,
    scale: float,
    weight_D: torch.Tensor,
    eps: float,
    router: Weight,
    router_bias_E: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    (T, D), E = residual_TD.shape, router.shape[0]
    require_shape("add_rms_norm_logits_", "router", router, (E, D))
    if T == 0 or T > FUSED_LOGITS_TOKENS:
        y_TD = add_rms_norm_(residual_TD, x, scale, weight_D, eps)
        return y_TD, library_linear(y_TD, router.data, router_bias_E, torch.float32)
    added = _checked("add_rms_norm_logits_", residual_TD, x, weight_D)
    y_TD = torch.empty(T, D, dtype=residual_TD.dtype, device=residual_TD.device)
    logits_TE = torch.empty(T, E, dtype=torch.float32, device=residual_TD.device)
    tiles = _tiles(T, D, E, num_sms(residual_TD.device))
    grid = (triton.cdiv(E, tiles["BE"] * tiles["TILES"]), T)
    _add_norm_logits_kernel[grid](
        residual_TD, *added, scale, weight_D, eps, y_TD, router.data, router_bias_E, logits_TE,
        _arrivals(residual_TD.device), D=D, E=E, S=added[0].shape[0], **tiles, **pdl(residual_TD),
    )  # fmt: skip
    return y_TD, logits_TE


def _row_block(D: int) -> tuple[int, int]:
    """(elements of a block, warps) for one row."""
    block = triton.next_power_of_2(D)
    return block, max(1, min(16, block // 512))


def _checked(
    op: str, residual_TD: torch.Tensor, x: torch.Tensor | Summands, weight_D: torch.Tensor
) -> tuple[torch.Tensor, int, int, torch.Tensor | None, torch.Tensor | None]:
    """What is added, as the kernels take it: parts [S, T, D], its strides of S and T, weights [T, S], plus [T, D]."""
    require_shape(op, "x", x, residual_TD.shape)
    check(op, residual_TD, weight_D)
    if not residual_TD.is_contiguous():
        raise KernelError(f"{op}: the residual is written in place and must be contiguous")
    if not isinstance(x, Summands):
        x = Summands(x.unsqueeze(0))
    parts = x.parts_STD if x.parts_STD.stride(-1) == 1 else x.parts_STD.contiguous()
    weights = None if x.weights_TS is None else x.weights_TS.contiguous()
    plus = None if x.plus_TD is None else x.plus_TD.contiguous()
    return parts, parts.stride(0), parts.stride(1), weights, plus


@functools.cache
def _arrivals(device: torch.device) -> torch.Tensor:
    """How many blocks of a token have read its residual; zero between kernels, so shared by all on one stream."""
    return torch.zeros(FUSED_LOGITS_TOKENS, dtype=torch.int32, device=device)


@triton.jit
def _new_row(
    residual, parts, part_stride, token_stride, weights, plus, scale, t, d, D: tl.constexpr, S: tl.constexpr
):  # fmt: skip
    """The new residual of token t, rounded to its dtype; parts with weight 0 are not read."""
    in_row = d < D
    added = tl.zeros(d.shape, tl.float32)
    for s in tl.static_range(S):
        part = parts + s * part_stride.to(tl.int64) + t * token_stride + d
        if weights is not None:
            weight = tl.load(weights + t * S + s)
            added += weight * tl.load(part, mask=d < tl.where(weight != 0, D, 0), other=0.0).to(tl.float32)
        else:
            added += tl.load(part, mask=in_row, other=0.0).to(tl.float32)
    if plus is not None:
        added += tl.load(plus + t * D + d, mask=in_row, other=0.0).to(tl.float32)
    old = tl.load(residual + t * D + d, mask=in_row, other=0.0)
    return (old.to(tl.float32) + scale * added).to(old.dtype)


@triton.jit
def _normed(row, gain, eps, D: tl.constexpr):
    """RMS norm in float32 of a row that is 0 beyond D."""
    row = row.to(tl.float32)
    return row * (1.0 / tl.sqrt_rn(tl.sum(row * row, 0) / D + eps)) * gain


@triton.jit(do_not_specialize=["x_stride"])
def _norm_kernel(x, x_stride, weight, eps, y, D: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr):
    """Block t: the norm of row t."""
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    gain = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.load(x + t * x_stride + d, mask=d < D, other=0.0)
    tl.store(y + t * D + d, _normed(row, gain, eps, D).to(y.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=["part_stride", "token_stride"])
def _add_norm_kernel(
    residual, parts, part_stride, token_stride, weights, plus, scale, weight, eps, y,
    D: tl.constexpr, BLOCK_D: tl.constexpr, S: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Block t: the sum of the parts into row t of the residual, and the norm of that row."""
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    gain = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = _new_row(residual, parts, part_stride, token_stride, weights, plus, scale, t, d, D, S)
    tl.store(residual + t * D + d, row, mask=d < D)
    tl.store(y + t * D + d, _normed(row, gain, eps, D).to(y.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=["part_stride", "token_stride"])
def _add_norm_logits_kernel(
    residual, parts, part_stride, token_stride, weights, plus, scale, weight, eps, y, router, router_bias, logits,
    arrivals, D: tl.constexpr, E: tl.constexpr, S: tl.constexpr, BLOCK_D: tl.constexpr, BE: tl.constexpr,
    TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Block (i, t): the new row t and its norm, as every block of the token computes it, and TILES * BE logits of it.

    Block (0, t) stores the norm. The residual is still being read by the token's other blocks, so the last to have read
    it stores it, from its own copy.
    """
    t = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    in_row = d < D
    e = tl.program_id(0) * (BE * TILES) + tl.arange(0, BE)
    gain = tl.load(weight + d, mask=in_row, other=0.0).to(tl.float32)
    rows = tl.load(router + e[:, None] * D + d[None, :], mask=(e < E)[:, None] & in_row[None, :], other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = _new_row(residual, parts, part_stride, token_stride, weights, plus, scale, t, d, D, S)
    normed = _normed(row, gain, eps, D).to(y.dtype.element_ty)
    tl.debug_barrier()
    if tl.atomic_add(arrivals + t, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(residual + t * D + d, row, mask=in_row)
        tl.store(arrivals + t, 0)
    if tl.program_id(0) == 0:
        tl.store(y + t * D + d, normed, mask=in_row)
    for i in tl.static_range(TILES):
        logit = tl.sum(rows.to(tl.float32) * normed.to(tl.float32)[None, :], 1)
        if router_bias is not None:
            logit += tl.load(router_bias + e, mask=e < E, other=0.0).to(tl.float32)
        tl.store(logits + t * E + e, logit, mask=e < E)
        if i + 1 < TILES:
            e += BE
            rows = tl.load(router + e[:, None] * D + d[None, :], mask=(e < E)[:, None] & in_row[None, :], other=0.0)
