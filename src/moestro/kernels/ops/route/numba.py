"""route for the CPU: scores by PyTorch, so that they round and tie as the reference's do; the choice compiled.

T tokens, E experts, K top-k, G groups.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from moestro.kernels.facts import Facts
from moestro.kernels.jit import device, float32_address, float32_input, kernel, supports_formats
from moestro.kernels.memory import fetch_add, load, new_counter, store, store_int32
from moestro.kernels.ops.route.reference import finish, sigmoid
from moestro.kernels.pool import POOL, run, worker
from moestro.kernels.scalar import exp
from moestro.spec.fields import RouterSpec

# Below this many scores waking the threads costs more than they save.
SERIAL_VALUES = 16 * 1024

_SCORES, _TOPK_SOFTMAX, _SPARSEMIXER = 0, 1, 2


def supports(facts: Facts) -> tuple[bool, str]:
    return supports_formats(facts, ("",))


def route(
    logits_TE: torch.Tensor,
    spec: RouterSpec,
    bias_E: torch.Tensor | None = None,
    slots_T: torch.Tensor | None = None,
    counts_E: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    rule = {"topk_softmax": _TOPK_SOFTMAX, "sparsemixer": _SPARSEMIXER}.get(spec.scoring, _SCORES)
    assert bias_E is None or rule != _SPARSEMIXER, "sparsemixer has no selection bias"
    scores_TE = float32_input("route", "logits", logits_TE)
    if spec.scoring == "softmax":
        scores_TE = torch.softmax(scores_TE, dim=-1)
    elif spec.scoring == "sigmoid":
        scores_TE = sigmoid(scores_TE)
    T, E = scores_TE.shape
    assert spec.num_experts == E, (E, spec.num_experts)
    assert bias_E is None or bias_E.shape == (E,), bias_E.shape
    ids_TK = torch.empty(T, spec.top_k, dtype=torch.int32)
    weights_TK = torch.empty(T, spec.top_k)
    bias, _keep = float32_address(bias_E)
    _route(
        POOL.address if T * E > SERIAL_VALUES else 0,
        (scores_TE.data_ptr(), bias, ids_TK.data_ptr(), weights_TK.data_ptr()),
        (T, E, spec.top_k, rule),
        (spec.num_groups or 0, spec.top_groups or 0, spec.group_score == "top2_sum"),
        (spec.renormalize, float(spec.routed_scaling_factor), float(spec.jitter_eps)),
    )
    return finish(ids_TK, weights_TK, slots_T, counts_E)


@kernel
def _route(pool: int, tensors: Any, sizes: Any, groups: Any, mixing: Any) -> None:
    run(pool, _tokens((tensors, sizes, groups, mixing, new_counter())))


@worker
def _tokens(arguments: Any) -> None:
    tensors, sizes, groups, mixing, shared = arguments
    f32 = np.float32(0)
    scores, bias, ids, weights = tensors
    T, E, K, rule = sizes
    renormalize, factor, eps = mixing
    score, selection = np.empty(E, np.float32), np.empty(E, np.float32)
    chosen, mixed = np.empty(K, np.int64), np.empty(K, np.float32)
    while True:
        t = fetch_add(shared, 1)
        if t >= T:
            break
        for e in range(E):
            score[e] = load(f32, scores, t * E + e)
            selection[e] = score[e] + load(f32, bias, e) if bias else score[e]
        if groups[0]:
            _keep_best_groups(selection, groups)
        if rule == _SPARSEMIXER:
            _sparsemixer(score, selection, chosen, mixed, np.float32(eps))
        else:
            _top_k(selection, chosen)
            for k in range(K):
                mixed[k] = score[chosen[k]]
            if rule == _TOPK_SOFTMAX:
                _softmax(mixed)
        if renormalize:
            total = f32
            for k in range(K):
                total += mixed[k]
            total = max(total, np.float32(1e-20))
            for k in range(K):
                mixed[k] /= total
        for k in range(K):
            store_int32(ids, t * K + k, chosen[k])
            store(f32, weights, t * K + k, mixed[k] * np.float32(factor))


@device
def _above(a: np.float32, b: np.float32) -> bool:
    """Whether a comes before b in falling order; NaN first, as torch.sort has it."""
    return bool(a > b or (a != a and b == b))


@device
def _top_k(values: Any, chosen: Any) -> None:
    """Ids of the highest values, falling; of equal ones the lower id first, since only a higher one moves up."""
    K = chosen.shape[0]
    held = 0
    for e in range(values.shape[0]):
        if held == K and not _above(values[e], values[chosen[K - 1]]):
            continue
        place = min(held, K - 1)
        while place > 0 and _above(values[e], values[chosen[place - 1]]):
            chosen[place] = chosen[place - 1]
            place -= 1
        chosen[place] = e
        held = min(held + 1, K)


@device
def _keep_best_groups(selection: Any, groups: Any) -> None:
    """Mask with -inf every expert outside the best groups."""
    G, top_groups, sum_of_two = groups
    size = selection.shape[0] // G
    group_score = np.empty(G, np.float32)
    best = np.empty(2 if sum_of_two else 1, np.int64)
    for g in range(G):
        members = selection[g * size : (g + 1) * size]
        _top_k(members, best)
        group_score[g] = members[best[0]] + members[best[1]] if sum_of_two else members[best[0]]
    kept = np.empty(top_groups, np.int64)
    _top_k(group_score, kept)
    dropped = np.ones(G, np.bool_)
    for g in kept:
        dropped[g] = False
    for e in range(selection.shape[0]):
        if dropped[e // size]:
            selection[e] = np.float32(-np.inf)


@device
def _softmax(values: Any) -> None:
    largest = np.max(values)
    total = np.float32(0)
    for i in range(values.shape[0]):
        values[i] = exp(values[i] - largest)
        total += values[i]
    for i in range(values.shape[0]):
        values[i] /= total


@device
def _sparsemixer(logits: Any, rest: Any, chosen: Any, mixed: Any, eps: np.float32) -> None:
    """Two choices, each weighted by a softmax over the logits that are near the chosen one (arXiv 2310.00811)."""
    for k in range(2):
        _top_k(rest, chosen[k : k + 1])
        best = rest[chosen[k]]
        total = np.float32(0)
        for e in range(logits.shape[0]):
            scale = max(abs(logits[e]), best)
            if not (best - logits[e]) / scale > np.float32(2) * eps and rest[e] > np.float32(-np.inf):
                total += exp(rest[e] - best)
        mixed[k] = np.float32(1) / total
        rest[chosen[k]] = np.float32(-np.inf)
