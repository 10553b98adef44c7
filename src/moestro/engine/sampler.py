"""From logits to tokens, each row by its own request's parameters. A row's result depends on nothing but the row.

The order is: log-probabilities are taken from the logits as they come; then repetition, presence and frequency
penalties, logit bias, the ban on end tokens before min_tokens, and what a grammar forbids; then greedy choice, or
temperature, top-k, top-p over what top-k left, min-p, and a draw.

A draw needs one uniform number, made by a counter-based generator from the request's seed and the number of tokens so
far. So a seeded request gives the same tokens alone, in a batch, and after a preemption.

R rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from moestro.engine.request import PositionLogprobs, SamplingParams, TokenLogprob
from moestro.engine.sequence import Sequence
from moestro.text.grammar import Grammar

NOT_A_NUMBER = "the model's output is not a number for this input; nothing more can be generated"
_CANDIDATES = 1024  # top-p looks among so many tokens first; a nucleus is rarely wider


@dataclass(frozen=True)
class Sampled:
    """One row's token, and its log-probabilities if they were asked for.

    token_id: None when there is none to choose, for the reason in error.
    """

    token_id: int | None
    logprobs: PositionLogprobs | None
    error: str | None = None


class Choice(Protocol):
    """Tokens of a step, chosen or being chosen. runs_ahead: whether the next step can start without them."""

    @property
    def runs_ahead(self) -> bool: ...

    def wait(self) -> list[Sampled]:
        """One result a row."""
        ...


@dataclass(frozen=True)
class Chosen:
    """A choice that is made."""

    results: list[Sampled]
    runs_ahead: bool = False

    def wait(self) -> list[Sampled]:
        return self.results


Grammars = Mapping[tuple[str, int], Grammar]


@torch.inference_mode()
def sample(logits_RV: torch.Tensor, sequences: list[Sequence], grammars: Grammars | None = None) -> list[Sampled]:
    """Choose one token a row.

    logits_RV: float32, one row a sequence, changed in place where parameters ask for it. grammars: by sequence key.
    """
    assert logits_RV.shape[0] == len(sequences)
    wanted = [r for r, s in enumerate(sequences) if s.request.params.logprobs is not None]
    logprobs = {r: torch.log_softmax(logits_RV[r], dim=-1) for r in wanted}
    for row, sequence in enumerate(sequences):
        _adjust_(logits_RV[row], sequence)
    failed = _constrain_(logits_RV, sequences, grammars or {})
    token_ids = torch.argmax(logits_RV, dim=-1)
    highest = logits_RV.gather(1, token_ids[:, None]).squeeze(1).tolist()
    failed |= {
        row: NOT_A_NUMBER for row, value in enumerate(highest) if not math.isfinite(value)
    }  # argmax finds NaN first
    random = [r for r, s in enumerate(sequences) if s.request.params.temperature > 0]
    if random:
        index = torch.tensor(random, device=logits_RV.device)
        token_ids[index] = _draw(logits_RV[index], [sequences[r] for r in random])
    chosen: list[int] = token_ids.tolist()
    results = []
    for row, (token_id, sequence) in enumerate(zip(chosen, sequences, strict=True)):
        top = sequence.request.params.logprobs
        if row in failed:
            results.append(Sampled(None, None, failed[row]))
        else:
            results.append(Sampled(token_id, None if top is None else position_logprobs(logprobs[row], token_id, top)))
    return results


def position_logprobs(logprobs_V: torch.Tensor, token_id: int, num_top: int) -> PositionLogprobs:
    """The given token's log-probability and rank, and the num_top likeliest tokens."""
    own = logprobs_V[token_id]
    rank = int((logprobs_V > own).sum()) + 1
    values, ids = torch.topk(logprobs_V, min(num_top, logprobs_V.shape[0]))
    top = [TokenLogprob(i, v, r) for r, (i, v) in enumerate(zip(ids.tolist(), values.tolist(), strict=True), 1)]
    return PositionLogprobs(TokenLogprob(token_id, float(own), rank), top)


def uniform(seed: int, index: int, position: int) -> float:
    """The number in [0, 1) that decides the token at `position` of completion `index` of a request with this seed."""
    bits = np.random.Philox(key=np.array([seed % 2**64, index], dtype=np.uint64), counter=position).random_raw()
    return float(bits >> 11) / 2.0**53


