"""POST /v1/chat/completions."""

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
from moestro.server.logprobs import chat_logprobs, prompt_logprobs
from moestro.server.schema import ChatBody, ChatMessage, chat_params
from moestro.server.service import Service, usage
from moestro.server.stream import Chunk, sse_response


async def chat(service: Service, http: HttpRequest, body: ChatBody) -> Response:
    """Answer one chat request. Raises what `failures` turns into answers."""
    service.check_model(body.model)
    params = chat_params(body)
    service.check_params(params)
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    ids = await service.encode_chat(messages_of(body.messages), body.add_generation_prompt is not False, kwargs)
    service.check_prompt(ids, "messages")
    request = Request(f"chatcmpl-{uuid4().hex}", ids, params)
    generation = await service.submit(http, [request])
    answer = _Answer(service, body, request)
    if body.stream:
        return sse_response(generation, answer.first_chunks(), answer.chunks, answer.last_chunks)
    try:
        [result] = await generation.results()
    finally:
        generation.close()
    return Response(msgspec.json.encode(answer.whole(result)), media_type="application/json")


def messages_of(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as templates know them: text parts joined by line breaks. Raises RequestError for other parts."""
    out = []
    for i, message in enumerate(messages):
        plain = message.model_dump()
        if isinstance(message.content, list):
            plain["content"] = "\n".join(_text_part(part, i) for part in message.content)
        out.append(plain)
    return out


def _text_part(part: dict[str, Any], place: int) -> str:
    kind, text = part.get("type", "text"), part.get("text")
    if kind not in ("text", "input_text") or not isinstance(text, str):
        raise RequestError(
            f"messages[{place}] has a part of type {str(kind)[:40]!r}; this model takes text only", "messages"
        )
    return text


class _Answer:
    """Builds the answer's JSON, whole or in chunks."""

    def __init__(self, service: Service, body: ChatBody, request: Request) -> None:
        self._service = service
        self._body = body
        self._request = request
        self._num_tokens = 0
        self._num_cached = 0
        self._head = {"id": request.request_id, "created": int(time.time()), "model": service.name}

    def whole(self, result: GenerationResult) -> Chunk:
        num_tokens = sum(len(c.token_ids) for c in result.outputs)
        answer = self._head | {
            "object": "chat.completion",
            "choices": [self._choice(c) for c in result.outputs],
            "usage": usage(len(result.prompt_token_ids), num_tokens, result.num_cached_tokens),
        }
        if result.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(result.prompt_logprobs)
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = result.prompt_token_ids
        return answer

    def first_chunks(self) -> Iterable[Chunk]:
        for index in range(self._request.params.n):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def chunks(self, place: int, delta: Delta) -> Iterable[Chunk]:
        self._num_tokens += len(delta.token_ids)
        self._num_cached = max(self._num_cached, delta.num_cached_tokens)
        has_ids = delta.token_ids and self._body.return_token_ids
        if delta.text or delta.logprobs or has_ids or delta.finish_reason is not None:
            yield self._chunk(delta.index, {"content": delta.text} if delta.text else {}, delta)

    def last_chunks(self) -> Iterable[Chunk]:
        if self._body.include_usage:
            total = usage(len(self._request.prompt_token_ids), self._num_tokens, self._num_cached)
            yield self._head | {"object": "chat.completion.chunk", "choices": [], "usage": total}

    def _choice(self, completion: Completion) -> dict[str, Any]:
        choice = {
            "index": completion.index,
            "message": {"role": "assistant", "content": completion.text, "refusal": None},
            "logprobs": self._logprobs(completion.logprobs or []),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        return choice | {"token_ids": completion.token_ids} if self._body.return_token_ids else choice

    def _chunk(self, index: int, content: dict[str, Any], delta: Delta | None = None) -> Chunk:
        choice: dict[str, Any] = {"index": index, "delta": content, "logprobs": None, "finish_reason": None}
        if delta is not None:
            choice["logprobs"] = self._logprobs(delta.logprobs)
            choice["finish_reason"] = delta.finish_reason
            if self._body.return_token_ids:
                choice["token_ids"] = delta.token_ids
            if delta.finish_reason is not None:
                choice["stop_reason"] = delta.stop_reason
        chunk = self._head | {"object": "chat.completion.chunk", "choices": [choice]}
        return chunk | {"usage": None} if self._body.include_usage else chunk

    def _logprobs(self, positions: list[PositionLogprobs]) -> dict[str, Any] | None:
        return chat_logprobs(positions, self._service.tokenizer) if self._body.logprobs else None
