"""From single requests to the figures that are told: percentiles, rates, goodput, errors by kind. And two runs side by
side."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from moestro.bench.client import Outcome
from moestro.bench.run import Run

PERCENTILES = (50, 90, 95, 99)


def quantiles(values: list[float]) -> dict[str, float] | None:
    """Mean, largest and P50, P90, P95, P99 (nearest rank); None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    named = {f"p{p}": ordered[max(0, -(-p * len(ordered) // 100) - 1)] for p in PERCENTILES}
    return {"mean": sum(ordered) / len(ordered), **named, "max": ordered[-1]}


def summarize(run: Run, overhead: dict[str, Any] | None = None) -> dict[str, Any]:
    """A JSON-ready account of a run. Latencies are those of good answers; itl_ms is of single gaps between events with
    text, tpot_ms the mean time a token of one answer after its first.
    """
    good = [o for o in run.outcomes if o.error is None]
    seconds = max(run.ended_s - run.started_s, 1e-9)
    within = [o for o in good if _is_within(o, run)]
    lateness = [(o.sent_at_s - o.planned_at_s) * 1000 for o in run.outcomes if o.planned_at_s is not None]
    num_out = sum(o.num_tokens for o in good)
    num_in = sum(o.prompt_tokens or 0 for o in good)
    return {
        "url": run.url,
        "model": run.model,
        "options": asdict(run.config) | {"trace": Path(run.config.trace).name if run.config.trace else None},
        "fields_sent": run.extras,
        "duration_s": seconds,
        "requests": len(run.outcomes),
        "completed": len(good),
        "errors": dict(Counter(o.error for o in run.outcomes if o.error is not None).most_common()),
        "error_examples": _examples(run.outcomes),
        "max_open": run.max_open,
        "request_rate": len(good) / seconds,
        "prompt_tokens": num_in,
        "output_tokens": num_out,
        "prompt_tokens_per_s": num_in / seconds,
        "output_tokens_per_s": num_out / seconds,
        "ttft_ms": quantiles([o.ttft_s * 1000 for o in good if o.ttft_s is not None]),
        "itl_ms": quantiles([gap for o in good for gap in _gaps_ms(o)]),
        "tpot_ms": quantiles([t for o in good if (t := _tpot_ms(o)) is not None]),
        "e2e_ms": quantiles([(o.ended_at_s - o.sent_at_s) * 1000 for o in good]),
        "refusal_ms": quantiles([(o.ended_at_s - o.sent_at_s) * 1000 for o in run.outcomes if o.status in (429, 503)]),
        "goodput": {
            "limits": {
                "ttft_s": run.config.ttft_limit_s,
                "tpot_s": run.config.tpot_limit_s,
                "e2e_s": run.config.e2e_limit_s,
            },
            "requests": len(within),
            "share": len(within) / len(run.outcomes) if run.outcomes else 0.0,
            "request_rate": len(within) / seconds,
        },
        "send_lateness_ms": quantiles(lateness),
        "client_overhead": overhead,
    }


def timeline(run: Run) -> list[dict[str, Any]]:
    """One row a request: when, how long, how it ended. Times in seconds from the start."""
    return [
        {
            "number": o.number,
            "sent_s": round(o.sent_at_s - run.started_s, 4),
            "ttft_s": None if o.ttft_s is None else round(o.ttft_s, 4),
            "e2e_s": round(o.ended_at_s - o.sent_at_s, 4),
            "prompt_tokens": o.prompt_tokens,
            "output_tokens": o.num_tokens,
            "status": o.status,
            "error": o.error,
        }
        for o in run.outcomes
    ]


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[tuple[str, float, float, float | None]]:
    """(figure, before, after, after/before - 1) of all figures that both have; None where before is 0."""
    rows = []
    for name, old in _figures(before).items():
        new = _figures(after).get(name)
        if new is not None:
            rows.append((name, old, new, new / old - 1 if old else None))
    return rows


def _figures(summary: dict[str, Any]) -> dict[str, float]:
    flat: dict[str, float] = {}
    for name in ("requests", "completed", "request_rate", "output_tokens_per_s", "prompt_tokens_per_s"):
        flat[name] = summary[name]
    flat["goodput share"] = summary["goodput"]["share"]
    for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"):
        for part in ("mean", *(f"p{p}" for p in PERCENTILES)):
            if summary.get(name):
                flat[f"{name} {part}"] = summary[name][part]
    return flat


def _gaps_ms(outcome: Outcome) -> list[float]:
    return [(b - a) * 1000 for a, b in pairwise(outcome.event_times_s)]


def _tpot_ms(outcome: Outcome) -> float | None:
    if outcome.num_tokens < 2 or len(outcome.event_times_s) < 2:
        return None
    return (outcome.event_times_s[-1] - outcome.event_times_s[0]) * 1000 / (outcome.num_tokens - 1)


def _is_within(outcome: Outcome, run: Run) -> bool:
    config, tpot = run.config, _tpot_ms(outcome)
    return (
        outcome.ttft_s is not None
        and outcome.ttft_s <= config.ttft_limit_s
        and (tpot is None or tpot <= config.tpot_limit_s * 1000)
        and (config.e2e_limit_s is None or outcome.ended_at_s - outcome.sent_at_s <= config.e2e_limit_s)
    )


def _examples(outcomes: list[Outcome]) -> dict[str, str]:
    found: dict[str, str] = {}
    for outcome in outcomes:
        if outcome.error is not None and outcome.detail:
            found.setdefault(outcome.error, outcome.detail)
    return found
