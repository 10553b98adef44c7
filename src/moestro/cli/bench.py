"""`moestro bench`"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from moestro.bench.config import BenchConfig
from moestro.errors import SettingError


def bench(
    url: Annotated[str, typer.Argument(help="An OpenAI-compatible server.")] = "http://127.0.0.1:8000",
    *,
    as_json: Annotated[str | None, typer.Option("--json", help="Write the figures to this file; - is stdout.")] = None,
    html: Annotated[str | None, typer.Option(help="Write a report with plots to this file.")] = None,
    compare: Annotated[
        tuple[str, str] | None, typer.Option(help="Two files of --json: show them side by side, and test nothing.")
    ] = None,
    key: Annotated[
        str | None, typer.Option("--api-key", help="Key to send; MOESTRO_API_KEY keeps it off the process list.")
    ] = None,
    overhead: Annotated[bool, typer.Option(help="Measure the client's own delay too, in two more seconds.")] = True,
    config: BenchConfig,
) -> None:
    """Load an OpenAI-compatible server as a trace says, and tell latencies, throughput, goodput and errors."""
    if compare is not None:
        _print_comparison(*compare)
        return
    from moestro.bench.overhead import client_overhead
    from moestro.bench.report import html_report
    from moestro.bench.run import run_bench
    from moestro.bench.summary import summarize, timeline
    from moestro.settings import api_key

    with _Bar() as bar:
        run = asyncio.run(run_bench(url, config, key or api_key(), bar.show))
    measured = asyncio.run(client_overhead(min(max(run.max_open, 1), 256))) if overhead else None
    summary = summarize(run, measured)
    rows = timeline(run)
    if html is not None:
        Path(html).write_text(html_report(summary, rows), encoding="utf-8")
    if as_json is not None:
        text = json.dumps(summary | {"timeline": rows}, ensure_ascii=False)
        if as_json == "-":
            print(text)
            return
        Path(as_json).write_text(text + "\n", encoding="utf-8")
    _print_summary(summary)


class _Bar:
    """Progress on a terminal's stderr; nothing elsewhere."""

    def __enter__(self) -> _Bar:
        from rich.console import Console
        from rich.progress import Progress

        self._progress = Progress(console=Console(stderr=True), disable=not sys.stderr.isatty())
        self._progress.start()
        self._task = self._progress.add_task("warming up", total=None)
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, ended: int, failed: int, total: int) -> None:
        what = f"{ended} of {total}" + (f", {failed} failed" if failed else "")
        self._progress.update(self._task, completed=ended, total=total, description=what)


def _print_summary(s: dict[str, Any]) -> None:
    print(f"{s['completed']} of {s['requests']} requests answered in {s['duration_s']:.1f} s by {s['model']}")
    for kind, number in s["errors"].items():
        print(f"  {number} x {kind}: {s['error_examples'].get(kind, '')}")
    print(f"  {s['request_rate']:.2f} requests/s, {s['output_tokens_per_s']:.1f} output tokens/s", end="")
    print(f", {s['prompt_tokens_per_s']:.1f} prompt tokens/s, at most {s['max_open']} open")
    columns = ("mean", "p50", "p90", "p95", "p99", "max")
    print(f"  {'ms':<12}" + "".join(f"{c:>10}" for c in columns))
    for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms", "refusal_ms", "send_lateness_ms"):
        if s[name]:
            print(f"  {name.removesuffix('_ms'):<12}" + "".join(f"{s[name][c]:>10.1f}" for c in columns))
    goodput = s["goodput"]
    print(f"  goodput {goodput['share']:.1%}, {goodput['request_rate']:.2f} requests/s", end="")
    print(" within " + ", ".join(f"{k} {v:g}" for k, v in goodput["limits"].items() if v is not None))
    if (overhead := s["client_overhead"]) and overhead["delay_ms"]:
        delay = overhead["delay_ms"]
        print(f"  of which the client itself at most {delay['p50']:.2f} ms (P50), {delay['p99']:.2f} ms (P99) an event")


def _print_comparison(before: str, after: str) -> None:
    from moestro.bench.summary import compare

    for name, old, new, change in compare(_read(before), _read(after)):
        print(f"{name:<22}{old:>12.3f}{new:>12.3f}" + ("" if change is None else f"{change:>+9.1%}"))


def _read(path: str) -> dict[str, Any]:
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError:
        value = None
    if not isinstance(value, dict) or "goodput" not in value:
        raise SettingError(f"{path} is not a file that moestro bench --json has written")
    return value
