"""`LLM`: the engine in the caller's process, for scripts and tests."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from moestro.engine.config import EngineConfig
from moestro.engine.load import Progress
from moestro.engine.loop import EngineLoop
from moestro.engine.request import Completion, Delta, GenerationResult, Request, SamplingParams
from moestro.engine.stats import EngineStats, ModelInfo
from moestro.errors import RequestError
from moestro.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]


class LLM:
    """A loaded model that generates.

        llm = LLM("demo")
        print(llm.generate("The capital of France is")[0].text)

    model: folder, hub id, "demo" or "demo-dense". options: fields of `moestro.EngineConfig`; dtype may be a torch
    dtype. progress: called with (what, done, total) while loading. Raises a `moestro.MoestroError` that says what is
    wrong with the model or an option.
    """

    def __init__(self, model: str | Path = "demo", *, progress: Progress | None = None, **options: Any) -> None:
        if isinstance(dtype := options.get("dtype"), torch.dtype):
            options["dtype"] = str(dtype).removeprefix("torch.")
        self._loop = EngineLoop(EngineConfig.from_options(model=str(model), **options), progress)
        self._ids = (f"llm-{i}" for i in itertools.count())
        self._inboxes: dict[str, deque[Delta]] = {}

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._loop.tokenizer

    @property
    def info(self) -> ModelInfo:
        """What was loaded, what the engine decided by itself, and which kernels it chose."""
        return self._loop.info

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[GenerationResult]:
        """Continue one prompt or several, batched; results in the order of the prompts.

        prompts: a text, a list of token ids, or a list of either. params: one for all, or one a prompt.
        Raises RequestError before anything runs when a prompt or parameter cannot be served. A completion whose
        finish_reason is "error" broke while it ran; the others are whole.
        """
        many = _as_list(prompts)
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(many)
        if len(each) != len(many):
            raise RequestError(
                f"{len(each)} sampling parameters for {len(many)} prompts; give one for all or one a prompt", "params"
            )
        requests = [self._request(prompt, p) for prompt, p in zip(many, each, strict=True)]
        results = {
            r.request_id: GenerationResult(r.request_id, r.prompt_token_ids, [Completion(i) for i in range(r.params.n)])
            for r in requests
        }
        for delta in self._run(requests):
            results[delta.request_id].apply_(delta)
        return list(results.values())

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """Continue one prompt, a delta at a time. Closing the iterator stops the work."""
        return self._run([self._request(prompt, params or SamplingParams())])

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits float32 [T, V] of every position of a token sequence. Raises RequestError when it does not fit the
        context.
        """
        return self._loop.logits([int(i) for i in token_ids])

    def stats(self) -> EngineStats:
        """Present state and counters of the engine."""
        return self._loop.stats()

    def expert_loads(self) -> dict[str, Any]:
        """(token, choice) pairs a MoE layer and expert since start; keys as in `GET /moe/loads`."""
        return self._loop.expert_loads()

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("this model has no tokenizer files; give the prompt as token ids", "prompt")
            ids = self.tokenizer.encode(prompt)
        else:
            ids = [int(i) for i in prompt]
        return Request(next(self._ids), ids, params)

    def _run(self, requests: list[Request]) -> Iterator[Delta]:
        """Deltas of these requests. A step serves all that are open; what belongs to others waits for them."""
        inbox: deque[Delta] = deque()
        to_come = {(r.request_id, index) for r in requests for index in range(r.params.n)}
        try:
            for request in requests:
                self._loop.add(request)
                self._inboxes[request.request_id] = inbox
            while to_come:
                while not inbox:
                    for delta in self._loop.step():
                        self._inboxes[delta.request_id].append(delta)
                delta = inbox.popleft()
                if delta.finish_reason is not None:
                    to_come.discard((delta.request_id, delta.index))
                yield delta
        finally:
            for request in requests:
                self._loop.abort(request.request_id)
                self._inboxes.pop(request.request_id, None)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """The prompts one by one: a text or a list of ids is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    many: list[Any] = list(prompts)
    return many if all(isinstance(p, str | Sequence) for p in many) else [many]
