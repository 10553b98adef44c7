"""Expert choice in plain PyTorch: one function a scoring rule. The reference for all routing kernels.

T tokens, E experts, K top-k, G groups.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from moestro.spec.fields import RouterSpec


def route(
    logits_TE: torch.Tensor,
    spec: RouterSpec,
    bias_E: torch.Tensor | None = None,
    slots_T: torch.Tensor | None = None,
    counts_E: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See Route."""
    ids, weights = _RULES[spec.scoring](logits_TE, spec, bias_E)
    if spec.renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp_min(1e-20)
    return finish(ids.to(torch.int32), weights * spec.routed_scaling_factor, slots_T, counts_E)


def finish(
    ids_TK: torch.Tensor, weights_TK: torch.Tensor, slots_T: torch.Tensor | None, counts_E: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Take padding out of a choice, and count the rest."""
    if slots_T is not None:
        padding_T1 = (slots_T < 0).unsqueeze(1)
        ids_TK, weights_TK = ids_TK.masked_fill(padding_T1, -1), weights_TK.masked_fill(padding_T1, 0.0)
    if counts_E is not None:
        chosen = ids_TK[ids_TK >= 0].long()
        counts_E += torch.bincount(chosen, minlength=counts_E.shape[0])
    return ids_TK, weights_TK


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Elementwise sigmoid, worked out in float64 and rounded to float32, so that equal inputs give equal outputs.

    torch's float32 sigmoid rounds the last few of many numbers in another way than the others: a token's experts would
    depend on its place in the batch.
    """
    return torch.sigmoid(x.double()).float()


def top_k_stable(scores_TE: torch.Tensor, k: int) -> torch.Tensor:
    """Ids [T, k] of the k highest scores, falling; of equal scores the lower id first. torch.topk promises no order of
    ties.
    """
    return torch.sort(scores_TE, dim=-1, descending=True, stable=True).indices[:, :k]


def _softmax(
    logits_TE: torch.Tensor, spec: RouterSpec, bias_E: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    return _choose(torch.softmax(logits_TE, dim=-1), spec, bias_E)


def _sigmoid(
    logits_TE: torch.Tensor, spec: RouterSpec, bias_E: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    return _choose(sigmoid(logits_TE), spec, bias_E)


def _choose(
    scores_TE: torch.Tensor, spec: RouterSpec, bias_E: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    selection_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if spec.num_groups is not None:
        selection_TE = _keep_best_groups(selection_TE, spec)
    ids_TK = top_k_stable(selection_TE, spec.top_k)
    return ids_TK, scores_TE.gather(1, ids_TK)


def _keep_best_groups(selection_TE: torch.Tensor, spec: RouterSpec) -> torch.Tensor:
    """Mask with -inf every expert outside the best groups; 0 would win over negative biased scores."""
    assert spec.num_groups is not None
    assert spec.top_groups is not None
    num_tokens, num_experts = selection_TE.shape
    grouped_TGe = selection_TE.view(num_tokens, spec.num_groups, num_experts // spec.num_groups)
    best = 1 if spec.group_score == "max" else 2
    score_TG = grouped_TGe.topk(best, dim=-1).values.sum(dim=-1)
    kept = top_k_stable(score_TG, spec.top_groups)
    dropped_TG = torch.ones_like(score_TG, dtype=torch.bool).scatter_(1, kept, False)
    return grouped_TGe.masked_fill(dropped_TG.unsqueeze(-1), float("-inf")).view(num_tokens, num_experts)


def _topk_softmax(
    logits_TE: torch.Tensor, spec: RouterSpec, bias_E: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    ids_TK, chosen_TK = _choose(logits_TE, spec, bias_E)
    return ids_TK, torch.softmax(chosen_TK, dim=-1)


def _sparsemixer(
    logits_TE: torch.Tensor, spec: RouterSpec, bias_E: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Phi-3.5-MoE at inference (arXiv 2310.00811): each of the two choices has its weight from a softmax over the
    experts whose logit is within 2*jitter_eps, relatively, of the chosen one.
    """
    assert bias_E is None, "sparsemixer has no selection bias"
    first_T1 = top_k_stable(logits_TE, 1)
    rest_TE = logits_TE.scatter(1, first_T1, float("-inf"))
    second_T1 = top_k_stable(rest_TE, 1)
    weights = [
        _near_softmax(candidates, logits_TE, chosen, spec.jitter_eps)
        for candidates, chosen in ((logits_TE, first_T1), (rest_TE, second_T1))
    ]
    return torch.cat([first_T1, second_T1], dim=1), torch.cat(weights, dim=1)


def _near_softmax(
    candidates_TE: torch.Tensor, logits_TE: torch.Tensor, chosen_T1: torch.Tensor, eps: float
) -> torch.Tensor:
    best_T1 = candidates_TE.gather(1, chosen_T1)
    scale_TE = torch.maximum(logits_TE.abs(), best_T1)
    far_TE = (best_T1 - logits_TE) / scale_TE > 2 * eps
    return F.softmax(candidates_TE.masked_fill(far_TE, float("-inf")), dim=-1).gather(1, chosen_T1)


_RULES = {"softmax": _softmax, "sigmoid": _sigmoid, "topk_softmax": _topk_softmax, "sparsemixer": _sparsemixer}
