"""The load test's options; the command's flags are generated from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from moestro.errors import SettingError


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """Raises SettingError for a value that cannot work. At most one of trace, rate and concurrency; concurrency 8 when
    there is none.
    """

    model: str | None = _option(None, "model to ask for; the first that the server lists when not given")
    endpoint: str = _option("completions", "completions or chat")
    trace: str | None = _option(None, "arrivals and lengths from a trace file: Azure's CSV or Mooncake's JSON lines")
    rate: float | None = _option(None, "requests a second, arriving at random (Poisson)")
    concurrency: int | None = _option(None, "requests open at any time, each sent when one has ended")
    num_requests: int | None = _option(None, "most requests; 100 where no trace says how many")
    duration_s: float | None = _option(None, "seconds of the trace's own time to use")
    time_scale: float = _option(1.0, "stretches a trace: 2 sends its requests in twice the time")
    length_scale: float = _option(1.0, "multiplies a trace's prompt and answer lengths")
    prompt_tokens: int = _option(256, "tokens a prompt where no trace says so; the limit where one does")
    output_tokens: int = _option(64, "tokens an answer where no trace says so; the limit where one does")
    warmup_requests: int = _option(2, "requests before the measurement, not counted")
    temperature: float = _option(0.0, "temperature of all requests")
    seed: int = _option(0, "seed of prompts and arrivals")
    ignore_eos: bool = _option(True, "ask for answers of full length, where the server knows how")
    timeout_s: float = _option(600.0, "seconds after which a request counts as failed")
    ttft_limit_s: float = _option(2.0, "goodput counts requests with the first token within this")
    tpot_limit_s: float = _option(0.2, "goodput counts requests with at most this a token after the first, on average")
    e2e_limit_s: float | None = _option(None, "goodput counts requests that end within this; no limit when not given")

    def __post_init__(self) -> None:
        if sum(x is not None for x in (self.trace, self.rate, self.concurrency)) > 1:
            raise SettingError("give one of trace, rate and concurrency")
        if self.endpoint not in ("completions", "chat"):
            raise SettingError(f"endpoint={self.endpoint!r} must be completions or chat")
        for name in ("num_requests", "concurrency", "prompt_tokens", "output_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SettingError(f"{name}={value} must be at least 1")
        if self.warmup_requests < 0:
            raise SettingError(f"warmup_requests={self.warmup_requests} must not be negative")
        for name in ("rate", "time_scale", "length_scale", "timeout_s", "duration_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise SettingError(f"{name}={value} must be more than 0")

    @property
    def open_loop(self) -> bool:
        """Whether requests are sent when the clock says so, and not when others have ended."""
        return self.trace is not None or self.rate is not None
