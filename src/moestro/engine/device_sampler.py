"""Choosing tokens on a GPU without waiting for it, for rows whose parameters need nothing from the host.

The rules are those of `sampler`; only what would have to be looked at on the host in between is done for all rows at
once. R rows, V vocabulary, C candidates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from moestro.engine.sampler import NOT_A_NUMBER, Sampled, uniform
from moestro.engine.sequence import Sequence

_CANDIDATES = 1024  # of a row with top_k up to this, no others need to be sorted


def is_plain(sequence: Sequence) -> bool:
    """Whether a sequence's next token depends on nothing but its logits and a random number."""
    p = sequence.request.params
    return (
        p.logprobs is None
        and p.prompt_logprobs is None
        and p.structured_outputs is None
        and p.repetition_penalty == 1.0
        and not p.presence_penalty
        and not p.frequency_penalty
        and not p.logit_bias
        and sequence.num_output >= p.min_tokens
    )


@dataclass(frozen=True, eq=False)
class PendingChoice:
    """Tokens on their way to the host."""

    tokens_R: torch.Tensor
    arrived: torch.cuda.Event
    runs_ahead: bool = True

    def wait(self) -> list[Sampled]:
        self.arrived.synchronize()
        return [Sampled(None, None, NOT_A_NUMBER) if t < 0 else Sampled(t, None) for t in self.tokens_R.tolist()]


class DeviceSampler:
    """last_tokens: int64 [max_rows], what the last step chose, -1 where the logits were not numbers."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.last_tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)
        # Two steps are in flight at most; the third may write where the first was read.
        self._host = [torch.zeros(max_rows, dtype=torch.int64, pin_memory=True) for _ in range(3)]
        self._turn = 0

    def choose(self, logits_RV: torch.Tensor, sequences: list[Sequence]) -> PendingChoice:
        """Start choosing a token a row. All sequences are plain."""
        rows = len(sequences)
        self.last_tokens[:rows] = choose_rows(logits_RV, sequences)
        self._turn = (self._turn + 1) % len(self._host)
        host = self._host[self._turn][:rows]
        host.copy_(self.last_tokens[:rows], non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        return PendingChoice(host, arrived)


@torch.inference_mode()
def choose_rows(logits_RV: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
    """A token a row, int64 [R]; -1 where the logits are not numbers."""
    best_R, tokens_R = logits_RV.max(dim=-1)
    drawn = [row for row, s in enumerate(sequences) if s.request.params.temperature > 0]
    if drawn:
        some = [sequences[row] for row in drawn]
        if len(drawn) == len(sequences):
            tokens_R = _draw(logits_RV, best_R, some)
        else:
            index = _tensor(drawn, torch.int64, logits_RV.device)
            tokens_R[index] = _draw(logits_RV[index], best_R[index], some)
    return torch.where(torch.isfinite(best_R), tokens_R, -1)  # max finds NaN first


def _draw(logits_RV: torch.Tensor, best_R: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
    params, device, V = [s.request.params for s in sequences], logits_RV.device, logits_RV.shape[1]
    temperature_R1 = _tensor([max(p.temperature, 1e-6) for p in params], torch.float32, device)[:, None]
    probs_RV = torch.softmax((logits_RV - best_R[:, None]) / temperature_R1, dim=-1)
    limits = [p.top_k if 0 < p.top_k < V else V for p in params]
    if any(limit < V or p.top_p < 1 or p.min_p > 0 for limit, p in zip(limits, params, strict=True)):
        top_k_R1 = _tensor(limits, torch.int64, device)[:, None]
        top_p_R1 = _tensor([p.top_p if p.top_p < 1 else math.inf for p in params], torch.float32, device)[:, None]
        min_p_R1 = _tensor([p.min_p for p in params], torch.float32, device)[:, None]
        probs_RV = _truncate(probs_RV, max(limits), top_k_R1, top_p_R1, min_p_R1)
    u_R = _tensor([uniform(s.seed, s.index, s.num_output) for s in sequences], torch.float64, device)
    cumulative_RV = probs_RV.cumsum(dim=-1, dtype=torch.float64)
    tokens_R1 = torch.searchsorted(cumulative_RV, u_R[:, None] * cumulative_RV[:, -1:], right=True)
    return tokens_R1.squeeze(1).clamp_max(V - 1)


def _truncate(
    probs_RV: torch.Tensor, most: int, top_k_R1: torch.Tensor, top_p_R1: torch.Tensor, min_p_R1: torch.Tensor
) -> torch.Tensor:
    """Probabilities of the tokens that top-k, top-p of what it left, and min-p leave, 0 elsewhere; not normalised."""
    if most <= _CANDIDATES:
        values_RC, ids_RC = torch.topk(probs_RV, most)
    else:
        values_RC, ids_RC = torch.sort(probs_RV, dim=-1, descending=True, stable=True)
    rank_C = torch.arange(values_RC.shape[1], device=probs_RV.device)
    values_RC = torch.where(rank_C < top_k_R1, values_RC, 0.0)
    total_R1 = torch.where(top_k_R1 < probs_RV.shape[1], values_RC.sum(-1, keepdim=True), 1.0)
    keep_RC = values_RC.cumsum(-1) - values_RC < top_p_R1 * total_R1
    keep_RC &= (values_RC >= min_p_R1 * values_RC[:, :1]) & (rank_C < top_k_R1)
    keep_RC[:, 0] = True  # whatever the parameters, the likeliest token is left
    return torch.zeros_like(probs_RV).scatter_(1, ids_RC, torch.where(keep_RC, values_RC, 0.0))


def _tensor(values: list[int] | list[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On the device without waiting for it: pinned memory is copied in the stream's order."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
