"""When requests arrive and how long they are: from a trace, at random, or as fast as answers come back."""

from __future__ import annotations

import csv
import datetime
import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moestro.errors import SettingError

MOONCAKE_BLOCK_TOKENS = 512


@dataclass(frozen=True)
class Arrival:
    """One request to come. at_s: from the start; None for "as soon as there is room" (fixed concurrency).

    blocks: ids of the prompt's blocks of 512 tokens, equal ids meaning equal text; None for a prompt of its own.
    """

    at_s: float | None
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] | None = None


def read_trace(path: str | Path) -> list[Arrival]:
    """A trace in Azure's format (CSV: arrival_s or TIMESTAMP, prompt_tokens or ContextTokens, output_tokens or
    GeneratedTokens) or Mooncake's (JSON lines: timestamp in ms, input_length, output_length, hash_ids).

    Times begin at 0. Raises SettingError naming the line that cannot be read.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise SettingError(f"trace {str(path)!r} cannot be read: {reason}") from None
    if not lines:
        raise SettingError(f"trace {str(path)!r} is empty")
    rows = _mooncake(lines, path) if lines[0].lstrip().startswith("{") else _azure(lines, path)
    if not rows:
        raise SettingError(f"trace {str(path)!r} has no request")
    rows.sort(key=_time)
    first = _time(rows[0])
    return [replace(row, at_s=_time(row) - first) for row in rows]


def shaped(
    arrivals: list[Arrival],
    *,
    num_requests: int | None = None,
    duration_s: float | None = None,
    time_scale: float = 1.0,
    length_scale: float = 1.0,
    max_prompt_tokens: int | None = None,
    max_output_tokens: int | None = None,
) -> list[Arrival]:
    """The part of a trace that is asked for: its beginning, stretched, with shorter prompts and answers.

    duration_s: of the trace's own time. time_scale: 2 makes a request arrive after twice the time. length_scale:
    multiplies prompts and answers, before the limits. Shared prefixes shrink with the prompts.
    """
    chosen = [a for a in arrivals if duration_s is None or a.at_s is None or a.at_s < duration_s][:num_requests]
    out = []
    for arrival in chosen:
        prompt = _length(arrival.prompt_tokens, length_scale, max_prompt_tokens)
        output = _length(arrival.output_tokens, length_scale, max_output_tokens)
        at_s = None if arrival.at_s is None else arrival.at_s * time_scale
        out.append(replace(arrival, at_s=at_s, prompt_tokens=prompt, output_tokens=output))
    return out


def poisson(rate: float, num_requests: int, prompt_tokens: int, output_tokens: int, seed: int) -> list[Arrival]:
    """Independent arrivals, `rate` a second on average."""
    if not rate > 0:
        raise SettingError(f"rate={rate} must be more than 0")
    chance, at_s, out = random.Random(seed), 0.0, []
    for _ in range(num_requests):
        at_s += chance.expovariate(rate)
        out.append(Arrival(at_s, prompt_tokens, output_tokens))
    return out


def closed(num_requests: int, prompt_tokens: int, output_tokens: int) -> list[Arrival]:
    """Requests for a fixed concurrency: each is sent when one before it has ended."""
    return [Arrival(None, prompt_tokens, output_tokens)] * num_requests


def _time(arrival: Arrival) -> float:
    assert arrival.at_s is not None, "arrivals of a trace have a time"
    return arrival.at_s


def _length(tokens: int, scale: float, limit: int | None) -> int:
    scaled = max(1, round(tokens * scale))
    return scaled if limit is None else min(scaled, limit)


def _azure(lines: list[str], path: Path) -> list[Arrival]:
    reader = csv.DictReader(lines)
    names = [
        next((n for n in options if n in (reader.fieldnames or ())), None)
        for options in (
            ("arrival_s", "TIMESTAMP"),
            ("prompt_tokens", "ContextTokens"),
            ("output_tokens", "GeneratedTokens"),
        )
    ]
    if None in names:
        raise SettingError(
            f"{str(path)!r} has columns {', '.join(reader.fieldnames or ())}; it needs arrival_s, prompt_tokens, "
            "output_tokens, or Azure's TIMESTAMP, ContextTokens, GeneratedTokens"
        )
    out = []
    for number, row in enumerate(reader, 2):
        try:
            when, prompt, output = (row[str(name)] for name in names)
            out.append(Arrival(_seconds(when), int(prompt), int(output)))
        except (ValueError, TypeError):
            raise SettingError(f"trace {str(path)!r}, line {number}: {dict(row)} is not a request") from None
    return out


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:  # wall-clock time, with more digits than Python reads
        whole, _, fraction = text.partition(".")
        return datetime.datetime.fromisoformat(whole).timestamp() + float(f"0.{fraction or 0}")


def _mooncake(lines: list[str], path: Path) -> list[Arrival]:
    out = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row: dict[str, Any] = json.loads(line)
            blocks = tuple(int(i) for i in row.get("hash_ids") or ())
            out.append(
                Arrival(row["timestamp"] / 1000, int(row["input_length"]), int(row["output_length"]), blocks or None)
            )
        except (ValueError, TypeError, KeyError):
            raise SettingError(f"trace {str(path)!r}, line {number}: {line[:80]} is not a request") from None
    return out
