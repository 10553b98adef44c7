"""What a client asks of the engine and what it gets back: sampling parameters, requests, deltas and finished results.

All are msgspec structs: they are checked when built and cross the process border as they are.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from moestro.errors import RequestError
from moestro.text.grammar import StructuredOutputs

FinishReason = Literal["stop", "length", "abort", "error"]
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 300
MAX_STOP_STRINGS = 16
MAX_N = 64
MAX_INT = 2**63 - 1  # what messages between processes can carry


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose the next tokens of one request, and when to stop. Names and meanings are vLLM's.

    n: completions a prompt. temperature: 0 is greedy. top_k: 0 (or -1) is off. min_p: keeps tokens with at least min_p
        times the probability of the likeliest one.
    repetition_penalty divides positive and multiplies negative logits of tokens in prompt or output (arXiv 1909.05858);
        presence_penalty and frequency_penalty subtract once / once an occurrence for tokens in the output (OpenAI's
        meaning).
    seed: the same seed gives the same tokens, alone or in a batch. None takes a fresh one.
    stop: strings that end the text (not part of it unless include_stop_str_in_output); stop_token_ids: ids that end it.
    logit_bias: added to the logits of these ids, -100..100. min_tokens: no end token or stop id before so many.
    max_tokens: None means up to the context limit. ignore_eos: go on past end tokens.
    logprobs, prompt_logprobs: that many likeliest tokens a position, besides the one chosen; taken from the model's own
        logits, before temperature, penalties, bias and truncation.
    structured_outputs: what the text has to look like; it ends as soon as nothing can be added.

    Raises RequestError with the name of the field at fault.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    logit_bias: dict[int, float] = {}
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):  # msgspec does not check types when a struct is built in Python
            msgspec.structs.force_setattr(self, "stop", [self.stop])
        for field in ("n", "top_k", "seed", "min_tokens", "max_tokens", "logprobs", "prompt_logprobs"):
            value = getattr(self, field)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise RequestError(f"{field}={value!r} must be a whole number", field)
        for field, kind in (("stop", list), ("stop_token_ids", list), ("logit_bias", dict)):
            if not isinstance(getattr(self, field), kind):
                raise RequestError(f"{field}={getattr(self, field)!r} must be a {kind.__name__}", field)
        self._within("n", self.n, 1, MAX_N)
        self._within("temperature", self.temperature, 0, 100)
        if not 0 < _number("top_p", self.top_p) <= 1:
            raise RequestError(f"top_p={self.top_p} must be greater than 0 and at most 1", "top_p")
        self._within("top_k", self.top_k, -1, MAX_INT)
        self._within("min_p", self.min_p, 0, 1)
        self._within("repetition_penalty", self.repetition_penalty, 0.01, 100)
        self._within("presence_penalty", self.presence_penalty, -2, 2)
        self._within("frequency_penalty", self.frequency_penalty, -2, 2)
        if self.seed is not None:
            self._within("seed", self.seed, -MAX_INT - 1, MAX_INT)
        self._within("min_tokens", self.min_tokens, 0, MAX_INT)
        if self.max_tokens is not None:
            self._within("max_tokens", self.max_tokens, 1, MAX_INT)
            if self.min_tokens > self.max_tokens:
                raise RequestError(
                    f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}", "min_tokens"
                )
        if self.min_tokens and self.structured_outputs is not None:
            raise RequestError("min_tokens cannot be kept when structured_outputs end the text", "min_tokens")
        for field in ("logprobs", "prompt_logprobs"):
            if getattr(self, field) is not None:
                self._within(field, getattr(self, field), 0, MAX_LOGPROBS)
        if len(self.stop) > MAX_STOP_STRINGS or not all(isinstance(s, str) and s for s in self.stop):
            raise RequestError(f"stop takes up to {MAX_STOP_STRINGS} non-empty strings", "stop")
        if not all(isinstance(i, int) and i >= 0 for i in self.stop_token_ids):
            raise RequestError("stop_token_ids takes non-negative token ids", "stop_token_ids")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise RequestError(
                f"logit_bias takes up to {MAX_LOGIT_BIAS} tokens, not {len(self.logit_bias)}", "logit_bias"
            )
        for token_id, bias in self.logit_bias.items():
            if not isinstance(token_id, int) or token_id < 0 or not -100 <= _number("logit_bias", bias) <= 100:
                raise RequestError(
                    f"logit_bias entry {token_id}: {bias} must map a token id to -100..100", "logit_bias"
                )

    @staticmethod
    def _within(field: str, value: float, low: float, high: float) -> None:
        if not low <= _number(field, value) <= high:
            allowed = f"at least {low}" if value < low and high == MAX_INT else f"between {low} and {high}"
            raise RequestError(f"{field}={value} must be {allowed}", field)


def _number(field: str, value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or (isinstance(value, float) and not math.isfinite(value)):
        raise RequestError(f"{field}={value!r} must be a finite number", field)
    assert isinstance(value, int | float)
    return value


class Request(msgspec.Struct, frozen=True):
    """One prompt and how to continue it. request_id is chosen by the caller and unique among open requests."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token's log-probability (natural, model's own distribution) and its rank, 1 the likeliest. text: the token
    alone.
    """

    token_id: int
    logprob: float
    rank: int
    text: str = ""


class PositionLogprobs(msgspec.Struct, frozen=True):
    """The chosen (or given) token of one position, and the likeliest ones there, falling."""

    chosen: TokenLogprob
    top: list[TokenLogprob]


class Delta(msgspec.Struct):
    """What one engine step added to one completion of a request.

    text may be empty while a character or a possible stop string is incomplete; token_ids and logprobs go with the
    tokens themselves. finish_reason is set once, on the last delta of the completion; error says why when it is
    "error".
    prompt_logprobs come with the first delta; its first entry is None. num_cached_tokens: prompt tokens found in the
    prefix cache.
    """

    request_id: str
    index: int
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[PositionLogprobs] = []
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    error: str | None = None


class Completion(msgspec.Struct):
    """One finished continuation. logprobs: one entry a token when they were asked for, else None.

    error: why, when finish_reason is "error".
    """

    index: int
    text: str = ""
    token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[PositionLogprobs] | None = None
    error: str | None = None


class GenerationResult(msgspec.Struct):
    """All completions of one prompt. `.text`, `.token_ids`, `.finish_reason` and `.logprobs` are those of the first."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[Completion]
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_cached_tokens: int = 0

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> list[PositionLogprobs] | None:
        return self.outputs[0].logprobs

    def apply_(self, delta: Delta) -> None:
        """Add a delta to its completion."""
        completion = self.outputs[delta.index]
        completion.text += delta.text
        completion.token_ids.extend(delta.token_ids)
        if delta.logprobs:
            completion.logprobs = [*(completion.logprobs or []), *delta.logprobs]
        if delta.finish_reason is not None:
            completion.finish_reason, completion.stop_reason = delta.finish_reason, delta.stop_reason
            completion.error = delta.error
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        self.num_cached_tokens = max(self.num_cached_tokens, delta.num_cached_tokens)
