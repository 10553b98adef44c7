"""The bodies of requests: OpenAI's fields, and vLLM's extras where they mean something here.

Unknown fields are ignored, as compatible servers do. Fields that are known, would change the answer and are not
implemented are refused by name, unless they have the value that asks for nothing.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from moestro.engine.request import MAX_LOGIT_BIAS, MAX_LOGPROBS, SamplingParams
from moestro.errors import RequestError
from moestro.server.structured import ResponseFormat, StructuredOutputsBody, Tool, ToolChoice, wanted_form
from moestro.text.grammar import StructuredOutputs

# A list stops at its first wrong item: a body of millions of them would otherwise make as many complaints.
TokenIds = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
MAX_PROMPTS = 256

# Field -> values that ask for nothing.
NOT_IMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (None, []),
    "audio": (None,),
    "bad_words": (None, []),
    "cache_salt": (None,),
    "chat_template": (None,),
    "continue_final_message": (None, False),
    "documents": (None, []),
    "ec_transfer_params": (None,),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "guided_choice": (None, []),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "kv_transfer_params": (None,),
    "length_penalty": (None, 1, 1.0),
    "logits_processors": (None, []),
    "logprob_token_ids": (None, []),
    "media_io_kwargs": (None, {}),
    "mm_processor_kwargs": (None, {}),
    "modalities": (None, [], ["text"]),
    "priority": (None, 0),
    "prompt_embeds": (None,),
    "repetition_detection": (None,),
    "return_prompt_text": (None, False),
    "return_token_offsets": (None, False),
    "return_tokens_as_token_ids": (None, False),
    "routed_experts_prompt_start": (None, 0),
    "spaces_between_special_tokens": (None, True),
    "suffix": (None, ""),
    "thinking_token_budget": (None,),
    "truncate_prompt_tokens": (None,),
    "truncation_side": (None,),
    "use_beam_search": (None, False),
    "vllm_xargs": (None, {}),
    "watermarking": (None, False),
    "web_search_options": (None,),
}


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    include_usage: bool | None = None


class SamplingBody(_Body):
    """Fields that chat and completions share. Ranges are checked by SamplingParams, which is what they become."""

    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | Texts | None = None
    stop_token_ids: TokenIds | None = None
    logit_bias: dict[str, Any] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    best_of: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsBody | None = None
    user: str | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatMessage(BaseModel):
    """One message. Further fields (name, tool_calls, reasoning_content ...) go to the chat template as they are."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: str
    content: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None


Messages = Annotated[list[ChatMessage], Field(fail_fast=True)]


class ChatBody(SamplingBody):
    messages: Messages = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    echo: bool | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None


class CompletionBody(SamplingBody):
    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True, max_length=MAX_PROMPTS)]
        | TokenIds
        | Annotated[list[TokenIds], Field(fail_fast=True, max_length=MAX_PROMPTS)]
    )
    logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None


class TokenizeBody(_Body):
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(_Body):
    tokens: TokenIds


def chat_params(body: ChatBody, form: StructuredOutputs | None = None) -> SamplingParams:
    """form: of the tool calls that must be made, if any. Raises RequestError naming the field at fault."""
    if body.echo:
        raise RequestError("echo is not implemented for chat", "echo")
    top = body.top_logprobs
    if top is not None and not 0 <= top <= MAX_LOGPROBS:
        raise RequestError(f"top_logprobs={top} must be between 0 and {MAX_LOGPROBS}", "top_logprobs")
    if top and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", "top_logprobs")
    if body.max_completion_tokens is not None:
        if body.max_completion_tokens < 1:
            raise RequestError(
                f"max_completion_tokens={body.max_completion_tokens} must be at least 1", "max_completion_tokens"
            )
        body.max_tokens = body.max_completion_tokens
    return _params(body, form, max_tokens=body.max_tokens, logprobs=(top or 0) if body.logprobs else None)


def completion_params(body: CompletionBody) -> SamplingParams:
    """max_tokens=0 with echo, the way to score a prompt, becomes 1: the token made is left out of the answer.

    Raises RequestError naming the field at fault.
    """
    max_tokens = 16 if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and body.echo:
        max_tokens = 1
    params = _params(body, None, max_tokens=max_tokens, logprobs=body.logprobs)
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        return _params(body, None, max_tokens=max_tokens, logprobs=body.logprobs, prompt_logprobs=body.logprobs)
    return params


_PLAIN_FIELDS = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "seed",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "prompt_logprobs",
)


def _params(body: SamplingBody, form: StructuredOutputs | None, **given: Any) -> SamplingParams:
    _refuse_not_implemented(body)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise RequestError(f"best_of={body.best_of} is not implemented; it may only equal n", "best_of")
    wanted = wanted_form(body.response_format, body.structured_outputs)
    if form is not None and wanted is not None:
        raise RequestError("response_format cannot be kept when tool_choice asks for a call", "response_format")
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream to be true", "stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs are not available while streaming", "prompt_logprobs")
    options = {name: value for name in _PLAIN_FIELDS if (value := getattr(body, name)) is not None} | given
    if body.stop is not None:
        options["stop"] = [body.stop] if isinstance(body.stop, str) else body.stop
    if body.logit_bias is not None:
        if len(body.logit_bias) > MAX_LOGIT_BIAS:
            raise RequestError(f"logit_bias takes up to {MAX_LOGIT_BIAS} tokens", "logit_bias")
        options["logit_bias"] = {_bias_id(key): value for key, value in body.logit_bias.items()}
    return SamplingParams(**options, structured_outputs=form or wanted)


def _bias_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= 10):
        raise RequestError(f"logit_bias key {key[:40]!r} is not a token id", "logit_bias")
    return int(key)


def _refuse_not_implemented(body: BaseModel) -> None:
    extra = body.model_extra or {}
    for name, harmless in NOT_IMPLEMENTED.items():
        if name in extra and extra[name] not in harmless:
            instead = "; use structured_outputs" if name.startswith("guided_") else ""
            raise RequestError(f"{name} is not implemented here{instead}", name)
