"""Replay ten minutes of a conversation trace against the demo model, at a sustainable rate and at twice that.

    python benchmarks/serving_trace.py TRACE.csv [--minutes 10] [--model demo]

The trace's arrivals are kept; its lengths shrink until a third of what the machine can do is asked for, which leaves
room for other work on it. Each answer is compared with what `LLM` gives for the same prompt offline, as text. The
second run compresses the same requests into less time, to twice what the machine can do: the server must refuse what it
cannot take, answer what it took, and keep its memory.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import threading
import time
from collections import Counter
from typing import Any

import httpx

from moestro.bench.arrivals import Arrival
from moestro.bench.client import Outcome
from moestro.bench.config import BenchConfig
from moestro.bench.overhead import client_overhead
from moestro.bench.report import html_report
from moestro.bench.run import Run, planned, run_bench
from moestro.bench.summary import summarize, timeline
from served import ServerProcess, served, write_result

FIRST_LENGTH_SCALE = 0.05
SUSTAINED_SHARE = 0.3
OPTIONS = (
    "--max-num-seqs",
    "32",
    "--max-queue",
    "128",
    "--kv-memory",
    "512MiB",
    "--max-model-len",
    "2048",
    "--no-access-log",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--model", default="demo")
    arguments = parser.parse_args()
    duration_s = arguments.minutes * 60
    with served(arguments.model, *OPTIONS) as server:
        scale, capacity = _length_scale(server, arguments.trace, duration_s)
        print(f"the machine does {capacity:.2f} requests/s at length scale {FIRST_LENGTH_SCALE}; using {scale:.3f}")
        config = _config(arguments.trace, duration_s, scale, 1.0)
        sustained, sustained_facts = _watched(server, config)
        double = _config(arguments.trace, duration_s, scale, SUSTAINED_SHARE / 2.0)
        overloaded, overloaded_facts = _watched(server, double)
        after = server.wait_idle()
    answers = _offline(arguments.model, config)
    result = {
        "command": f"python benchmarks/serving_trace.py TRACE --minutes {arguments.minutes:g}",
        "capacity_request_rate_at_first_scale": capacity,
        "length_scale": scale,
        "sustainable": _account(sustained, answers) | sustained_facts,
        "twice_the_sustainable": _account(overloaded, answers) | overloaded_facts,
        "kv_pages_in_use_afterwards": after["moestro:kv_cache_usage_perc"],
    }
    path = write_result("serving_trace", result)
    page = html_report(summarize(sustained), timeline(sustained))
    path.with_suffix(".html").write_text(page, encoding="utf-8")
    for name in ("sustainable", "twice_the_sustainable"):
        told = {k: v for k, v in result[name].items() if k != "summary"}  # type: ignore[index, union-attr]
        print(name, told)


def _config(trace: str, duration_s: float, scale: float, time_scale: float) -> BenchConfig:
    return BenchConfig(
        trace=trace,
        duration_s=duration_s,
        length_scale=scale,
        time_scale=time_scale,
        prompt_tokens=1500,
        output_tokens=400,
    )


def _length_scale(server: ServerProcess, trace: str, duration_s: float) -> tuple[float, float]:
    """How far to shrink the trace, and the requests a second that the machine did at the first guess."""
    config = _config(trace, duration_s, FIRST_LENGTH_SCALE, 1e-6)
    rate = 0.0
    for seed in (1, 2):  # the first time warms up; other prompts each time, which no cache holds
        run = asyncio.run(run_bench(server.url, BenchConfig(**vars(config) | {"num_requests": 90, "seed": seed})))
        rate = summarize(run)["request_rate"]
    wanted = len(planned(config)) / duration_s
    return min(1.0, FIRST_LENGTH_SCALE * SUSTAINED_SHARE * rate / wanted), rate


def _watched(server: ServerProcess, config: BenchConfig) -> tuple[Run, dict[str, Any]]:
    """The run, with memory and answers of /health noted meanwhile."""
    memory, health_s, stop = [], [], threading.Event()

    def watch() -> None:
        with httpx.Client(trust_env=False, timeout=30) as http:
            while not stop.wait(1.0):
                started = time.monotonic()
                http.get(f"{server.url}/health").raise_for_status()
                health_s.append(time.monotonic() - started)
                memory.append(server.memory_bytes())

    files = server.open_files()
    watcher = threading.Thread(target=watch)
    watcher.start()
    run = asyncio.run(run_bench(server.url, config))
    stop.set()
    watcher.join()
    server.wait_idle()
    time.sleep(1.0)
    tenth = max(1, len(memory) // 10)
    return run, {
        "summary": summarize(run, asyncio.run(client_overhead(min(64, run.max_open)))),
        "memory_mib": {
            "first_tenth": max(memory[:tenth]) >> 20,
            "last_tenth": max(memory[-tenth:]) >> 20,
            "largest": max(memory) >> 20,
        },
        "health_ms_max": max(health_s) * 1000,
        "open_files_before_and_after": [files, server.open_files()],
    }


def _account(run: Run, answers: list[str]) -> dict[str, Any]:
    """Requests by what became of them: right, wrong or lost, or refused at the door."""

    def kind(outcome: Outcome) -> str:
        if outcome.error is None:
            return "right" if outcome.text == answers[outcome.number] else "wrong"
        return f"refused with {outcome.status}" if outcome.status in (429, 503) else f"lost: {outcome.error}"

    refused_without_retry = sum(o.status in (429, 503) and o.retry_after is None for o in run.outcomes)
    wrong = [
        {"number": o.number, "served": o.text, "offline": answers[o.number]} for o in run.outcomes if kind(o) == "wrong"
    ]
    return {
        "became": dict(Counter(map(kind, run.outcomes))),
        "wrong": wrong[:20],
        "refused_without_retry_after": refused_without_retry,
    }


def _offline(model: str, config: BenchConfig) -> list[str]:
    """The answers of `LLM` in a process of its own, after the server has gone."""
    import json

    job = {"model": model, "config": vars(config)}
    done = subprocess.run(
        [sys.executable, __file__, "--offline"], input=json.dumps(job), capture_output=True, text=True, check=True
    )
    answers: list[str] = json.loads(done.stdout.splitlines()[-1])
    return answers


def _answer_offline() -> None:
    import json

    from moestro import LLM, SamplingParams
    from moestro.bench.prompts import PromptMaker, calibrated

    job = json.load(sys.stdin)
    config = BenchConfig(**job["config"])
    llm = LLM(job["model"], max_num_seqs=64, max_model_len=2048)
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    maker = PromptMaker(config.seed, block_scale=config.length_scale)
    counts = [(n, len(tokenizer.encode(maker.prompt(0, Arrival(None, n, 1))))) for n in (8, 40)]
    maker = calibrated(maker, *counts)
    plan = planned(config)
    prompts = [maker.prompt(number, arrival) for number, arrival in enumerate(plan)]
    params = [SamplingParams(temperature=0, max_tokens=a.output_tokens, ignore_eos=True) for a in plan]
    print(json.dumps([result.text for result in llm.generate(prompts, params)]))


if __name__ == "__main__":
    if sys.argv[1:] == ["--offline"]:
        _answer_offline()
    else:
        main()
