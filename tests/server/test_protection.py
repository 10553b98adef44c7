"""Strangers and bad days: keys, limits a client, time limits, CORS, and what is told in logs and traces."""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import Served, serve

from moestro.checkpoint.synth import TINY, write_checkpoint
from moestro.engine.config import EngineConfig
from moestro.errors import SettingError
from moestro.logs import logger, setup_logging
from moestro.server import access
from moestro.server.config import ServerConfig
from moestro.server.keys import ApiKeys
from moestro.server.tracing import Tracer

COMPLETION = "/v1/completions"
SLOW = {"prompt": "slow", "max_tokens": 59}


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.level, logger.propagate = before


@pytest.fixture(scope="module")
def keyed(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("# two teams\nalpha-key\n\n  beta-key  \n")
    config = ServerConfig(
        port=0,
        api_key="main-key",
        api_key_file=str(file),
        max_client_requests=2,
        request_timeout_s=1.0,
        allow_origin="https://good.example, https://other.example",
    )
    yield from serve(EngineConfig(model=str(model_folder), served_model_name="fake"), config)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_every_key_works_and_no_other(keyed: Served) -> None:
    with keyed.http() as http:
        for key in ("main-key", "alpha-key", "beta-key"):
            assert http.get("/v1/models", headers=bearer(key)).status_code == 200
        for key in ("main", "main-key2", "# two teams", "alpha-key beta-key"):
            assert http.get("/v1/models", headers=bearer(key)).status_code == 401


def test_key_files_that_cannot_be_used(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("# nothing\n")
    for file, message in ((empty, "no key"), (tmp_path / "absent", "No such file"), (tmp_path, "directory")):
        with pytest.raises(SettingError, match=message):
            ApiKeys.load(None, str(file))


def test_a_client_with_too_many_open_requests_is_told_to_wait(keyed: Served) -> None:
    def ask(key: str) -> httpx.Response:
        with keyed.http() as http:
            return http.post(COMPLETION, json=SLOW | {"max_tokens": 8}, headers=bearer(key))

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, ["alpha-key", "alpha-key", "alpha-key", "beta-key"]))
    assert sorted(a.status_code for a in answers[:3]) == [200, 200, 429]
    assert answers[3].status_code == 200
    refused = next(a for a in answers if a.status_code == 429)
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["code"] == "too_many_requests"
    assert ask("alpha-key").status_code == 200


