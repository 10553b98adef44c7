"""POST /v1/chat/completions."""

from __future__ import annotations

import json
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
from moestro.server.structured import ToolUse
from moestro.text.tool_calls import ToolCallParser, ToolPiece


async def chat(service: Service, http: HttpRequest, body: ChatBody) -> Response:
    """Answer one chat request. Raises what `failures` turns into answers."""
    service.check_model(body.model)
    use = ToolUse(body.tools or [], body.tool_choice, body.parallel_tool_calls)
    params = chat_params(body, use.form())
    if use.active and service.tool_tags_are_special:
        params = msgspec.structs.replace(params, skip_special_tokens=False)
    service.check_params(params)
    service.check_room(params.n)
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or []] if use.active else None
    add_prompt = body.add_generation_prompt is not False
    ids = await service.encode_chat(messages_of(body.messages), add_prompt, kwargs, tools)
    service.check_prompt(ids, "messages")
    request = Request(f"chatcmpl-{uuid4().hex}", ids, params)
    generation = await service.submit(http, [request], _form_field(use, body))
    answer = _Answer(service, body, request, use)
    if body.stream:
        return sse_response(generation, answer.first_chunks(), answer.chunks, answer.last_chunks)
    try:
        [result] = await generation.results()
    finally:
        generation.close()
    return Response(msgspec.json.encode(answer.whole(result)), media_type="application/json")


def _form_field(use: ToolUse, body: ChatBody) -> str:
    """The field that a complaint about the grammar is about."""
    if use.forced:
        return "tools"
    return "response_format" if body.structured_outputs is None else "structured_outputs"


def messages_of(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as templates know them: text parts joined by line breaks. Raises RequestError for other parts."""
    out = []
    for i, message in enumerate(messages):
        plain = message.model_dump()
        if isinstance(message.content, list):
            plain["content"] = "\n".join(_text_part(part, i) for part in message.content)
        if "tool_calls" in plain:
            plain["tool_calls"] = _calls_of(plain["tool_calls"], i)
        out.append(plain)
    return out


def _calls_of(calls: Any, place: int) -> list[dict[str, Any]] | None:
    """Earlier calls as templates know them: with arguments as an object, where the API has JSON text."""
    if calls is None:
        return None
    wrong = RequestError(f"messages[{place}].tool_calls must be a list of calls with a function each", "messages")
    if not isinstance(calls, list):
        raise wrong
    out = []
    for call in calls:
        if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
            raise wrong
        function = dict(call["function"])
        if isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = json.loads(function["arguments"] or "{}")
            except (ValueError, RecursionError):
                raise RequestError(
                    f"messages[{place}].tool_calls has arguments that are not JSON", "messages"
                ) from None
        out.append({**call, "function": function})
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

    def __init__(self, service: Service, body: ChatBody, request: Request, use: ToolUse) -> None:
        self._service = service
        self._body = body
        self._request = request
        self._use = use
        self._parsers = [ToolCallParser(use.names) for _ in range(request.params.n if use.active else 0)]
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
        parts = self._parts(delta)
        for part in parts[:-1]:
            yield self._chunk(delta.index, part)
        if parts or delta.logprobs or has_ids or delta.finish_reason is not None:
            yield self._chunk(delta.index, parts[-1] if parts else {}, delta)

    def last_chunks(self) -> Iterable[Chunk]:
        if self._body.include_usage:
            total = usage(len(self._request.prompt_token_ids), self._num_tokens, self._num_cached)
            yield self._head | {"object": "chat.completion.chunk", "choices": [], "usage": total}

    def _parts(self, delta: Delta) -> list[dict[str, Any]]:
        """What a delta adds to the message, one or several chunks of it."""
        if not self._parsers:
            return [{"content": delta.text}] if delta.text else []
        parser = self._parsers[delta.index]
        pieces = parser.push(delta.text) + (parser.flush() if delta.finish_reason is not None else [])
        return [{"content": p.text} if p.kind == "content" else {"tool_calls": [_call_part(p)]} for p in pieces]

    def _choice(self, completion: Completion) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": completion.text, "refusal": None}
        if self._parsers:
            parser = self._parsers[completion.index]
            pieces = parser.push(completion.text) + parser.flush()
            content = "".join(p.text for p in pieces if p.kind == "content")
            message["content"] = content if content or not parser.num_calls else None
            if parser.num_calls:
                message["tool_calls"] = _calls(pieces, parser.num_calls)
        choice = {
            "index": completion.index,
            "message": message,
            "logprobs": self._logprobs(completion.logprobs or []),
            "finish_reason": self._finish_reason(completion.index, completion.finish_reason),
            "stop_reason": completion.stop_reason,
        }
        return choice | {"token_ids": completion.token_ids} if self._body.return_token_ids else choice

    def _finish_reason(self, index: int, reason: str | None) -> str | None:
        """As OpenAI has it: "tool_calls" when the model chose to call, "stop" when the client named the function."""
        has_calls = bool(self._parsers) and self._parsers[index].num_calls > 0
        return "tool_calls" if reason == "stop" and has_calls and not self._use.named else reason

    def _chunk(self, index: int, content: dict[str, Any], delta: Delta | None = None) -> Chunk:
        choice: dict[str, Any] = {"index": index, "delta": content, "logprobs": None, "finish_reason": None}
        if delta is not None:
            choice["logprobs"] = self._logprobs(delta.logprobs)
            choice["finish_reason"] = self._finish_reason(index, delta.finish_reason)
            if self._body.return_token_ids:
                choice["token_ids"] = delta.token_ids
            if delta.finish_reason is not None:
                choice["stop_reason"] = delta.stop_reason
        chunk = self._head | {"object": "chat.completion.chunk", "choices": [choice]}
        return chunk | {"usage": None} if self._body.include_usage else chunk

    def _logprobs(self, positions: list[PositionLogprobs]) -> dict[str, Any] | None:
        return chat_logprobs(positions, self._service.tokenizer) if self._body.logprobs else None


def _call_part(piece: ToolPiece) -> dict[str, Any]:
    if piece.kind == "arguments":
        return {"index": piece.index, "function": {"arguments": piece.text}}
    function = {"name": piece.text, "arguments": ""}
    return {"index": piece.index, "id": f"call_{uuid4().hex}", "type": "function", "function": function}


def _calls(pieces: list[ToolPiece], num_calls: int) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    for index in range(num_calls):
        own = [p for p in pieces if p.index == index]
        call = _call_part(own[0])
        del call["index"]
        call["function"]["arguments"] = "".join(p.text for p in own if p.kind == "arguments")
        calls.append(call)
    return calls
