"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any
from uuid import uuid4

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from moestro.engine.request import Completion, Delta, GenerationResult, PositionLogprobs, Request
from moestro.errors import RequestError
from moestro.server.logprobs import CompletionLogprobs, prompt_logprobs
from moestro.server.schema import CompletionBody, completion_params
from moestro.server.service import Service, usage
from moestro.server.stream import Chunk, sse_response


async def complete(service: Service, http: HttpRequest, body: CompletionBody) -> Response:
    """Answer one completions request. Raises what `failures` turns into answers."""
    service.check_model(body.model)
    if body.stream and body.echo and body.logprobs is not None:
        raise RequestError("echo with logprobs is not implemented for streaming", "echo")
    params = completion_params(body)
    service.check_params(params)
    service.check_room(params.n)
    prompts = await _prompts(service, body)
    answer_id = f"cmpl-{uuid4().hex}"
    requests = [Request(f"{answer_id}-{i}", ids, params) for i, ids in enumerate(prompts)]
    field = "response_format" if body.structured_outputs is None else "structured_outputs"
    generation = await service.submit(http, requests, field)
    answer = _Answer(service, body, answer_id, requests)
    if body.stream:
        return sse_response(generation, answer.first_chunks(), answer.chunks, answer.last_chunks)
    try:
        results = await generation.results()
    finally:
        generation.close()
    return Response(msgspec.json.encode(answer.whole(results)), media_type="application/json")


async def _prompts(service: Service, body: CompletionBody) -> list[list[int]]:
    """Token ids of each prompt, checked."""
    given = body.prompt
    if isinstance(given, str):
        texts_or_ids: list[str] | list[list[int]] = [given]
    elif given and isinstance(given[0], int):
        texts_or_ids = [given]
    else:
        texts_or_ids = given  # type: ignore[assignment]
    if not texts_or_ids:
        raise RequestError("prompt is an empty list; at least one token is needed", "prompt")
    prompts = []
    for prompt in texts_or_ids:
        if isinstance(prompt, str):
            ids = await service.encode(prompt, "prompt", body.add_special_tokens is not False)
        else:
            ids = prompt
            service.check_ids(ids, "prompt")
        service.check_prompt(ids, "prompt")
        prompts.append(ids)
    return prompts


class _Answer:
    """Builds the answer's JSON, whole or in chunks. Choices are numbered through all prompts, n for each."""

    def __init__(self, service: Service, body: CompletionBody, answer_id: str, requests: list[Request]) -> None:
        self._service = service
        self._body = body
        self._requests = requests
        self._n = requests[0].params.n
        self._only_prompt = body.max_tokens == 0  # one token is generated, and left out
        self._logprobs = [CompletionLogprobs() for _ in range(self._n * len(requests))]
        self._num_tokens = 0
        self._num_cached = [0] * len(requests)
        self._head = {"id": answer_id, "object": "text_completion", "created": int(time.time()), "model": service.name}

    def whole(self, results: list[GenerationResult]) -> Chunk:
        choices = [self._choice(place, result, c) for place, result in enumerate(results) for c in result.outputs]
        num_tokens = 0 if self._only_prompt else sum(len(c.token_ids) for r in results for c in r.outputs)
        return self._head | {
            "choices": choices,
            "usage": usage(self._num_prompt_tokens, num_tokens, sum(r.num_cached_tokens for r in results)),
        }

    def first_chunks(self) -> Iterable[Chunk]:
        if self._body.echo:
            for place in range(len(self._requests)):
                for index in range(self._n):
                    yield self._chunk(self._place(place, index), self._prompt_text(place))

    def chunks(self, place: int, delta: Delta) -> Iterable[Chunk]:
        self._num_cached[place] = max(self._num_cached[place], delta.num_cached_tokens)
        if self._only_prompt:
            delta.text, delta.token_ids, delta.logprobs = "", [], []
        self._num_tokens += len(delta.token_ids)
        has_ids = delta.token_ids and self._body.return_token_ids
        if delta.text or delta.logprobs or has_ids or delta.finish_reason is not None:
            yield self._chunk(self._place(place, delta.index), delta.text, delta)

    def last_chunks(self) -> Iterable[Chunk]:
        if self._body.include_usage:
            total = usage(self._num_prompt_tokens, self._num_tokens, sum(self._num_cached))
            yield self._head | {"choices": [], "usage": total}

    @property
    def _num_prompt_tokens(self) -> int:
        return sum(len(request.prompt_token_ids) for request in self._requests)

    def _place(self, place: int, index: int) -> int:
        return place * self._n + index

    def _prompt_text(self, place: int) -> str:
        if isinstance(self._body.prompt, str):
            return self._body.prompt
        prompt = self._body.prompt[place] if len(self._requests) > 1 or isinstance(self._body.prompt[0], str) else None
        if isinstance(prompt, str):
            return prompt
        tokenizer = self._service.tokenizer
        return tokenizer.decode(self._requests[place].prompt_token_ids, skip_special_tokens=False) if tokenizer else ""

    def _choice(self, place: int, result: GenerationResult, completion: Completion) -> dict[str, Any]:
        text, positions = completion.text, list[PositionLogprobs | None](completion.logprobs or [])
        if self._only_prompt:
            text, positions = "", []
        number = self._place(place, completion.index)
        first_text = ""
        if self._body.echo:
            text = self._prompt_text(place) + text
            if self._body.logprobs is not None:
                positions = [*(result.prompt_logprobs or []), *positions]
                tokenizer = self._service.tokenizer
                first_text = tokenizer.token_text(result.prompt_token_ids[0]) if tokenizer else ""
        choice = {
            "index": number,
            "text": text,
            "logprobs": None if self._body.logprobs is None else self._logprobs[number].of(positions, first_text),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if self._body.prompt_logprobs is not None and result.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(result.prompt_logprobs)
        if self._body.return_token_ids:
            choice["prompt_token_ids"] = result.prompt_token_ids
            choice["token_ids"] = [] if self._only_prompt else completion.token_ids
        return choice

    def _chunk(self, number: int, text: str, delta: Delta | None = None) -> Chunk:
        choice: dict[str, Any] = {"index": number, "text": text, "logprobs": None, "finish_reason": None}
        if delta is not None:
            choice["finish_reason"], choice["stop_reason"] = delta.finish_reason, delta.stop_reason
            if self._body.logprobs is not None:
                choice["logprobs"] = self._logprobs[number].of(list(delta.logprobs))
            if self._body.return_token_ids:
                choice["token_ids"] = delta.token_ids
        chunk = self._head | {"choices": [choice]}
        return chunk | {"usage": None} if self._body.include_usage else chunk
