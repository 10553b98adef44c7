"""What the handlers share: the engine, the model's tokenizer and template, limits, and the life of a request."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest

from moestro.engine.config import EngineConfig
from moestro.engine.request import Completion, Delta, GenerationResult, Request, SamplingParams
from moestro.errors import EngineDeadError, MoestroError, RequestError
from moestro.server.client import EngineClient, Stream
from moestro.server.config import ServerConfig
from moestro.server.facts import Facts, facts_of
from moestro.server.failures import ApiError
from moestro.server.keys import ApiKeys
from moestro.server.metrics import Metrics, RequestMetrics
from moestro.server.tracing import Tracer
from moestro.text.chat_template import check_kwargs, missing_template
from moestro.text.render import TemplateRenderer
from moestro.text.tokenizer import Tokenizer
from moestro.text.tool_calls import OPEN, with_tools

T = TypeVar("T")

# Texts beyond this are tokenised off the event loop, which would otherwise stand still for milliseconds.
_LONG_TEXT = 4096


class Service:
    """One served model. client must have been started.

    name: of the model in the API. draining: the server is about to end and takes nothing new.
    """

    def __init__(self, client: EngineClient, engine_config: EngineConfig, config: ServerConfig) -> None:
        self.client = client
        self.config = config
        self.info = client.info
        self.name = engine_config.served_model_name or _public_name(engine_config.model)
        text_folder = engine_config.tokenizer or self.info.folder
        self.tokenizer = Tokenizer.load(text_folder)
        self.renderer = TemplateRenderer(text_folder)
        self.keys = ApiKeys.load(config.api_key, config.api_key_file)
        self.tracer = Tracer.connect(config.otlp_traces_endpoint, self.name)
        self.metrics = Metrics(self.name)
        self.created = int(time.time())
        self.draining = False
        self.num_active = 0  # HTTP requests being answered
        self.renderer.start()
        self._max_open = self.info.max_num_seqs + engine_config.max_queue

    def close(self) -> None:
        """End what runs beside the server. The engine's client is the caller's."""
        self.renderer.close()
        if self.tracer is not None:
            self.tracer.close()

    @cached_property
    def tool_tags_are_special(self) -> bool:
        """Whether skipping special tokens would skip the marks of tool calls."""
        ids = self.tokenizer.encode(OPEN, add_special_tokens=False) if self.tokenizer else []
        return len(ids) == 1 and self.tokenizer is not None and ids[0] in self.tokenizer.special_ids

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404 unless the name is this model's; without a name there is no doubt which is meant."""
        if name is not None and name != self.name:
            raise ApiError(
                404,
                f"model {name[:200]!r} does not exist; this server has {self.name!r}",
                param="model",
                code="model_not_found",
            )

    async def encode(self, text: str, field: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises RequestError(field)."""
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer; send the prompt as token ids to /v1/completions", field)
        try:
            if len(text) > _LONG_TEXT:
                return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens)
            return self.tokenizer.encode(text, add_special_tokens)
        except RequestError as error:
            raise RequestError(str(error), field) from None

    async def encode_chat(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        kwargs: dict[str, Any],
        tools: list[dict[str, Any]] | None = None,
    ) -> list[int]:
        """Token ids of a conversation in the model's template. Raises RequestError."""
        template = self.renderer.template
        if template is None:
            raise missing_template()
        check_kwargs(kwargs)
        if tools and template.knows_tools:
            kwargs = {**kwargs, "tools": tools}
        elif tools:
            messages = with_tools(messages, tools)
        text = await self.renderer.render(messages, add_generation_prompt, kwargs)
        return await self.encode(text, "messages", add_special_tokens=False)

    def check_ids(self, ids: list[int], field: str) -> None:
        """Raises RequestError(field) for an id outside the vocabulary."""
        wrong = next((i for i in ids if not 0 <= i < self.info.vocab_size), None)
        if wrong is not None:
            raise RequestError(
                f"{field} has token id {wrong}; the vocabulary ends at {self.info.vocab_size - 1}", field
            )

    def check_prompt(self, ids: list[int], field: str) -> None:
        """Raises RequestError(field) unless the prompt has a token and leaves room for one more.

        A max_tokens beyond the room that is left is no error: the engine clamps it, since most answers end earlier.
        """
        if not ids:
            raise RequestError(f"{field} has no tokens; at least one is needed", field)
        limit = self.info.max_model_len
        if len(ids) > limit - 1:
            raise RequestError(
                f"{field} has {len(ids)} tokens, but the context of {limit} tokens leaves room for at most {limit - 1} "
                "and one token of the answer",
                field,
            )

    def check_params(self, params: SamplingParams) -> None:
        """Raises RequestError for parameters that this model cannot follow."""
        self.check_ids(params.stop_token_ids, "stop_token_ids")
        self.check_ids(list(params.logit_bias), "logit_bias")
        if params.stop and self.tokenizer is None:
            raise RequestError("stop needs a tokenizer, which this model has not; use stop_token_ids", "stop")

    def check_room(self, wanted: int) -> None:
        """Raises ApiError 429 when so many more completions cannot wait. Asked before any work is done, and again when
        it is: a server that refuses should not have to tokenise first.
        """
        if self.client.num_open + wanted <= self._max_open:
            return
        if wanted > self._max_open:
            raise RequestError(
                f"{wanted} completions in one request are more than the {self._max_open} that can wait", "n"
            )
        raise ApiError(429, "too many requests are waiting; try again in a moment", code="queue_full", retry_after_s=1)

    async def submit(self, http: HttpRequest, requests: list[Request], form_field: str) -> Generation:
        """Hand all requests of one HTTP request to the engine.

        form_field: what the client calls structured outputs, for the engine's complaints about them. Raises ApiError
        429 when too many are waiting and 504 after the time limit, RequestError or EngineDeadError from the engine.
        """
        self.check_room(sum(request.params.n for request in requests))
        generation = Generation(self.metrics, http, self.config.request_timeout_s)
        try:
            for request in requests:
                generation.add(request, await generation.in_time(self.client.submit(request)))
        except RequestError as error:
            generation.close()
            raise RequestError(str(error), form_field if error.field == "structured_outputs" else error.field) from None
        except BaseException:
            generation.close()
            raise
        return generation


class Generation:
    """The engine requests behind one HTTP request. They are aborted as soon as the client goes away, or by close()."""

    def __init__(self, metrics: Metrics, http: HttpRequest, timeout_s: float) -> None:
        self._metrics = metrics
        self._facts = facts_of(http.scope)
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self._members: list[tuple[Request, Stream, RequestMetrics]] = []
        self._watch = asyncio.create_task(self._abort_on_disconnect(http))
        self.disconnected = False

    def add(self, request: Request, stream: Stream) -> None:
        self._members.append((request, stream, self._metrics.track()))
        if self.disconnected:
            stream.abort()

    def close(self) -> None:
        """Abort what is still open and count every request; harmless when all have ended."""
        self._watch.cancel()
        for request, stream, clock in self._members:
            stream.abort()
            clock.end(request.params.n)
        if self._facts is not None and self._members:
            self._note(self._facts)

    def _note(self, facts: Facts) -> None:
        clocks = [clock for _, _, clock in self._members]
        facts.answer_id = self._members[0][0].request_id
        facts.prompt_tokens = sum(len(request.prompt_token_ids) for request, _, _ in self._members)
        facts.completion_tokens = sum(clock.num_generated for clock in clocks)
        facts.ttft_s = min((c.first_token_s - facts.started_s for c in clocks if c.first_token_s), default=None)
        facts.finish = [clock.reason for clock in clocks if clock.reason is not None]

    async def in_time(self, work: Awaitable[T]) -> T:
        """Wait for work, up to the request's time limit. Raises ApiError 504 beyond it."""
        try:
            return await asyncio.wait_for(work, max(0.0, self._deadline_s - time.monotonic()))
        except TimeoutError:
            raise self._too_late() from None

    def _too_late(self) -> ApiError:
        return ApiError(504, f"the request was not finished after {self._timeout_s:g} s", code="timeout")

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """(request's place, delta) in order of arrival. Raises MoestroError when the engine fails, ApiError after the
        time limit.
        """
        queue: asyncio.Queue[tuple[int, Delta] | MoestroError | None] = asyncio.Queue()

        async def pump(place: int, request: Request, stream: Stream, clock: RequestMetrics) -> None:
            try:
                async for delta in stream:
                    clock.saw(delta, len(request.prompt_token_ids))
                    queue.put_nowait((place, delta))
            except MoestroError as error:
                clock.failed()
                queue.put_nowait(error)
            clock.end(request.params.n)
            queue.put_nowait(None)

        pumps = [asyncio.create_task(pump(i, *member)) for i, member in enumerate(self._members)]
        try:
            running = len(pumps)
            while running:
                try:
                    async with asyncio.timeout_at(
                        asyncio.get_running_loop().time() + self._deadline_s - time.monotonic()
                    ):
                        item = await queue.get()
                except TimeoutError:
                    raise self._too_late() from None
                if item is None:
                    running -= 1
                elif isinstance(item, MoestroError):
                    raise item
                else:
                    if item[1].finish_reason == "error":
                        raise MoestroError(item[1].error or "the engine failed")
                    yield item
        finally:
            for task in pumps:
                task.cancel()

    async def results(self) -> list[GenerationResult]:
        """All of them, whole. Raises ApiError when one fails, ClientGone when nobody waits for them any more."""
        results = [
            GenerationResult(r.request_id, r.prompt_token_ids, [Completion(i) for i in range(r.params.n)])
            for r, _, _ in self._members
        ]
        try:
            async with contextlib.aclosing(self.deltas()) as deltas:
                async for place, delta in deltas:
                    results[place].apply_(delta)
        except MoestroError as error:
            raise failure_of(error) from None
        if self.disconnected:
            raise ClientGone
        return results

    async def _abort_on_disconnect(self, http: HttpRequest) -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass
        self.disconnected = True
        for request, stream, clock in self._members:
            stream.abort()
            clock.end(request.params.n)  # here, since an answer that was never begun has no reader to do it


class ClientGone(Exception):
    """The client closed its connection; there is nobody to answer."""


def failure_of(error: MoestroError) -> ApiError:
    """The answer to a generation that failed on the way."""
    if isinstance(error, EngineDeadError):
        return ApiError(503, str(error), code="engine_unavailable", retry_after_s=5)
    return ApiError(500, str(error), code="engine_error")


def usage(num_prompt: int, num_completion: int, num_cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def _public_name(model: str) -> str:
    """A local folder is called by its last part: clients need not know where it lies."""
    return Path(model).name or model if Path(model).exists() else model
