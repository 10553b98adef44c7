"""One load test: find out what the server understands, warm it up, send the requests, note every event."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from moestro.bench import arrivals as arrivals_module
from moestro.bench.arrivals import Arrival
from moestro.bench.client import Outcome, Server
from moestro.bench.config import BenchConfig
from moestro.bench.prompts import PromptMaker, calibrated
from moestro.errors import MoestroError, SettingError

Progress = Callable[[int, int, int], None]  # ended, failed of these, all
DEFAULT_NUM_REQUESTS = 100
DEFAULT_CONCURRENCY = 8
_PATHS = {"completions": "/completions", "chat": "/chat/completions"}
# Fields that not every server takes; each is left out where it is refused.
_EXTRAS: dict[str, Any] = {"stream_options": {"include_usage": True}, "ignore_eos": True}


@dataclass
class Run:
    """Everything that was measured. started_s: monotonic, when the first request could be sent."""

    config: BenchConfig
    url: str
    model: str
    outcomes: list[Outcome]
    started_s: float
    ended_s: float
    max_open: int
    extras: list[str] = field(default_factory=list)


async def run_bench(url: str, config: BenchConfig, api_key: str | None = None, progress: Progress | None = None) -> Run:
    """Run the load test. Raises SettingError for options or a trace that cannot be used, MoestroError when the server
    does not answer the warm-up.
    """
    server = Server(url, api_key, config.timeout_s)
    plan = planned(config)
    model = config.model or await _first_model(server, url)
    sender = _Sender(server, config, model)
    await sender.settle()
    for number in range(config.warmup_requests):
        await sender.send(-1 - number, replace(plan[number % len(plan)], at_s=None), None)
    started_s = time.monotonic()
    outcomes, max_open = await (_open_loop if config.open_loop else _closed_loop)(sender, plan, config, progress)
    return Run(config, url, model, outcomes, started_s, time.monotonic(), max_open, list(sender.extras))


def planned(config: BenchConfig) -> list[Arrival]:
    """The requests that a configuration asks for, in order of sending. Raises SettingError."""
    if config.trace is not None:
        plan = arrivals_module.shaped(
            arrivals_module.read_trace(config.trace),
            num_requests=config.num_requests,
            duration_s=config.duration_s,
            time_scale=config.time_scale,
            length_scale=config.length_scale,
            max_prompt_tokens=config.prompt_tokens,
            max_output_tokens=config.output_tokens,
        )
        if not plan:
            raise SettingError(f"no request of the trace is within duration_s={config.duration_s}")
        return plan
    number = config.num_requests or DEFAULT_NUM_REQUESTS
    if config.rate is not None:
        return arrivals_module.poisson(config.rate, number, config.prompt_tokens, config.output_tokens, config.seed)
    return arrivals_module.closed(number, config.prompt_tokens, config.output_tokens)


class _Sender:
    """Makes bodies that this server understands, and sends them."""

    def __init__(self, server: Server, config: BenchConfig, model: str) -> None:
        self._server = server
        self._config = config
        self._model = model
        self._maker = PromptMaker(config.seed, block_scale=config.length_scale)
        self.extras = dict(_EXTRAS) if config.ignore_eos else {"stream_options": _EXTRAS["stream_options"]}

    async def settle(self) -> None:
        """Find out which fields the server takes and how many tokens its words have."""
        counts = []
        for num_words in (8, 40):
            outcome = await self._first_answer(Arrival(None, num_words, 1))
            counts.append((num_words, outcome.prompt_tokens))
        (short, few), (long, many) = counts
        if few is not None and many is not None:
            self._maker = calibrated(self._maker, (short, few), (long, many))

    async def _first_answer(self, arrival: Arrival) -> Outcome:
        while True:
            outcome = await self.send(0, arrival, None)
            if outcome.error is None:
                return outcome
            if outcome.status in (400, 422, 501) and self.extras:
                named = next((name for name in self.extras if name in outcome.detail), list(self.extras)[-1])
                del self.extras[named]
                continue
            detail = f": {outcome.detail}" if outcome.detail else ""
            raise MoestroError(f"the server does not answer a first request: {outcome.error}{detail}")

    async def send(self, number: int, arrival: Arrival, planned_at_s: float | None) -> Outcome:
        prompt = self._maker.prompt(number, arrival)
        content: dict[str, Any] = {"prompt": prompt}
        if self._config.endpoint == "chat":
            content = {"messages": [{"role": "user", "content": prompt}]}
        body = {
            "model": self._model,
            **content,
            "max_tokens": arrival.output_tokens,
            "temperature": self._config.temperature,
            "stream": True,
            **self.extras,
        }
        return await self._server.stream(_PATHS[self._config.endpoint], body, Outcome(number, planned_at_s))


async def _first_model(server: Server, url: str) -> str:
    try:
        status, body = await server.get("/models")
    except (OSError, TimeoutError) as error:
        raise MoestroError(f"nobody answers at {url}: {error}") from None
    models = body.get("data") if isinstance(body, dict) else None
    if status != 200 or not models:
        raise MoestroError(f"{url} lists no models (HTTP {status}); name one with --model")
    return str(models[0]["id"])


async def _open_loop(
    sender: _Sender, plan: list[Arrival], config: BenchConfig, progress: Progress | None
) -> tuple[list[Outcome], int]:
    """Send each request at its time, whatever has become of those before."""
    board = _Board(len(plan), progress)
    start_s = time.monotonic()

    async def one(number: int, arrival: Arrival) -> None:
        planned_at_s = start_s + (arrival.at_s or 0.0)
        await asyncio.sleep(max(0.0, planned_at_s - time.monotonic()))
        with board:
            board.note(await sender.send(number, arrival, planned_at_s))

    # Tasks are made a little before their time: a task for each request of a long trace would be many at once.
    tasks: set[asyncio.Task[None]] = set()
    for number, arrival in enumerate(plan):
        await asyncio.sleep(max(0.0, start_s + (arrival.at_s or 0.0) - 0.05 - time.monotonic()))
        task = asyncio.create_task(one(number, arrival))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    while tasks:
        await asyncio.wait(tasks)
    return board.sorted(), board.max_open


async def _closed_loop(
    sender: _Sender, plan: list[Arrival], config: BenchConfig, progress: Progress | None
) -> tuple[list[Outcome], int]:
    """Keep a fixed number of requests open."""
    board = _Board(len(plan), progress)
    todo = iter(enumerate(plan))

    async def worker() -> None:
        for number, arrival in todo:
            with board:
                board.note(await sender.send(number, arrival, None))

    await asyncio.gather(*(worker() for _ in range(config.concurrency or DEFAULT_CONCURRENCY)))
    return board.sorted(), board.max_open


class _Board:
    """Counts what is open and keeps what has ended."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total = total
        self._progress = progress
        self._outcomes: list[Outcome] = []
        self._failed = 0
        self._open = 0
        self.max_open = 0

    def __enter__(self) -> None:
        self._open += 1
        self.max_open = max(self.max_open, self._open)

    def __exit__(self, *_: object) -> None:
        self._open -= 1

    def note(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        self._failed += outcome.error is not None
        if self._progress is not None:
            self._progress(len(self._outcomes), self._failed, self._total)

    def sorted(self) -> list[Outcome]:
        return sorted(self._outcomes, key=lambda o: o.number)
