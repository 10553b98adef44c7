"""Every Prometheus metric, in one table; names are vLLM's with our prefix where they mean the same."""

from __future__ import annotations

import time
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from moestro.engine.request import Delta
from moestro.engine.stats import EngineStats

_SHORT_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5)
_LONG_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 3, 5, 7.5, 10, 15, 20, 30, 60, 120, 300, 600)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)

_ENGINE_GAUGES = {
    "num_requests_running": ("num_running", "sequences being computed"),
    "num_requests_waiting": ("num_waiting", "sequences waiting to be computed"),
    "kv_cache_usage_perc": ("kv_usage", "share of the KV cache's pages in use, 0 to 1"),
    "kv_cache_waste_perc": ("kv_waste", "share of the token slots in used pages that hold nothing, 0 to 1"),
}
_GAUGES = {"engine_ready": "1 while the engine takes requests"}
_ENGINE_COUNTERS = {
    "prefix_cache_queries": ("prefix_queries", "prompt tokens looked up in the prefix cache"),
    "prefix_cache_hits": ("prefix_hits", "prompt tokens found in the prefix cache"),
    "prefix_cache_resumed_hits": ("resumed_prefix_hits", "tokens found again after a preemption"),
    "num_preemptions": ("preemptions", "sequences set back for want of KV cache"),
    "engine_steps": ("steps", "engine steps"),
}
_COUNTERS = {
    "prompt_tokens": "prompt tokens of requests whose answer began",
    "generation_tokens": "tokens generated",
    "engine_restarts": "times the engine process was started again",
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("from the request's arrival to its first token", _LONG_S),
    "inter_token_latency_seconds": ("between two tokens of a completion", _SHORT_S),
    "e2e_request_latency_seconds": ("from the request's arrival to its end", _LONG_S),
    "request_prompt_tokens": ("prompt tokens a request", _TOKENS),
    "request_generation_tokens": ("generated tokens a request", _TOKENS),
}
PREFIX = "moestro:"
_FINISHED = (PREFIX + "request_success", "requests by how they ended")
_EXPERT_SUM = (PREFIX + "expert_tokens", "tokens routed to the experts of a layer")
_EXPERT_MAX = (PREFIX + "expert_tokens_max", "tokens routed to a layer's busiest expert")


class Metrics:
    """The server's metrics, with the model's name as the label of all."""

    def __init__(self, model_name: str) -> None:
        self._registry = registry = CollectorRegistry()
        self._model = model_name
        model, by_layer = ("model_name",), ("model_name", "layer")
        gauges = {name: text for name, (_, text) in _ENGINE_GAUGES.items()} | _GAUGES
        counters = {name: text for name, (_, text) in _ENGINE_COUNTERS.items()} | _COUNTERS
        self._gauges = {n: Gauge(PREFIX + n, h, model, registry=registry).labels(model_name) for n, h in gauges.items()}
        self._counters = {
            n: Counter(PREFIX + n, h, model, registry=registry).labels(model_name) for n, h in counters.items()
        }
        self._histograms = {
            n: Histogram(PREFIX + n, h, model, buckets=buckets, registry=registry).labels(model_name)
            for n, (h, buckets) in _HISTOGRAMS.items()
        }
        self._restarts = self._counters["engine_restarts"]
        self._finished = {
            reason: counter.labels(model_name, reason)
            for counter in [Counter(*_FINISHED, (*model, "finished_reason"), registry=registry)]
            for reason in ("stop", "length", "abort", "error")
        }
        self._expert_sum = Counter(*_EXPERT_SUM, by_layer, registry=registry)
        self._expert_max = Gauge(*_EXPERT_MAX, by_layer, registry=registry)
        self._seen: EngineStats | None = None
        self._seen_loads: dict[int, int] = {}
        self._generation = 0

    def track(self) -> RequestMetrics:
        """Start the clock of one request."""
        return RequestMetrics(self)

    def page(self, stats: EngineStats, ready: bool, generation: int) -> bytes:
        """The text for Prometheus. generation: number of engine restarts; after each, its totals begin at zero."""
        self._restarts.inc(max(0, generation - self._generation))
        if generation != self._generation:
            self._generation, self._seen, self._seen_loads = generation, None, {}
        for name, (field, _) in _ENGINE_GAUGES.items():
            self._gauges[name].set(getattr(stats, field))
        self._gauges["engine_ready"].set(ready)
        for name, (field, _) in _ENGINE_COUNTERS.items():
            before = getattr(self._seen, field) if self._seen else 0
            self._counters[name].inc(max(0, getattr(stats, field) - before))
        self._seen = stats
        return generate_latest(self._registry)

    def update_loads(self, loads: dict[str, Any]) -> None:
        """Sum and largest of each layer's expert loads; the full matrix has too many series for Prometheus."""
        for layer, tokens in zip(loads["layers"], loads["loads"], strict=True):
            total = sum(tokens)
            self._expert_sum.labels(self._model, layer).inc(max(0, total - self._seen_loads.get(layer, 0)))
            self._expert_max.labels(self._model, layer).set(max(tokens, default=0))
            self._seen_loads[layer] = total


class RequestMetrics:
    """Clock and counts of one request; each series gets it once, at the latest when end() is called.

    reason: how it ended, None until then.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._arrival = time.monotonic()
        self._last: dict[int, float] = {}
        self._reasons: list[str] = []
        self.num_generated = 0
        self.first_token_s: float | None = None  # monotonic
        self.reason: str | None = None
        self._num_prompt: int | None = None
        self._ended = False

    def saw(self, delta: Delta, num_prompt_tokens: int) -> None:
        now = time.monotonic()
        histograms, counters = self._metrics._histograms, self._metrics._counters
        if delta.token_ids:
            if self._num_prompt is None:
                self._num_prompt, self.first_token_s = num_prompt_tokens, now
                histograms["time_to_first_token_seconds"].observe(now - self._arrival)
                histograms["request_prompt_tokens"].observe(num_prompt_tokens)
                counters["prompt_tokens"].inc(num_prompt_tokens)
            elif delta.index in self._last:
                gap = (now - self._last[delta.index]) / len(delta.token_ids)
                for _ in delta.token_ids:
                    histograms["inter_token_latency_seconds"].observe(gap)
            self._last[delta.index] = now
            self.num_generated += len(delta.token_ids)
            counters["generation_tokens"].inc(len(delta.token_ids))
        if delta.finish_reason is not None:
            self._reasons.append(delta.finish_reason)

    def end(self, num_completions: int) -> None:
        """Count the request as finished: once, as aborted unless all its completions came to their end."""
        if self._ended:
            return
        self._ended = True
        reason = "abort"
        if "error" in self._reasons:
            reason = "error"
        elif len(self._reasons) == num_completions and "abort" not in self._reasons:
            reason = "length" if "length" in self._reasons else "stop"
        self.reason = reason
        self._metrics._finished[reason].inc()
        self._metrics._histograms["e2e_request_latency_seconds"].observe(time.monotonic() - self._arrival)
        if self.num_generated:
            self._metrics._histograms["request_generation_tokens"].observe(self.num_generated)

    def failed(self) -> None:
        """The engine died under the request, which counts as an error."""
        self._reasons.append("error")
