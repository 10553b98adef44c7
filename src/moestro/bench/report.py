"""A load test as one HTML file: figures, and plots drawn in SVG, with nothing fetched from anywhere."""

from __future__ import annotations

import html
from typing import Any

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 640, 240, 56, 28
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:720px;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;margin:1em 0}td,th{padding:.2em .8em;text-align:right;border-bottom:1px solid #ddd}"
    "td:first-child,th:first-child{text-align:left}svg{width:100%;height:auto}h2{margin-top:1.6em;font-size:1.1em}"
    "@media(prefers-color-scheme:dark){body{background:#181818;color:#ddd}td,th{border-color:#444}"
    "svg text{fill:#bbb}svg .axis{stroke:#777}}"
)


def html_report(summary: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """summary: of `summarize`. rows: of `timeline`."""
    good = [row for row in rows if row["error"] is None]
    bad = [row for row in rows if row["error"] is not None]
    ttft = [(row["sent_s"], row["ttft_s"]) for row in good if row["ttft_s"] is not None]
    refused = [(row["sent_s"], row["e2e_s"]) for row in bad]
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>Load test of {html.escape(summary['model'])}</title><style>{_STYLE}</style>",
        f"<h1>Load test of {html.escape(summary['model'])}</h1>",
        _facts(summary),
        _latencies(summary),
        _plot("Time to first token over the run", "sent after, s", "s", {"answered": ttft, "failed after": refused}),
        _plot(
            "End-to-end latency over the run",
            "sent after, s",
            "s",
            {"answered": [(row["sent_s"], row["e2e_s"]) for row in good]},
        ),
        _plot(
            "Share of answers with the first token within a time",
            "s",
            "share",
            {"answered": _cumulative([y for _, y in ttft])},
        ),
        "</html>\n",
    ]
    return "\n".join(parts)


def _facts(summary: dict[str, Any]) -> str:
    goodput = summary["goodput"]
    limits = ", ".join(f"{k.removesuffix('_s')} {v:g} s" for k, v in goodput["limits"].items() if v is not None)
    facts = {
        "requests": f"{summary['requests']}, {summary['completed']} answered",
        "errors": ", ".join(f"{n} × {kind}" for kind, n in summary["errors"].items()) or "none",
        "duration": f"{summary['duration_s']:.1f} s, at most {summary['max_open']} open",
        "throughput": f"{summary['request_rate']:.2f} requests/s, {summary['output_tokens_per_s']:.1f} output tokens/s",
        f"goodput ({limits})": f"{goodput['share']:.1%}, {goodput['request_rate']:.2f} requests/s",
    }
    overhead = summary.get("client_overhead")
    if overhead and overhead["delay_ms"]:
        delay = overhead["delay_ms"]
        facts["client overhead an event"] = f"P50 {delay['p50']:.2f} ms, P99 {delay['p99']:.2f} ms"
    cells = "".join(f"<tr><td>{html.escape(k)}<td>{html.escape(v)}" for k, v in facts.items())
    return f"<table>{cells}</table>"


def _latencies(summary: dict[str, Any]) -> str:
    names = ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms", "refusal_ms")
    columns = ("mean", "p50", "p90", "p95", "p99", "max")
    head = "".join(f"<th>{c}" for c in columns)
    body = "".join(
        f"<tr><td>{name}" + "".join(f"<td>{summary[name][c]:.1f}" for c in columns)
        for name in names
        if summary.get(name)
    )
    return f"<h2>Latencies</h2><table><tr><th>{head}{body}</table>"


def _cumulative(values: list[float]) -> list[tuple[float, float]]:
    ordered = sorted(values)
    return [(value, (place + 1) / len(ordered)) for place, value in enumerate(ordered)]


def _plot(title: str, x_name: str, y_name: str, series: dict[str, list[tuple[float, float]]]) -> str:
    """Points of each series, from zero to the largest value."""
    points = [point for line in series.values() for point in line]
    if not points:
        return ""
    x_max = max(x for x, _ in points) or 1.0
    y_max = max(y for _, y in points) or 1.0
    colors = ("#2a7ab8", "#c8442b")
    dots, legend = [], []
    for place, (name, line) in enumerate(series.items()):
        if not line:
            continue
        color = colors[place % len(colors)]
        legend.append(f"<tspan fill='{color}'>● {html.escape(name)} </tspan>")
        places = {
            (
                round(_LEFT + (_WIDTH - _LEFT - 10) * x / x_max),
                round((_HEIGHT - _BOTTOM) - (_HEIGHT - _BOTTOM - 14) * y / y_max),
            )
            for x, y in line
        }  # thousands of requests fall on the same points
        dots += [f"<circle cx='{x}' cy='{y}' r='1.8' fill='{color}' fill-opacity='.6'/>" for x, y in sorted(places)]
    base = _HEIGHT - _BOTTOM
    axes = (
        f"<path class=axis d='M{_LEFT} 10V{base}H{_WIDTH - 8}' stroke='#999' fill='none'/>"
        f"<text x='{_LEFT - 6}' y='18' text-anchor='end'>{y_max:.3g}</text>"
        f"<text x='{_LEFT - 6}' y='{base}' text-anchor='end'>0</text>"
        f"<text x='{_WIDTH - 10}' y='{_HEIGHT - 10}' text-anchor='end'>{x_max:.3g} {html.escape(x_name)}</text>"
        f"<text x='{_LEFT}' y='{_HEIGHT - 10}'>{''.join(legend)}</text>"
        f"<text x='{_LEFT + 6}' y='18'>{html.escape(y_name)}</text>"
    )
    view = f"0 0 {_WIDTH} {_HEIGHT}"
    return f"<h2>{html.escape(title)}</h2><svg viewBox='{view}' font-size='11' fill='#555'>{axes}{''.join(dots)}</svg>"
