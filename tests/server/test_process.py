"""The engine process and its end; draining; what a fuzzer finds."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import schemathesis
from fake_loop import make_loop
from hypothesis import HealthCheck, given, settings
from serving import Served, serve

from moestro.engine.config import EngineConfig
from moestro.errors import MoestroError
from moestro.server import app as app_module
from moestro.server.client import EngineClient
from moestro.server.config import ServerConfig

COMPLETION = "/v1/completions"


def wait_for(condition: object, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


@pytest.fixture
def own(model_folder: Path) -> Iterator[Served]:
    """A server of one's own, to break."""
    yield from serve(EngineConfig(model=str(model_folder), served_model_name="fake"), ServerConfig(port=0))


def is_ready(served: Served) -> bool:
    with served.http() as http:
        return http.get("/health").status_code == 200


def test_a_dead_engine_ends_streams_and_is_started_again(own: Served) -> None:
    """Open requests get an error, /health is 503 meanwhile, counters go on from where they were (C94)."""
    counter = 'moestro:engine_steps_total{model_name="fake"}'
    client = openai.OpenAI(base_url=own.url + "/v1", api_key="none", http_client=own.http(), max_retries=0)
    client.completions.create(model="fake", prompt="ab", max_tokens=20)
    with own.http() as http:
        before = _metric(http, counter)
        stream = client.completions.create(model="fake", prompt="slowly", max_tokens=50, stream=True)
        next(stream)
        os.kill(own.service.client.pid, signal.SIGKILL)  # type: ignore[arg-type]
        with pytest.raises(openai.APIError, match="engine has stopped"):
            list(stream)
        answers = {http.get("/health").status_code, http.post(COMPLETION, json={"prompt": "a"}).status_code}
        assert answers == {503}
        assert http.get("/metrics").status_code == 200
        wait_for(lambda: is_ready(own))
        assert client.completions.create(model="fake", prompt="ab", max_tokens=2).choices[0].text == "ba"
        assert _metric(http, counter) > before
        assert _metric(http, 'moestro:engine_restarts_total{model_name="fake"}') == 1
        assert _metric(http, 'moestro:request_success_total{finished_reason="error",model_name="fake"}') == 1


def _metric(http: httpx.Client, name: str) -> float:
    return next(float(line.split()[-1]) for line in http.get("/metrics").text.splitlines() if line.startswith(name))


