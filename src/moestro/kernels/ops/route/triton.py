# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
"""route for NVIDIA GPUs: a block a token, everything from logits to weights in one launch.

T tokens, E experts, K top-k, G groups.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moestro.kernels.facts import Facts
from moestro.kernels.gpu import pdl, supports_plain
from moestro.spec.fields import RouterSpec


def supports(facts: Facts) -> tuple[bool, str]:
    return supports_plain(facts)


def route(
    logits_TE: torch.Tensor,
    spec: RouterSpec,
    bias_E: torch.Tensor | None = None,
    slots_T: torch.Tensor | None = None,
    counts_E: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    T, E = logits_TE.shape
    assert spec.num_experts == E, (E, spec.num_experts)
    assert bias_E is None or (bias_E.shape == (E,) and spec.scoring != "sparsemixer"), "no bias with sparsemixer"
    logits_TE = logits_TE.contiguous()
    K, G = spec.top_k, spec.num_groups or 1
    ids_TK = torch.empty(T, K, dtype=torch.int32, device=logits_TE.device)
    weights_TK = torch.empty(T, K, dtype=torch.float32, device=logits_TE.device)
    if T:
        _route_kernel[(T,)](
            logits_TE,
            bias_E,
            slots_T,
            0 if slots_T is None else slots_T.stride(0),
            counts_E,
            ids_TK,
            weights_TK,
            float(spec.routed_scaling_factor),
            float(spec.jitter_eps),
            E=E,
            K=K,
            KP=triton.next_power_of_2(K),
            G=G,
            GP=triton.next_power_of_2(G),
            EGP=triton.next_power_of_2(E // G),
            TOP_GROUPS=spec.top_groups or 1,
            TOP2_SUM=spec.group_score == "top2_sum",
            SCORING=spec.scoring,
            RENORMALIZE=spec.renormalize,
            num_warps=1 if E <= 256 else 2,
            **pdl(logits_TE),
        )
    return ids_TK, weights_TK


@triton.jit
def _route_kernel(
    logits,
    bias,
    slots,
    stride_slots,
    counts,
    ids,
    weights,
    scale,
    jitter_eps,
    E: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    EGP: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP2_SUM: tl.constexpr,
    SCORING: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token. Experts lie as [GP, EGP], groups by rows; -inf stands where there is none."""
    t = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GP)
    place = tl.arange(0, EGP)
    expert = group[:, None] * (E // G) + place[None, :]
    real = (group[:, None] < G) & (place[None, :] < E // G)
    k = tl.arange(0, KP)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    logit = tl.load(logits + t * E + expert, mask=real, other=float("-inf"))
    logit = tl.where(logit == logit, logit, float("-inf"))  # a NaN is never chosen before a number
    if SCORING == "softmax":
        score = tl.exp(logit - tl.max(logit))
        score = score / tl.sum(score)
    elif SCORING == "sigmoid":
        score = 1.0 / (1.0 + tl.exp(-logit))
    else:
        score = logit
    selection = score
    if bias is not None:
        selection = score + tl.load(bias + expert, mask=real, other=0.0)
    selection = tl.where(real & (selection == selection), selection, float("-inf"))
    if G > 1:
        selection = _best_groups(selection, place, group, G, TOP_GROUPS, TOP2_SUM)
    taken = ~real
    chosen = tl.full((KP,), -1, tl.int32)
    weight = tl.full((KP,), float("-inf"), tl.float32)
    for i in tl.static_range(K):
        best = tl.max(tl.where(taken, float("-inf"), selection))
        e = tl.min(tl.where((selection == best) & ~taken, expert, E))  # of equal ones the lowest
        e = tl.minimum(e, E - 1)
        if SCORING == "sparsemixer":
            # Experts whose logit is near the chosen one's, relatively, share the weight (arXiv 2310.00811).
            far = (best - logit) / tl.maximum(tl.abs(logit), best) > 2 * jitter_eps
            near = tl.where(far | taken, 0.0, tl.exp(logit - best))
            value = 1.0 / tl.sum(near)
        else:
            value = tl.sum(tl.where(expert == e, tl.where(real, score, 0.0), 0.0))
        taken = taken | (expert == e)
        chosen = tl.where(k == i, e, chosen)
        weight = tl.where(k == i, value, weight)
    if SCORING == "topk_softmax":
        weight = tl.exp(weight - tl.max(weight))
        weight = weight / tl.sum(weight)
    weight = tl.where(k < K, weight, 0.0)
    if RENORMALIZE:
        weight = weight / tl.maximum(tl.sum(weight), 1e-20)
    weight = weight * scale
    if slots is not None:
        is_padding = tl.load(slots + t * stride_slots) < 0
        chosen = tl.where(is_padding, -1, chosen)
        weight = tl.where(is_padding, 0.0, weight)
    tl.store(ids + t * K + k, chosen, mask=k < K)
    tl.store(weights + t * K + k, weight, mask=k < K)
    if counts is not None:
        tl.atomic_add(counts + chosen, tl.full((KP,), 1, tl.int64), mask=(k < K) & (chosen >= 0), sem="relaxed")


@triton.jit
def _best_groups(selection, place, group, G: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP2_SUM: tl.constexpr):
    """The selection with -inf outside the best groups."""
    value = tl.max(selection, 1)
    if TOP2_SUM:
        first = tl.min(tl.where(selection == value[:, None], place[None, :], 1 << 20), 1)
        rest = tl.where(place[None, :] == first[:, None], float("-inf"), selection)
        value = value + tl.max(rest, 1)
    value = tl.where((group < G) & (value == value), value, float("-inf"))
    kept = group >= G
    for _ in tl.static_range(TOP_GROUPS):
        best = tl.max(tl.where(kept, float("-inf"), value))
        g = tl.min(tl.where((value == best) & ~kept, group, G - 1))
        kept = kept | (group == g)
    return tl.where(kept[:, None], selection, float("-inf"))
