"""Fuzz the API: cases from its own OpenAPI document, bodies that are nearly right, clients that leave, and plain noise.

    python benchmarks/serving_fuzz.py [--requests 20000]

Nothing may answer with 5xx, hang, or leave pages, memory or file handles behind.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from served import ServerProcess, served, write_result, write_tiny

OPTIONS = ("--max-model-len", "64", "--max-num-seqs", "16", "--kv-memory", "8MB", "--num-threads", "1")
TIMEOUT_S = 60.0
_PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")

TEXT = st.text(max_size=20)
SCHEMA = st.recursive(
    st.sampled_from(
        [{"type": "string"}, {"type": "integer"}, {"enum": ["a", 1]}, {"type": "nope"}, {}, {"const": None}]
    ),
    lambda inner: (
        st.fixed_dictionaries({"type": st.just("object"), "properties": st.dictionaries(TEXT, inner, max_size=3)})
        | st.fixed_dictionaries({"type": st.just("array"), "items": inner})
    ),
    max_leaves=4,
)
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=4,
)
NUMBER = st.integers(-3, 100) | st.floats(-3, 3) | st.sampled_from([2**31, 2**63, 1e308, -0.0])
TOOL = st.fixed_dictionaries(
    {
        "type": st.just("function"),
        "function": st.fixed_dictionaries({"name": st.sampled_from(["f", "g h", ""]), "parameters": SCHEMA}),
    }
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.integers(-1, 80),
    "n": st.integers(0, 5),
    "temperature": NUMBER,
    "top_p": NUMBER,
    "top_k": NUMBER,
    "min_p": NUMBER,
    "seed": NUMBER,
    "stop": TEXT | st.lists(TEXT, max_size=3),
    "stop_token_ids": st.lists(st.integers(-1, 300), max_size=3),
    "logit_bias": st.dictionaries(st.integers(-1, 300).map(str), NUMBER, max_size=3),
    "presence_penalty": NUMBER,
    "frequency_penalty": NUMBER,
    "repetition_penalty": NUMBER,
    "logprobs": st.booleans() | st.integers(-1, 25),
    "top_logprobs": st.integers(-1, 25),
    "prompt_logprobs": st.integers(-1, 5),
    "echo": st.booleans(),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
    "ignore_eos": st.booleans(),
    "min_tokens": st.integers(-1, 10),
    "best_of": st.integers(0, 5),
    "user": TEXT,
    "return_token_ids": st.booleans(),
    "response_format": st.sampled_from([{"type": "text"}, {"type": "json_object"}, {"type": "x"}])
    | SCHEMA.map(lambda s: {"type": "json_schema", "json_schema": {"name": "s", "schema": s}}),
    "structured_outputs": st.sampled_from([{"regex": "[ab]+"}, {"regex": "(("}, {"choice": ["a", "b"]}, {}])
    | SCHEMA.map(lambda s: {"json": s}),
    "tools": st.lists(TOOL, max_size=2),
    "tool_choice": st.sampled_from(["auto", "none", "required", {"type": "function", "function": {"name": "f"}}]),
}
PROMPT = TEXT | st.lists(TEXT, max_size=3) | st.lists(st.integers(-1, 260), max_size=20) | JUNK
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool"]), "content": TEXT | JUNK}
)
BODY = st.builds(
    lambda base, options, junk: {**base, **options, **junk},
    st.fixed_dictionaries({"prompt": PROMPT}) | st.fixed_dictionaries({"messages": st.lists(MESSAGE, max_size=3)}),
    st.lists(st.sampled_from(sorted(FIELDS)), max_size=5, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: FIELDS[name] for name in names})
    ),
    st.dictionaries(st.sampled_from([*FIELDS, "model", "prompt", "x"]), JUNK, max_size=1),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="tiny") as folder,
        served(str(write_tiny(Path(folder))), *OPTIONS, "--no-access-log") as server,
    ):
        tally = Tally(server)
        tally.from_bodies(200)  # everything that is made at first use is there
        _settle(server)
        before = {"open_files": server.open_files(), "memory_mib": server.memory_bytes() >> 20}
        started = time.monotonic()
        tally.from_schema(arguments.requests // 4)
        tally.noise(500)
        tally.leaving(500)
        tally.from_bodies(arguments.requests - tally.number)
        seconds = time.monotonic() - started
        metrics = _settle(server)
        after = {"open_files": server.open_files(), "memory_mib": server.memory_bytes() >> 20}
        good = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 2}, trust_env=False)
        result = {
            "command": f"python benchmarks/serving_fuzz.py --requests {arguments.requests}",
            "requests": tally.number,
            "seconds": seconds,
            "answers": {str(k): v for k, v in sorted(tally.answers.items(), key=str)},
            "slowest_s": tally.slowest_s,
            "server_errors": tally.server_errors[:20],
            "kv_usage_afterwards": metrics["moestro:kv_cache_usage_perc"],
            "engine_restarts": metrics["moestro:engine_restarts_total"],
            "before": before,
            "after": after,
            "serves_afterwards": good.status_code == 200,
        }
    write_result("serving_fuzz", result)
    print(json.dumps(result, indent=1))


def _settle(server: ServerProcess) -> dict[str, float]:
    metrics = server.wait_idle()
    time.sleep(6.0)  # idle connections are closed after five seconds
    return metrics


class Tally:
    """Sends requests and counts answers."""

    def __init__(self, server: ServerProcess) -> None:
        self._url = server.url
        self._http = httpx.Client(base_url=server.url, timeout=TIMEOUT_S, trust_env=False)
        self.answers: Counter[int | str] = Counter()
        self.server_errors: list[Any] = []
        self.number = 0
        self.slowest_s = 0.0

    def note(self, answer: int | str, started: float, what: Any) -> None:
        self.number += 1
        self.answers[answer] += 1
        self.slowest_s = max(self.slowest_s, time.monotonic() - started)
        if isinstance(answer, int) and answer >= 500:
            self.server_errors.append(repr(what)[:500])

    def from_schema(self, number: int) -> None:
        """Cases that schemathesis makes from /openapi.json."""
        schema = schemathesis.openapi.from_url(f"{self._url}/openapi.json")
        operations = [found.ok() for found in schema.get_all_operations()]
        posts = [o for o in operations if o.method.lower() == "post"]
        self._cases([o for o in operations if o not in posts], number // 10)
        self._cases(posts, number - number // 10)

    def _cases(self, operations: list[Any], number: int) -> None:
        for operation in operations:

            @given(case=operation.as_strategy())
            @_settings(number // len(operations))
            @seed(1)
            def call(case: schemathesis.Case) -> None:
                started = time.monotonic()
                answer = case.call(base_url=self._url, timeout=TIMEOUT_S)
                self.note(answer.status_code, started, case.body)

            call()

    def from_bodies(self, number: int) -> None:
        """Bodies with right and wrong values in right and wrong places."""

        @given(path=st.sampled_from(_PATHS), body=BODY)
        @_settings(number)
        @seed(2)
        def call(path: str, body: dict[str, Any]) -> None:
            content = json.dumps(body).encode("utf-8", "surrogatepass")
            started = time.monotonic()
            answer = self._http.post(path, content=content, headers={"Content-Type": "application/json"})
            self.note(answer.status_code, started, body)

        call()

    def noise(self, number: int) -> None:
        """Bytes that are no HTTP, or only begin like it."""
        chance = random.Random(3)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        for _ in range(number):
            data = chance.choice(
                [
                    chance.randbytes(200),
                    head + b"Content-Length: 99999\r\n\r\n{",
                    head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
                    head + b"Content-Length: -1\r\n\r\n",
                    head + chance.randbytes(50) + b"\r\n\r\n",
                    b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
                ]
            )
            started = time.monotonic()
            self.note(_raw(self._url, data), started, data)

    def leaving(self, number: int) -> None:
        """Requests whose client closes its connection at once or after the first bytes."""
        chance = random.Random(4)
        for _ in range(number):
            body = json.dumps({"prompt": "leave", "max_tokens": 50, "n": 2, "stream": chance.random() < 0.5}).encode()
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            started = time.monotonic()
            with _connection(self._url) as connection:
                connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                if chance.random() < 0.5:
                    connection.recv(10)
            self.note("left", started, body)


def _settings(number: int) -> settings:
    return settings(
        max_examples=max(1, number),
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def _connection(url: str) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname or "", parts.port or 0), timeout=TIMEOUT_S)


def _raw(url: str, data: bytes) -> int | str:
    """Status of the answer to raw bytes; "closed" when the server just closes."""
    with _connection(url) as connection:
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(100)
        except ConnectionError:
            return "closed"
    return int(answer.split()[1]) if answer.startswith(b"HTTP/1.1 ") else "closed"


if __name__ == "__main__":
    main()