def test_requests_end_after_the_time_limit(keyed: Served) -> None:
    with keyed.http(headers=bearer("main-key")) as http:
        late = http.post(COMPLETION, json=SLOW)
        assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
        streamed = http.post(COMPLETION, json=SLOW | {"stream": True}).text.split("\n\n")
        assert json.loads(streamed[-3].removeprefix("data: "))["error"]["code"] == "timeout"
        assert streamed[-2] == "data: [DONE]"
        assert http.post(COMPLETION, json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_a_body_that_never_comes(keyed: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "BODY_TIMEOUT_S", 0.2)
    url = httpx.URL(keyed.url)
    with socket.create_connection((url.host, url.port or 0), timeout=10) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer main-key\r\n"
        connection.sendall(f"{head}Content-Type: application/json\r\nContent-Length: 50\r\n\r\n{{".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 408")


def test_a_reader_that_takes_nothing_is_let_go(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer is larger than all buffers on the way; the place it held is free again."""
    monkeypatch.setattr(access, "SEND_TIMEOUT_S", 0.3)
    engine = EngineConfig(model=str(model_folder), served_model_name="f" * 200_000)
    for served in serve(engine, ServerConfig(port=0)):
        url = httpx.URL(served.url)
        with socket.create_connection((url.host, url.port or 0), timeout=10) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            body = json.dumps({"prompt": "ab", "max_tokens": 60, "stream": True}).encode()
            head = f"POST {COMPLETION} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            deadline = time.monotonic() + 10
            seen = False
            while not seen or served.service.num_active:
                seen = seen or served.service.num_active == 1
                assert time.monotonic() < deadline
                time.sleep(0.01)


def test_cors_is_for_the_origins_that_were_named(keyed: Served, served: Served) -> None:
    preflight = {"Origin": "https://good.example", "Access-Control-Request-Method": "POST"}
    with keyed.http() as http:
        answer = http.options(COMPLETION, headers=preflight)
        assert answer.headers["access-control-allow-origin"] == "https://good.example"
        bad = http.options(COMPLETION, headers=preflight | {"Origin": "https://bad.example"})
        assert "access-control-allow-origin" not in bad.headers
    with served.http() as http:  # off by default
        assert "access-control-allow-origin" not in http.options(COMPLETION, headers=preflight).headers


def test_a_web_page_cannot_post_without_asking(served: Served) -> None:
    """Browsers send text/plain across origins without a preflight request; it is not taken for JSON."""
    with served.http() as http:
        answer = http.post(COMPLETION, content=b'{"prompt": "a"}', headers={"Content-Type": "text/plain"})
    assert answer.status_code == 400


def test_request_ids_are_the_clients_own(served: Served) -> None:
    with served.http() as http:
        assert http.get("/v1/models", headers={"X-Request-Id": "abc-1"}).headers["x-request-id"] == "abc-1"
        assert http.get("/v1/none", headers={"X-Request-Id": "a b\x7f"}).headers["x-request-id"].startswith("req-")


def logged(stream: io.StringIO, number: int) -> list[dict[str, Any]]:
    deadline = time.monotonic() + 5
    while len(lines := stream.getvalue().splitlines()) < number:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return [json.loads(line) for line in lines]


def test_the_log_tells_timings_and_no_content(keyed: Served) -> None:
    setup_logging("info", "json")
    stream = io.StringIO()
    handler = logger.handlers[0]
    assert isinstance(handler, logging.StreamHandler)
    handler.setStream(stream)
    with keyed.http() as http:
        body = {"prompt": "secret prompt", "max_tokens": 4}
        answer = http.post(COMPLETION, json=body, headers=bearer("beta-key") | {"X-Request-Id": "mine"})
        http.post(COMPLETION, json=body, headers=bearer("wrong-key"))
        http.get("/health")
    good, refused = logged(stream, 2)
    expected = {
        "message": "request", "method": "POST", "path": COMPLETION, "status": 200, "client": "key3",
        "request_id": "mine", "prompt_tokens": 13, "completion_tokens": 4, "finish": "length", "level": "info",
    }  # fmt: skip
    assert expected.items() <= good.items()
    assert 0 < good["ttft_s"] <= good["duration_s"] < 5
    assert good["answer_id"].startswith(answer.json()["id"])
    assert refused["status"] == 401
    for word in ("secret", "beta-key", "wrong-key"):
        assert word not in stream.getvalue()


def test_a_full_disk_for_logs_does_no_harm(tmp_path: Path) -> None:
    """The command itself, with both its outputs on a full disk: it serves, and ends with 0 after SIGTERM."""
    folder = write_checkpoint(TINY["mixtral"], tmp_path, seed=3)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--port", str(port), "--kernels", "reference", "--kv-memory", "1MB", "--max-model-len", "64"]
    with open("/dev/full", "w") as full:
        process = subprocess.Popen(
            [sys.executable, "-m", "moestro", "serve", str(folder), *options], stdout=full, stderr=full
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=20) as http:
            deadline = time.monotonic() + 60
            while True:
                try:
                    assert http.get("/health").status_code == 200
                    break
                except httpx.ConnectError:
                    assert time.monotonic() < deadline
                    assert process.poll() is None
                    time.sleep(0.05)
            for _ in range(3):
                assert http.post(COMPLETION, json={"prompt": [1, 2], "max_tokens": 2}).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


def test_a_pipe_that_nobody_reads_stops_nobody() -> None:
    """The log of a server whose stderr goes to a pipe that is full."""
    read, write = os.pipe()
    setup_logging("info", "text")
    handler = logger.handlers[0]
    assert isinstance(handler, logging.StreamHandler)
    with os.fdopen(write, "w") as pipe:
        handler.setStream(pipe)
        started = time.monotonic()
        for _ in range(3000):  # three times what a pipe holds, and less than waits in memory
            logger.info("x" * 64)
        assert time.monotonic() - started < 5
        lines = b""
        while lines.count(b"\n") < 3000:
            lines += os.read(read, 1 << 16)
        handler.setStream(io.StringIO())
    os.close(read)


def test_a_span_a_request(keyed: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(keyed.service, "tracer", Tracer(provider, "fake"))
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    with keyed.http(headers=bearer("main-key")) as http:
        parent = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
        http.post(COMPLETION, json={"prompt": "abc", "max_tokens": 2}, headers=parent)
    deadline = time.monotonic() + 5
    while not exporter.get_finished_spans():
        assert time.monotonic() < deadline
    [span] = exporter.get_finished_spans()
    assert f"{span.context.trace_id:032x}" == trace_id
    assert span.attributes is not None
    assert span.attributes["gen_ai.usage.output_tokens"] == 2
    assert span.attributes["gen_ai.usage.input_tokens"] == 3
    assert [event.name for event in span.events] == ["first token"]
    assert "abc" not in str(dict(span.attributes))


def test_tracing_without_the_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    assert Tracer.connect(None, "m") is None
    with pytest.raises(SettingError, match=r"pip install 'moestro\[tracing\]'"):
        Tracer.connect("http://127.0.0.1:4318/v1/traces", "m")


def test_traces_reach_a_collector(model_folder: Path) -> None:
    """Over HTTP, to a listener in the collector's place."""
    received: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def collect() -> None:
            connection, _ = listener.accept()
            with connection:
                received.append(connection.recv(100_000))
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=collect, daemon=True)
        thread.start()
        config = ServerConfig(port=0, otlp_traces_endpoint=f"http://127.0.0.1:{port}/v1/traces")
        for served in serve(EngineConfig(model=str(model_folder)), config):
            with served.http() as http:
                http.post(COMPLETION, json={"prompt": "abc", "max_tokens": 2})
        thread.join(10)
    assert received[0].startswith(b"POST /v1/traces")
