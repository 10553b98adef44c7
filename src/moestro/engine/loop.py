"""The engine's loop: plan a step, run it, choose tokens, commit, and tell the callers what is new.

R rows with logits, V vocabulary.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

from moestro.engine.config import EngineConfig
from moestro.engine.load import Engine, Progress, load_engine
from moestro.engine.request import Delta, PositionLogprobs, Request, SamplingParams, TokenLogprob
from moestro.engine.sampler import Choice, Sampled, position_logprobs
from moestro.engine.scheduler import ScheduledSequence, Scheduler, StepPlan
from moestro.engine.sequence import Sequence
from moestro.engine.stats import EngineStats, ModelInfo
from moestro.errors import RequestError
from moestro.kv.pages import PagePool
from moestro.text.grammar import Grammar, GrammarCompiler
from moestro.text.stream import TextStream
from moestro.text.tokenizer import Tokenizer


@dataclass
class _Step:
    """A step in flight. sampling: the sequences that choose a token, in the order of the choice's rows."""

    plan: StepPlan
    sampling: list[Sequence]
    chosen: Choice
    ran_ahead: bool = False

    @property
    def sequences(self) -> list[Sequence]:
        return [item.sequence for item in self.plan.scheduled]


class EngineLoop:
    """Requests in, deltas out, one step at a time. Not thread-safe: one owner calls it."""

    def __init__(self, config: EngineConfig, progress: Progress | None = None) -> None:
        """Loads the model; raises what `load_engine` raises."""
        self._engine: Engine = load_engine(config, progress)
        resolved = self._engine.resolved
        self._pool = PagePool(resolved.num_pages, config.block_size, prefix_caching=config.enable_prefix_caching)
        self._scheduler = Scheduler(
            self._pool, max_num_seqs=resolved.max_num_seqs, max_num_batched_tokens=resolved.max_num_batched_tokens
        )
        self._open: dict[str, dict[int, Sequence]] = {}
        self._streams: dict[tuple[str, int], TextStream] = {}
        self._prompt_logprobs: dict[str, list[PositionLogprobs | None]] = {}
        self._seeds = random.Random(config.seed)
        self._grammars: dict[tuple[str, int], Grammar] = {}
        self._compiler = GrammarCompiler(self.tokenizer, self._engine.spec.vocab_size, self._engine.end_ids)
        self._in_step: list[Sequence] = []
        self._ahead: _Step | None = None

    @property
    def info(self) -> ModelInfo:
        return self._engine.info

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._engine.tokenizer

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or self._ahead is not None

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError, naming the field, when it can never be served."""
        self._check(request)
        params = request.params
        wanted = params.structured_outputs
        grammars = [self._compiler.start(wanted) for _ in range(params.n)] if wanted is not None else []
        room = self._engine.resolved.max_model_len - len(request.prompt_token_ids)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        sequences = {}
        for index in range(params.n):
            sequence = Sequence(
                request,
                index,
                seed=seed,
                end_ids=self._engine.end_ids,
                max_tokens=max_tokens,
                uses_long_rope=self._is_long(len(request.prompt_token_ids) + max_tokens),
            )
            if self.tokenizer is not None:
                self._streams[sequence.key] = TextStream(
                    self.tokenizer, params.stop, params.include_stop_str_in_output, params.skip_special_tokens
                )
            if grammars:
                self._grammars[sequence.key] = grammars[index]
            sequences[index] = sequence
            self._scheduler.add(sequence)
        self._open[request.request_id] = sequences

    def abort(self, request_id: str) -> None:
        """Stop all completions of a request and free their pages. A request that is not open is no error."""
        for sequence in self._open.get(request_id, {}).values():
            sequence.finish("abort")
        self._forget(self._scheduler.collect_finished())

    def step(self) -> list[Delta]:
        """Compute one step and return what it added to each completion; empty when there is nothing to do.

        On a GPU the next step is planned and launched before this one's tokens are looked at, wherever choosing them
        needs nothing from the host: the device does not wait for Python.
        """
        self._in_step = [] if self._ahead is None else self._ahead.sequences
        step, self._ahead = self._ahead or self._launch(), None
        if step is None:
            return []
        if step.chosen.runs_ahead:
            self._scheduler.run_ahead(step.plan)
            step.ran_ahead = True
            self._ahead = self._launch()
        return self._finish(step)

    def _launch(self) -> _Step | None:
        """Plan a step and start it."""
        plan = self._scheduler.plan_step()
        if not plan.scheduled:
            return None
        self._in_step = self._in_step + [item.sequence for item in plan.scheduled]
        logits_RV = self._engine.runner.run(plan)
        sampling = [item.sequence for item in plan.scheduled if item.samples]
        self._collect_prompt_logprobs(plan, logits_RV)
        rows = _sampling_rows(plan)
        if len(rows) != logits_RV.shape[0]:
            logits_RV = logits_RV[rows]
        return _Step(plan, sampling, self._engine.runner.choose(logits_RV, sampling, self._grammars))

    def _finish(self, step: _Step) -> list[Delta]:
        """Wait for a step's tokens and take them in."""
        results = zip(step.sampling, step.chosen.wait(), strict=True)
        sampled = {sequence: result for sequence, result in results if not sequence.finished}
        for sequence, result in sampled.items():
            if result.token_id is None:
                sequence.finish("error")
        chosen = [_tokens(sampled.get(item.sequence)) for item in step.plan.scheduled]
        self._scheduler.commit(step.plan, chosen, ran_ahead=step.ran_ahead)
        deltas = [self._delta(sequence, result) for sequence, result in sampled.items()]
        self._forget(self._scheduler.collect_finished())
        return deltas

    def fail_step(self, message: str) -> list[Delta]:
        """End the completions of the steps that broke with an error; all others stay."""
        deltas = []
        self._ahead = None
        for sequence in self._in_step or list(self._scheduler.running):
            if sequence.finished:
                continue
            sequence.finish("error")
            deltas.append(Delta(*sequence.key, finish_reason="error", error=message))
        self._in_step = []
        self._forget(self._scheduler.collect_finished())
        return deltas

    def stats(self) -> EngineStats:
        """The present state and all counters."""
        s, pool = self._scheduler.stats, self._pool
        size = pool.page_size
        empty = sum(len(x.pages) * size - x.num_computed for x in self._scheduler.running)  # shared pages are full
        return EngineStats(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            kv_pages_total=pool.num_pages,
            kv_pages_used=pool.num_used,
            kv_usage=pool.num_used / pool.num_pages,
            kv_waste=empty / (pool.num_used * size) if pool.num_used else 0.0,
            preemptions=s.preemptions,
            prefix_queries=s.prefix_queries,
            prefix_hits=s.prefix_hits,
            resumed_prefix_hits=s.resumed_prefix_hits,
            prompt_tokens=s.prompt_tokens,
            generation_tokens=s.generation_tokens,
            steps=self._engine.runner.steps,
            finished=dict(s.finished),
        )

    def expert_loads(self) -> dict[str, Any]:
        """What the experts have computed since start: see `ExpertCounters` for what counts.

        loads: (token, choice) pairs a MoE layer and logical expert; layers: the indices of these layers; tokens: tokens
        that went through each; top_k, num_experts: 0 for a model without experts.
        """
        counters = self._engine.runner.counters
        loads = [] if counters is None else counters.tokens()
        return {
            "window": "total",
            "tokens": sum(loads[0]) // self.info.top_k if loads else 0,
            "top_k": self.info.top_k,
            "num_experts": self.info.num_experts,
            "layers": self.info.moe_layers,
            "loads": loads,
        }

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """Logits float32 [T, V] of every position of a text, computed in chunks as prompts are.

        Needs free pages for all of it; raises RequestError when the ids or their number do not fit.
        """
        request = Request("logits", token_ids, SamplingParams(max_tokens=1))
        self._check(request, room_for=0)
        pages = self._pool.allocate(self._pool.pages_for(len(token_ids)))
        if pages is None:
            raise RequestError(f"{len(token_ids)} tokens do not fit beside the requests that are running", "prompt")
        sequence = Sequence(request, 0, seed=0, uses_long_rope=self._is_long(len(token_ids)))
        sequence.pages = pages
        size = self._engine.resolved.max_num_batched_tokens
        parts = []
        try:
            for start in range(0, len(token_ids), size):
                count = min(size, len(token_ids) - start)
                plan = StepPlan((ScheduledSequence(sequence, start, count, count, False),))
                parts.append(self._engine.runner.run(plan))
        finally:
            self._pool.release(pages)
        return torch.cat(parts)

    def _is_long(self, num_tokens: int) -> bool:
        return self._engine.long_from is not None and num_tokens > self._engine.long_from

    def _check(self, request: Request, room_for: int = 1) -> None:
        ids, limit = request.prompt_token_ids, self._engine.resolved.max_model_len
        if request.request_id in self._open:
            raise RequestError(f"a request with id {request.request_id!r} is open already", "request_id")
        if not ids:
            raise RequestError("the prompt is empty; it needs at least one token", "prompt")
        vocab_size = self._engine.spec.vocab_size
        wrong = next((i for i in ids if not isinstance(i, int) or not 0 <= i < vocab_size), None)
        if wrong is not None:
            raise RequestError(f"token id {wrong!r} is not in the model's vocabulary of {vocab_size}", "prompt")
        if len(ids) + room_for > limit:
            raise RequestError(
                f"the prompt has {len(ids)} tokens; the context of {limit} leaves room for at most {limit - room_for}",
                "prompt",
            )
        params = request.params
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this model has none; use stop_token_ids", "stop")
        for field, values in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            beyond = next((i for i in values if i >= vocab_size), None)
            if beyond is not None:
                raise RequestError(f"{field} names token {beyond}; the model's vocabulary has {vocab_size}", field)

    def _collect_prompt_logprobs(self, plan: StepPlan, logits_RV: torch.Tensor) -> None:
        row = 0
        for item in plan.scheduled:
            sequence, top = item.sequence, item.sequence.request.params.prompt_logprobs
            if sequence.wants_prompt_logprobs and top is not None:
                if item.start == 0:  # also after a preemption, which starts the prompt again
                    self._prompt_logprobs[sequence.request.request_id] = [None]
                found = self._prompt_logprobs[sequence.request.request_id]
                targets = sequence.token_ids[
                    item.start + 1 : min(item.start + item.num_tokens + 1, sequence.num_prompt)
                ]
                logprobs = torch.log_softmax(logits_RV[row : row + len(targets)], dim=-1)
                found += [self._named(position_logprobs(p, t, top)) for p, t in zip(logprobs, targets, strict=True)]
            row += item.num_logits

    def _delta(self, sequence: Sequence, result: Sampled) -> Delta:
        delta = Delta(*sequence.key, num_cached_tokens=sequence.num_cached)
        if result.token_id is None:
            delta.finish_reason, delta.error = "error", result.error
            return delta
        delta.token_ids = [result.token_id]
        if result.logprobs is not None:
            delta.logprobs = [self._named(result.logprobs)]
        if sequence.num_output == 1 and sequence.index == 0:
            delta.prompt_logprobs = self._prompt_logprobs.pop(sequence.request.request_id, None)
        stream = self._streams.get(sequence.key)
        if stream is not None:
            matched = None
            if sequence.finish_reason != "stop":  # the token that ends a text is not part of it
                delta.text, matched = stream.push([result.token_id])
            if matched is not None:
                sequence.finish_reason, sequence.stop_reason = "stop", matched
            elif self._is_complete(sequence, result.token_id) or sequence.finished:
                delta.text += stream.flush()
        delta.finish_reason, delta.stop_reason = sequence.finish_reason, sequence.stop_reason
        return delta

    def _is_complete(self, sequence: Sequence, token_id: int) -> bool:
        """Take a token into the sequence's grammar; when nothing can follow, the sequence has come to its end."""
        grammar = self._grammars.get(sequence.key)
        if grammar is None or sequence.finish_reason == "stop":
            return False
        grammar.advance(token_id)
        if grammar.done and grammar.error is None:
            sequence.finish_reason = "stop"  # also when max_tokens are reached just here
            return True
        return False

    def _named(self, position: PositionLogprobs) -> PositionLogprobs:
        """The same with each token's text."""
        if self.tokenizer is None:
            return position
        text = self.tokenizer.token_text

        def named(t: TokenLogprob) -> TokenLogprob:
            return TokenLogprob(t.token_id, t.logprob, t.rank, text(t.token_id))

        return PositionLogprobs(named(position.chosen), [named(t) for t in position.top])

    def _forget(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            request_id = sequence.request.request_id
            self._streams.pop(sequence.key, None)
            self._grammars.pop(sequence.key, None)
            siblings = self._open[request_id]
            del siblings[sequence.index]
            if not siblings:
                del self._open[request_id]
                self._prompt_logprobs.pop(request_id, None)


def _sampling_rows(plan: StepPlan) -> list[int]:
    """The row of each sequence that chooses a token: the last of its rows."""
    rows, end = [], 0
    for item in plan.scheduled:
        end += item.num_logits
        if item.samples:
            rows.append(end - 1)
    return rows


def _tokens(result: Sampled | None) -> list[int]:
    return [] if result is None or result.token_id is None else [result.token_id]
