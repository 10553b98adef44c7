"""Load tests of a stub server that behaves and misbehaves as it is told."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moestro.bench.client import Outcome, Server
from moestro.bench.config import BenchConfig
from moestro.bench.overhead import client_overhead
from moestro.bench.report import html_report
from moestro.bench.run import Run, run_bench
from moestro.bench.summary import compare, quantiles, summarize, timeline
from moestro.cli.main import app
from moestro.errors import MoestroError, SettingError


class Stub:
    """Streams a word a token. refuses: body fields answered with 400. busy_above: open requests answered with 429."""

    def __init__(self, *, refuses: tuple[str, ...] = (), busy_above: int = 1000, breaks: str = "") -> None:
        self.refuses = refuses
        self.busy_above = busy_above
        self.breaks = breaks
        self.bodies: list[dict[str, Any]] = []
        self.open = self.most_open = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next((int(line[15:]) for line in head.splitlines() if line.startswith("Content-Length:")), 0)
        body = json.loads(await reader.readexactly(length)) if length else {}
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            await self._answer(head, body, writer)
            await writer.drain()
        finally:
            self.open -= 1
            writer.close()

    async def _answer(self, head: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if head.startswith("GET /v1/models"):
            return _whole(writer, 200, {"data": [{"id": "stub"}]})
        self.bodies.append(body)
        wrong = next((name for name in self.refuses if name in body), None)
        if wrong is not None:
            return _whole(writer, 400, {"error": {"message": f"unknown field {wrong}"}})
        if self.open > self.busy_above:
            return _whole(writer, 429, {"error": {"message": "busy"}})
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        text = body.get("prompt") or body["messages"][0]["content"]
        is_chat = "messages" in body
        for place in range(body["max_tokens"]):
            await asyncio.sleep(0.002)
            part = {"delta": {"content": "w "}} if is_chat else {"text": "w "}
            _event(writer, {"choices": [{**part, "finish_reason": None}]})
            if self.breaks and len(self.bodies) > 4 and place == 1:
                if self.breaks == "error":
                    _event(writer, {"error": {"message": "engine died"}})
                return None
        _event(writer, {"choices": [{"text": "", "finish_reason": "length"}]})
        if "stream_options" in body:
            usage = {"prompt_tokens": 2 * len(text.split()) + 1, "completion_tokens": body["max_tokens"]}
            _event(writer, {"choices": [], "usage": usage})
        payload = b"data: [DONE]\n\n"
        writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(payload), payload))
        return None


def _whole(writer: asyncio.StreamWriter, status: int, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (status, len(data), data))


def _event(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
    payload = b"data: " + json.dumps(event).encode() + b"\n\n"
    half = len(payload) // 2  # an event in two pieces, as networks deliver them
    for part in (payload[:half], payload[half:]):
        writer.write(b"%x\r\n%s\r\n" % (len(part), part))


def with_stub(stub: Stub, work: Callable[[str], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        server = await asyncio.start_server(stub, "127.0.0.1", 0)
        async with server:
            return await work(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")

    return asyncio.run(run())


def bench(stub: Stub, **options: Any) -> Run:
    config = BenchConfig(**{"prompt_tokens": 21, "output_tokens": 4, "warmup_requests": 1, **options})
    return with_stub(stub, lambda url: run_bench(url, config))


def test_a_fixed_concurrency_is_kept() -> None:
    stub = Stub()
    run = bench(stub, concurrency=3, num_requests=12)
    summary = summarize(run)
    assert (summary["completed"], summary["errors"], summary["max_open"], run.model) == (12, {}, 3, "stub")
    assert stub.most_open == 3
    assert summary["output_tokens"] == 48
    assert summary["prompt_tokens"] == 12 * 21  # the words were counted out right: 10 words, 2 tokens each, 1 more
    assert [o.text for o in run.outcomes] == ["w w w w "] * 12
    assert summary["goodput"]["share"] == 1.0
    assert summary["ttft_ms"]["p50"] <= summary["e2e_ms"]["p50"]


def test_arrivals_of_a_trace_are_kept(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{i / 10},30,2\n" for i in range(5)))
    run = bench(Stub(), trace=str(trace), time_scale=0.5)
    sent = [o.sent_at_s - run.outcomes[0].sent_at_s for o in run.outcomes]
    assert sent == pytest.approx([0, 0.05, 0.1, 0.15, 0.2], abs=0.045)
    assert summarize(run)["send_lateness_ms"]["p50"] < 45


@pytest.mark.parametrize("refuses", [("ignore_eos",), ("stream_options",), ("ignore_eos", "stream_options")])
def test_fields_that_a_server_refuses_are_left_out(refuses: tuple[str, ...]) -> None:
    run = bench(Stub(refuses=refuses), concurrency=1, num_requests=2)
    assert summarize(run)["completed"] == 2
    assert not set(run.extras) & set(refuses)
    assert summarize(run)["output_tokens"] == 8  # counted by events where the server counts nothing


def test_chat() -> None:
    assert summarize(bench(Stub(), endpoint="chat", concurrency=1, num_requests=2))["completed"] == 2


@pytest.mark.parametrize(("breaks", "kind"), [("error", "error event"), ("cut", "connection")])
def test_errors_are_told_by_kind(breaks: str, kind: str) -> None:
    summary = summarize(bench(Stub(breaks=breaks), concurrency=1, num_requests=3))
    assert summary["errors"] == {kind: 2}
    assert (summary["completed"], summary["requests"]) == (1, 3)


def test_refusals_count_as_such() -> None:
    summary = summarize(bench(Stub(busy_above=2), concurrency=6, num_requests=30))
    assert summary["errors"]["http 429"] > 0
    assert summary["error_examples"]["http 429"] == "busy"
    assert summary["refusal_ms"]["p50"] > 0


def test_a_server_that_answers_nothing_is_one_sentence() -> None:
    with pytest.raises(MoestroError, match=r"nobody answers at http://127\.0\.0\.1:9"):
        asyncio.run(run_bench("http://127.0.0.1:9", BenchConfig()))
    with pytest.raises(MoestroError, match="does not answer a first request: http 429"):
        bench(Stub(busy_above=0), concurrency=1, model="stub")
    with pytest.raises(SettingError, match="url="):
        Server("ftp://x")


def test_a_client_can_go_away() -> None:
    outcome: Outcome = with_stub(
        Stub(),
        lambda url: Server(url).stream("/completions", {"prompt": "a", "max_tokens": 9}, Outcome(0), abandon_after=2),
    )
    assert (outcome.error, len(outcome.event_times_s)) == ("abandoned", 2)


def test_quantiles_are_nearest_ranks() -> None:
    found = quantiles([float(i) for i in range(1, 101)])
    assert found == {"mean": 50.5, "p50": 50, "p90": 90, "p95": 95, "p99": 99, "max": 100}
    assert quantiles([3.0]) == {"mean": 3, "p50": 3, "p90": 3, "p95": 3, "p99": 3, "max": 3}
    assert quantiles([]) is None


def test_goodput_asks_for_all_limits() -> None:
    config = BenchConfig(ttft_limit_s=1.0, tpot_limit_s=0.1, e2e_limit_s=5.0, concurrency=1)
    good = Outcome(0, sent_at_s=0, ended_at_s=2, status=200, event_times_s=[0.5, 0.6], output_tokens=2)
    late = Outcome(1, sent_at_s=0, ended_at_s=2, status=200, event_times_s=[1.5, 1.6], output_tokens=2)
    slow = Outcome(2, sent_at_s=0, ended_at_s=2, status=200, event_times_s=[0.5, 0.8], output_tokens=2)
    long = Outcome(3, sent_at_s=0, ended_at_s=6, status=200, event_times_s=[0.5, 0.6], output_tokens=2)
    failed = Outcome(4, sent_at_s=0, ended_at_s=1, status=503, error="http 503")
    summary = summarize(Run(config, "u", "m", [good, late, slow, long, failed], 0.0, 10.0, 5))
    assert summary["goodput"]["requests"] == 1
    assert summary["goodput"]["share"] == 0.2


def test_the_clients_own_delay_is_measured() -> None:
    found = asyncio.run(client_overhead(4))
    assert found["events"] == 400
    assert 0 < found["delay_ms"]["p50"] < 1000


def test_report_and_comparison(tmp_path: Path) -> None:
    run = bench(Stub(busy_above=2), concurrency=4, num_requests=12)
    summary = summarize(run)
    page = html_report(summary, timeline(run))
    assert page.count("<svg") == 3
    assert "http://" not in page.replace(run.url, "")
    rows = {name: change for name, _, _, change in compare(summary, summary)}
    assert set(rows.values()) <= {0.0, None}
    file = tmp_path / "a.json"
    file.write_text(json.dumps(summary))
    shown = CliRunner().invoke(app, ["bench", "--compare", str(file), str(file)])
    assert "ttft_ms p99" in shown.output
    assert "+0.0%" in shown.output
    file.write_text("{}")
    assert CliRunner().invoke(app, ["bench", "--compare", str(file), str(file)]).exit_code == 2


def test_the_command_writes_its_files(tmp_path: Path) -> None:
    async def work(url: str) -> Any:
        arguments = ["bench", url, "--concurrency", "2", "--num-requests", "3", "--no-overhead", "--output-tokens", "2"]
        files = ["--json", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html")]
        return await asyncio.to_thread(CliRunner().invoke, app, arguments + files)

    started = time.monotonic()
    result = with_stub(Stub(), work)
    assert result.exit_code == 0, result.output
    assert "3 of 3 requests answered" in result.output
    written = json.loads((tmp_path / "r.json").read_text())
    assert len(written["timeline"]) == 3
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    assert time.monotonic() - started < 60


@pytest.mark.parametrize(
    "options",
    [{"rate": 1.0, "concurrency": 2}, {"endpoint": "x"}, {"rate": 0.0}, {"num_requests": 0}, {"time_scale": -1.0}],
)
def test_options_that_cannot_work(options: dict[str, Any]) -> None:
    with pytest.raises(SettingError):
        BenchConfig(**options)
