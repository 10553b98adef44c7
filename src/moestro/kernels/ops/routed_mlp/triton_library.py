# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
"""The experts of a prompt: PyTorch's grouped matrix product, which is near the matrix unit's limit, between small
kernels that bring rows in order, activate, and add up.

T tokens, K top-k, P = T * K pairs, D width, F expert width, E experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moestro.kernels.gpu import pdl
from moestro.kernels.ops.experts import ExpertWeights
from moestro.kernels.ops.routed_mlp.triton_tile import activate
from moestro.kernels.ops.sort_by_expert.triton import sort_with_inverse
from moestro.kernels.summands import Summands


def can_run(x_TD: torch.Tensor, experts: ExpertWeights) -> bool:
    """The library's product takes bfloat16 on the GPU, with rows of whole 16 bytes."""
    aligned = experts.width % 8 == 0 and experts.expert_width % 8 == 0
    return x_TD.is_cuda and x_TD.dtype == torch.bfloat16 and aligned


def mlp(
    x_TD: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    experts: ExpertWeights,
    clamped: bool,
    limit: float,
) -> Summands:
    (T, K), (E, D, F) = ids_TK.shape, experts.down.shape
    P = T * K
    offsets_E1, order_P, inverse_P = sort_with_inverse(ids_TK, E)
    x_PD = x_TD.index_select(0, order_P.clamp_min(0) // K)
    ends_E = offsets_E1[1:]
    gate_up_P2F = torch._grouped_mm(x_PD, experts.gate_up.data.transpose(1, 2), offs=ends_E)
    expert_P = None
    if experts.gate_up_bias_E2F is not None or experts.down_bias_ED is not None:
        expert_P = ids_TK.flatten()
    h_PF = torch.empty(P, F, dtype=x_TD.dtype, device=x_TD.device)
    block = min(2048, triton.next_power_of_2(F))
    _activate[(P, triton.cdiv(F, block))](
        gate_up_P2F, experts.gate_up_bias_E2F, expert_P, order_P, h_PF, limit,
        F=F, CLAMPED=clamped, BLOCK=block, num_warps=4, **pdl(x_TD),
    )  # fmt: skip
    y_PD = torch._grouped_mm(h_PF, experts.down.data.transpose(1, 2), offs=ends_E)
    out_TD = torch.empty(T, D, dtype=x_TD.dtype, device=x_TD.device)
    block = min(2048, triton.next_power_of_2(D))
    _add_up[(T, triton.cdiv(D, block))](
        y_PD, experts.down_bias_ED, expert_P, inverse_P, weights_TK, out_TD,
        K=K, D=D, BLOCK=block, num_warps=4, **pdl(x_TD),
    )  # fmt: skip
    return Summands(out_TD[None])


@triton.jit
def _activate(
    gate_up, bias, experts, order, h, limit,
    F: tl.constexpr, CLAMPED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row, sorted by expert. Rows without an expert are left as they are; nothing reads them."""
    r = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    pair = tl.load(order + r)
    if pair >= 0:
        gate = tl.load(gate_up + r * (2 * F) + n, mask=n < F, other=0.0).to(tl.float32)
        up = tl.load(gate_up + r * (2 * F) + F + n, mask=n < F, other=0.0).to(tl.float32)
        if bias is not None:
            e = tl.load(experts + pair).to(tl.int64)
            gate += tl.load(bias + e * (2 * F) + n, mask=n < F, other=0.0)
            up += tl.load(bias + e * (2 * F) + F + n, mask=n < F, other=0.0)
        tl.store(h + r * F + n, activate(gate, up, limit, CLAMPED).to(h.dtype.element_ty), mask=n < F)


@triton.jit
def _add_up(
    y, bias, experts, inverse, weights, out,
    K: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The weighted sum of one token's rows, in the order of its choices."""
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(K):
        row = tl.load(inverse + t * K + i).to(tl.int64)
        has = row >= 0
        value = tl.load(y + row * D + n, mask=has & (n < D), other=0.0).to(tl.float32)
        if bias is not None:
            e = tl.maximum(tl.load(experts + t * K + i), 0).to(tl.int64)
            value += tl.load(bias + e * D + n, mask=has & (n < D), other=0.0)
        total += tl.where(has, tl.load(weights + t * K + i), 0.0) * value
    tl.store(out + t * D + n, total.to(out.dtype.element_ty), mask=n < D)