def test_a_stuck_engine_is_not_healthy(own: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """It neither answers nor ends: stopped here, as a driver that hangs would stop it."""
    monkeypatch.setattr(app_module, "SILENCE_LIMIT_S", 1.0)
    pid = own.service.client.pid
    assert pid is not None
    with own.http() as http:
        assert http.get("/health").status_code == 200
        os.kill(pid, signal.SIGSTOP)
        try:
            wait_for(lambda: http.get("/health").status_code == 503)
            assert http.get("/health").json()["error"]["code"] == "engine_stuck"
            assert http.get("/metrics").status_code == 200
        finally:
            os.kill(pid, signal.SIGCONT)
        wait_for(lambda: http.get("/health").status_code == 200)


def test_an_engine_that_keeps_dying_is_given_up(model_folder: Path) -> None:
    engine = EngineConfig(model=str(model_folder), served_model_name="fake")
    for own in serve(engine, ServerConfig(port=0, max_engine_restarts=1)):
        _dies_twice(own)


def _dies_twice(own: Served) -> None:
    with own.http() as http:
        for _ in range(2):
            wait_for(lambda: is_ready(own))
            assert http.post(COMPLETION, json={"prompt": "die"}).status_code == 503
        wait_for(lambda: own.service.client.state == "dead")
        assert http.get("/health").status_code == 503
        answer = http.post(COMPLETION, json={"prompt": "a"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
        assert "retry-after" in answer.headers


def test_a_step_that_raises_fails_its_requests_only(served: Served, http: httpx.Client) -> None:
    pid = served.service.client.pid
    answer = http.post(COMPLETION, json={"prompt": "raise"})
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "RuntimeError in the engine"  # not what it says: that may name paths
    streamed = http.post(COMPLETION, json={"prompt": "raise", "stream": True})
    events = [line for line in streamed.text.split("\n\n") if line]
    assert "RuntimeError" in json.loads(events[-2].removeprefix("data: "))["error"]["message"]
    assert events[-1] == "data: [DONE]"
    assert http.post(COMPLETION, json={"prompt": "ab", "max_tokens": 1}).status_code == 200
    assert served.service.client.pid == pid


@pytest.mark.parametrize(("name", "message"), [("broken", "model.norm.weight is missing"), ("crash", "exit code 3")])
def test_a_model_that_cannot_load_is_told_in_its_own_words(name: str, message: str) -> None:
    import asyncio

    async def start() -> None:
        client = EngineClient(EngineConfig(model=name), make_loop)
        with pytest.raises(MoestroError, match=message):
            await client.start()
        assert not client._folder.exists()  # type: ignore[union-attr]

    asyncio.run(start())


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import fake_loop
from moestro.engine.config import EngineConfig
from moestro.server.config import ServerConfig
from moestro.server.launch import run_server

if __name__ == "__main__":
    announce = lambda line: print(line, flush=True)
    sys.exit(run_server(EngineConfig(model={model!r}), ServerConfig(port=0), announce, fake_loop.make_loop))
"""


@pytest.fixture
def scratch() -> Iterator[Path]:
    """TMPDIR of the program; short, as a socket's path has to be."""
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        yield Path(folder)


@pytest.fixture
def program(model_folder: Path, tmp_path: Path, scratch: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server process, and its address."""
    script = tmp_path / "program.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parent), model=str(model_folder)))
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"TMPDIR": str(scratch)},
    )
    assert process.stdout is not None
    url = process.stdout.readline().split()[-1]
    assert process.stdout.readline().startswith("try: curl http")
    yield process, url
    process.kill()
    process.wait()


def test_sigterm_drains(program: tuple[subprocess.Popen[str], str]) -> None:
    """The open stream comes to its end, a new request is sent away, and the exit code is 0."""
    process, url = program
    with (
        httpx.Client(base_url=url, trust_env=False, timeout=20) as http,
        httpx.Client(base_url=url, trust_env=False) as other,
    ):
        assert other.get("/health").status_code == 200
        with http.stream("POST", COMPLETION, json={"prompt": "slow123", "max_tokens": 20, "stream": True}) as answer:
            lines = answer.iter_lines()
            received = [next(lines)]
            process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
            refused = other.post(COMPLETION, json={"prompt": "a"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert other.get("/health").status_code == 503
            received += list(lines)
    events = [json.loads(line.removeprefix("data: ")) for line in received if line and line != "data: [DONE]"]
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert received[-2] == "data: [DONE]"
    assert process.wait(10) == 0


def test_ctrl_c_twice_ends_at_once(program: tuple[subprocess.Popen[str], str]) -> None:
    process, url = program
    with (
        httpx.Client(base_url=url, trust_env=False, timeout=20) as http,
        http.stream("POST", COMPLETION, json={"prompt": "slow", "max_tokens": 59, "stream": True}) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(2) == 130


def test_sigterm_while_loading(model_folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parent), model="slow to load"))
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    wait_for(lambda: len(children(process.pid)) == 2)  # the engine, and multiprocessing's own helper
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    assert process.stdout is not None
    assert process.stdout.read() == ""


def children(pid: int) -> list[int]:
    return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_killed_server_leaves_nothing_behind(program: tuple[subprocess.Popen[str], str], scratch: Path) -> None:
    process, _ = program
    engines = children(process.pid)
    assert engines
    assert len(list(scratch.iterdir())) == 1
    process.kill()
    process.wait()
    wait_for(lambda: not any(_runs(pid) for pid in engines))
    assert list(scratch.iterdir()) == []


def _runs(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False


def test_a_taken_port_is_one_sentence(model_folder: Path) -> None:
    from moestro.server.launch import run_server

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(MoestroError, match=rf"127\.0\.0\.1:{port}: Address already in use; choose another --port"):
            run_server(EngineConfig(model=str(model_folder)), ServerConfig(port=port), print, make_loop)


def test_no_request_that_fits_the_description_breaks_the_server(served: Served) -> None:
    """Fuzzed from the server's own OpenAPI document."""
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) == 9
    for operation in operations:

        @given(case=operation.as_strategy())
        @settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
        def answers(case: schemathesis.Case) -> None:
            answer = case.call(base_url=served.url)
            assert answer.status_code < 500, answer.text

        answers()
    with served.http() as http:
        assert http.post(COMPLETION, json={"prompt": "ab", "max_tokens": 1}).status_code == 200
