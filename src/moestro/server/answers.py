"""The shapes of answers, for the OpenAPI document alone: answers are built and written without them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class ErrorDetail(BaseModel):
    """param: the field at fault. code: for programs, such as queue_full, engine_unavailable, timeout."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    error: ErrorDetail


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CalledFunction(BaseModel):
    """arguments: a JSON object as text."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls", "abort"]
    stop_reason: int | str | None


class ChatAnswer(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "abort"]
    stop_reason: int | str | None


class CompletionAnswer(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {
        "model": ErrorAnswer,
        "description": "The request's fault; 429 and 503 say in Retry-After when to try again",
    },
    "5XX": {"model": ErrorAnswer, "description": "Not the request's fault"},
}
_STREAM = {"text/event-stream": {"schema": {"type": "string", "description": "with stream: chunks, then [DONE]"}}}


def answer_of(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """The responses of an endpoint that answers with this shape, or streams chunks of it."""
    return {200: {"model": model, "description": "The answer", "content": _STREAM}, **ERRORS}