def _adjust_(logits_V: torch.Tensor, sequence: Sequence) -> None:
    params = sequence.request.params
    if params.repetition_penalty != 1.0:
        ids = torch.tensor(sorted(set(sequence.token_ids)), device=logits_V.device)
        seen = logits_V[ids]
        logits_V[ids] = torch.where(seen > 0, seen / params.repetition_penalty, seen * params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and sequence.num_output:
        output = torch.tensor(sequence.token_ids[sequence.num_prompt :], device=logits_V.device)
        ids, counts = torch.unique(output, return_counts=True)
        logits_V[ids] -= params.presence_penalty + params.frequency_penalty * counts
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=logits_V.device)
        logits_V[ids] += torch.tensor(list(params.logit_bias.values()), device=logits_V.device)
    if sequence.num_output < params.min_tokens:
        banned = set(params.stop_token_ids) | (set() if params.ignore_eos else sequence.end_ids)
        logits_V[[i for i in banned if i < logits_V.shape[0]]] = float("-inf")


def _constrain_(logits_RV: torch.Tensor, sequences: list[Sequence], grammars: Grammars) -> dict[int, str]:
    """Forbid what the rows' grammars forbid. Returns the rows without any token left, and why; they become zeros."""
    failed = {}
    for row, sequence in enumerate(sequences):
        grammar = grammars.get(sequence.key)
        if grammar is None:
            continue
        allowed_V = torch.from_numpy(grammar.allowed(logits_RV.shape[1])).to(logits_RV.device)
        logits_RV[row].masked_fill_(~allowed_V, float("-inf"))
        if grammar.error is not None or not bool(allowed_V.any()):
            failed[row] = f"the grammar cannot go on: {grammar.error or 'no token of this model fits it'}"
            logits_RV[row] = 0.0
    return failed


def _draw(logits_RV: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
    params = [s.request.params for s in sequences]
    device = logits_RV.device
    # Below this the likeliest token has all the probability, and float32 would soon divide by zero.
    temperature_R1 = torch.tensor([[max(p.temperature, 1e-6)] for p in params], device=device)
    highest_R1 = logits_RV.amax(dim=-1, keepdim=True)
    probs_RV = torch.softmax((logits_RV - highest_R1) / temperature_R1, dim=-1)
    for row, p in enumerate(params):
        if _truncates(p, probs_RV.shape[1]):
            probs_RV[row] = _truncate(probs_RV[row], p)
    u_R1 = torch.tensor(
        [[uniform(s.seed, s.index, s.num_output)] for s in sequences], dtype=torch.float64, device=device
    )
    cumulative_RV = probs_RV.cumsum(dim=-1, dtype=torch.float64)
    token_ids = torch.searchsorted(cumulative_RV, u_R1 * cumulative_RV[:, -1:], right=True).squeeze(1)
    return token_ids.clamp_max(probs_RV.shape[1] - 1)


def _truncates(params: SamplingParams, vocab_size: int) -> bool:
    return 0 < params.top_k < vocab_size or params.top_p < 1 or params.min_p > 0


def _truncate(probs_V: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Probabilities of the tokens that top-k, top-p and min-p leave, 0 elsewhere; not normalised."""
    vocab_size = probs_V.shape[0]
    if 0 < params.top_k < vocab_size:
        values, ids = torch.topk(probs_V, params.top_k)
    else:
        values, ids = torch.topk(probs_V, min(_CANDIDATES, vocab_size))
        if params.top_p == 1 or float(values.sum()) < params.top_p:
            values, ids = torch.sort(probs_V, descending=True, stable=True)
    keep = torch.ones_like(values, dtype=torch.bool)
    if params.top_p < 1:
        total = values.sum() if 0 < params.top_k < vocab_size else 1.0
        keep &= values.cumsum(0) - values < params.top_p * total
    if params.min_p > 0:
        keep &= values >= params.min_p * values[0]
    keep[0] = True  # whatever the parameters, the likeliest token is left
    kept = torch.zeros_like(probs_V)
    kept[ids[keep]] = values[keep]
    return kept
