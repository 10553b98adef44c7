"""An engine loop without a model: it says what the prompt tells it to, token by token.

An answer is the prompt read backwards, over and over. Some prompts misbehave on purpose: those that begin with slow,
refuse, die and raise.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from moestro.engine.config import EngineConfig
from moestro.engine.request import Delta, PositionLogprobs, Request, TokenLogprob
from moestro.engine.stats import EngineStats, ModelInfo
from moestro.errors import CheckpointError, RequestError
from moestro.text.stream import TextStream
from moestro.text.tokenizer import Tokenizer

MAX_MODEL_LEN = 64
VOCAB_SIZE = 260
STEP_S = 0.002
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def make_tokenizer() -> Backend:
    """One token a byte, so that tests can count; ids 0..255 are the alphabet in its own order, 256 ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>", "<pad>"])
    return backend


class FakeLoop:
    def __init__(self, config: EngineConfig) -> None:
        if config.model.endswith("broken"):
            raise CheckpointError("tensor model.norm.weight is missing")
        if config.model == "slow to load":
            time.sleep(60)
        if config.model.endswith("crash"):
            os._exit(3)
        self.tokenizer = Tokenizer.load(config.model)
        self.info = ModelInfo(
            name="fake",
            folder=config.model,
            family="fake",
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            num_experts=4,
            top_k=2,
            moe_layers=[0, 1],
            created=0,
            decisions=[],
            kernels=[],
            max_num_seqs=config.max_num_seqs or 64,
        )
        self._active: dict[tuple[str, int], dict[str, Any]] = {}
        self._counts: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()

    @property
    def has_work(self) -> bool:
        return bool(self._active)

    def add(self, request: Request) -> None:
        if self._text(request).startswith("refuse"):
            raise RequestError("prompt is larger than the KV cache", "prompt")
        self._counts["prompt_tokens"] += len(request.prompt_token_ids)
        for index in range(request.params.n):
            p = request.params
            stream = self.tokenizer and TextStream(
                self.tokenizer, p.stop, p.include_stop_str_in_output, p.skip_special_tokens
            )
            self._active[request.request_id, index] = {"request": request, "made": 0, "stream": stream}

    def abort(self, request_id: str) -> None:
        keys = [key for key in self._active if key[0] == request_id]
        for key in keys:
            del self._active[key]
        if keys:
            self._finished["abort"] += 1

    def step(self) -> list[Delta]:
        slow = any(self._text(entry["request"]).startswith("slow") for entry in self._active.values())
        time.sleep(0.05 if slow else STEP_S)
        self._counts["steps"] += 1
        texts = [self._text(entry["request"]) for entry in self._active.values()]
        if any(text.startswith("die") for text in texts):
            os._exit(9)
        if any(text.startswith("raise") for text in texts):
            raise RuntimeError("a bug in /secret/path")
        return [self._advance(key) for key in list(self._active)]

    def fail_step(self, message: str) -> list[Delta]:
        keys, self._active = list(self._active), {}
        return [Delta(request_id, index, finish_reason="error", error=message) for request_id, index in keys]

    def stats(self) -> EngineStats:
        num = len(self._active)
        return EngineStats(num, 0, 100, num, num / 100, 0.0, finished=dict(self._finished), **self._counts)

    def expert_loads(self) -> dict[str, Any]:
        return {
            "window": "total",
            "tokens": 3,
            "top_k": 2,
            "num_experts": 4,
            "layers": [0, 1],
            "loads": [[3, 1, 1, 1]] * 2,
        }

    def _advance(self, key: tuple[str, int]) -> Delta:
        entry = self._active[key]
        request: Request = entry["request"]
        prompt, params = request.prompt_token_ids, request.params
        token = prompt[-1 - entry["made"] % len(prompt)]
        entry["made"] += 1
        self._counts["generation_tokens"] += 1
        delta = Delta(*key, token_ids=[token], num_cached_tokens=min(8, len(prompt) - 1))
        delta.text, stop = entry["stream"].push([token]) if entry["stream"] else ("", None)
        if params.logprobs is not None:
            delta.logprobs = [self._logprobs(token, params.logprobs)]
        if entry["made"] == 1 and key[1] == 0 and params.prompt_logprobs is not None:
            delta.prompt_logprobs = [None, *(self._logprobs(t, params.prompt_logprobs) for t in prompt[1:])]
        if stop is not None:
            delta.finish_reason, delta.stop_reason = "stop", stop
        elif entry["made"] == min(params.max_tokens or MAX_MODEL_LEN, MAX_MODEL_LEN - len(prompt)):
            delta.finish_reason = "length"
            delta.text += entry["stream"].flush() if entry["stream"] else ""
        if delta.finish_reason is not None:
            del self._active[key]
            self._finished[delta.finish_reason] += 1
        return delta

    def _logprobs(self, token: int, num: int) -> PositionLogprobs:
        """The chosen token is never among the likeliest, and one of those is impossible (C89)."""
        others = [
            TokenLogprob(33 + i, -0.5 * i if i else -math.inf, i + 1, self._token_text(33 + i)) for i in range(num)
        ]
        return PositionLogprobs(TokenLogprob(token, -7.0, 100, self._token_text(token)), others)

    def _token_text(self, token: int) -> str:
        return self.tokenizer.token_text(token) if self.tokenizer else ""

    def _text(self, request: Request) -> str:
        return self.tokenizer.decode(request.prompt_token_ids) if self.tokenizer else ""


def make_loop(config: EngineConfig) -> FakeLoop:
    return FakeLoop(config)
