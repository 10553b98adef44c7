"""Bad input gets a 4xx in OpenAI's form that names the field; nothing about the machine is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_loop import MAX_MODEL_LEN, VOCAB_SIZE
from pydantic import ValidationError
from serving import Served, serve

from moestro.engine.config import EngineConfig
from moestro.errors import RequestError
from moestro.server.config import ServerConfig
from moestro.server.schema import CompletionBody, completion_params

USER = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"

# path, body, status, field
WRONG: list[tuple[str, Any, int, str | None]] = [
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {}, 400, "messages"),
    (CHAT, {"messages": "hi"}, 400, "messages"),
    (CHAT, {"messages": [{"content": "x"}]}, 400, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": 3}]}, 400, "messages"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        400,
        "messages",
    ),
    (CHAT, {"messages": USER, "model": "other"}, 404, "model"),
    (CHAT, {"messages": USER, "model": 3}, 400, "model"),
    (CHAT, {"messages": USER, "temperature": -1}, 400, "temperature"),
    (CHAT, {"messages": USER, "temperature": "hot"}, 400, "temperature"),
    (CHAT, {"messages": USER, "temperature": True}, 400, "temperature"),
    (CHAT, {"messages": USER, "top_p": 0}, 400, "top_p"),
    (CHAT, {"messages": USER, "top_p": 1.1}, 400, "top_p"),
    (CHAT, {"messages": USER, "top_k": -2}, 400, "top_k"),
    (CHAT, {"messages": USER, "min_p": 2}, 400, "min_p"),
    (CHAT, {"messages": USER, "n": 0}, 400, "n"),
    (CHAT, {"messages": USER, "n": 65}, 400, "n"),
    (CHAT, {"messages": USER, "n": 17}, 400, "n"),
    (CHAT, {"messages": USER, "n": 1.5}, 400, "n"),
    (CHAT, {"messages": USER, "max_tokens": 0}, 400, "max_tokens"),
    (CHAT, {"messages": USER, "max_completion_tokens": 0}, 400, "max_completion_tokens"),
    (CHAT, {"messages": USER, "min_tokens": 5, "max_tokens": 2}, 400, "min_tokens"),
    (CHAT, {"messages": USER, "presence_penalty": 3}, 400, "presence_penalty"),
    (CHAT, {"messages": USER, "frequency_penalty": -3}, 400, "frequency_penalty"),
    (CHAT, {"messages": USER, "repetition_penalty": 0}, 400, "repetition_penalty"),
    (CHAT, {"messages": USER, "logit_bias": {"a": 1}}, 400, "logit_bias"),
    (CHAT, {"messages": USER, "logit_bias": {"-1": 1}}, 400, "logit_bias"),
    (CHAT, {"messages": USER, "logit_bias": {"1": 101}}, 400, "logit_bias"),
    (CHAT, {"messages": USER, "logit_bias": {str(VOCAB_SIZE): 1}}, 400, "logit_bias"),
    (CHAT, {"messages": USER, "logprobs": 3}, 400, "logprobs"),
    (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    (CHAT, {"messages": USER, "top_logprobs": 2}, 400, "top_logprobs"),
    (CHAT, {"messages": USER, "seed": 2**70}, 400, "seed"),
    (CHAT, {"messages": USER, "seed": 10**400}, 400, "seed"),
    (CHAT, {"messages": USER, "max_tokens": 2**80}, 400, "max_tokens"),
    (CHAT, {"messages": USER, "temperature": 10**400}, 400, "temperature"),
    (CHAT, {"messages": USER, "model": "\ud800"}, 404, "model"),
    (CHAT, {"messages": USER, "stop": ["\ud800"]}, 400, None),
    (CHAT, {"messages": USER, "structured_outputs": {"json": {"const": 2**80}}}, 400, None),
    (CHAT, {"messages": USER, "stop": ["a"] * 17}, 400, "stop"),
    (CHAT, {"messages": USER, "stop": [""]}, 400, "stop"),
    (CHAT, {"messages": USER, "stop": [1]}, 400, "stop"),
    (CHAT, {"messages": USER, "stop_token_ids": [VOCAB_SIZE]}, 400, "stop_token_ids"),
    (CHAT, {"messages": USER, "stream": "yes"}, 400, "stream"),
    (CHAT, {"messages": USER, "stream_options": {"include_usage": True}}, 400, "stream_options"),
    (CHAT, {"messages": USER, "stream": True, "prompt_logprobs": 1}, 400, "prompt_logprobs"),
    (CHAT, {"messages": USER, "chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs"),
    (CHAT, {"messages": USER, "chat_template_kwargs": {"add_generation_prompt": False}}, 400, "chat_template_kwargs"),
    (CHAT, {"messages": USER, "chat_template": "x"}, 400, "chat_template"),
    (CHAT, {"messages": USER, "tools": [{"type": "function"}]}, 400, "tools"),
    (CHAT, {"messages": USER, "tool_choice": "required"}, 400, "tool_choice"),
    (CHAT, {"messages": USER, "response_format": {"type": "json_schema", "json_schema": {}}}, 400, "response_format"),
    (CHAT, {"messages": USER, "response_format": {"type": "xml"}}, 400, "response_format"),
    (CHAT, {"messages": USER, "response_format": {"type": "json_schema"}}, 400, "response_format"),
    (CHAT, {"messages": USER, "structured_outputs": {}}, 400, "structured_outputs"),
    (CHAT, {"messages": USER, "structured_outputs": {"regex": "a", "choice": ["a"]}}, 400, "structured_outputs"),
    (
        CHAT,
        {"messages": USER, "structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        400,
        "structured_outputs",
    ),
    (CHAT, {"messages": USER, "response_format": {"type": "json_object"}, "min_tokens": 2}, 400, "min_tokens"),
    (CHAT, {"messages": USER, "tools": [TOOL, TOOL]}, 400, "tools"),
    (CHAT, {"messages": USER, "tools": [{"type": "function", "function": {"name": "a b"}}]}, 400, "tools"),
    (CHAT, {"messages": USER, "tools": [TOOL] * 200}, 400, "tools"),
    (CHAT, {"messages": USER, "tools": [TOOL], "tool_choice": "maybe"}, 400, "tool_choice"),
    (CHAT, {"messages": USER, "tools": [TOOL], "tool_choice": {"function": {"name": "g"}}}, 400, "tool_choice"),
    (
        CHAT,
        {"messages": USER, "tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}},
        400,
        "response_format",
    ),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [1]}]}, 400, "messages"),
    (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        400,
        "messages",
    ),
    (CHAT, {"messages": USER, "n": 2, "best_of": 4}, 400, "best_of"),
    (CHAT, {"messages": USER, "guided_json": {}}, 400, "guided_json"),
    (CHAT, {"messages": USER, "audio": {}}, 400, "audio"),
    (CHAT, {"messages": USER, "modalities": ["audio"]}, 400, "modalities"),
    (CHAT, {"messages": USER, "echo": True}, 400, "echo"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * MAX_MODEL_LEN}]}, 400, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, 400, "messages"),
    (COMPLETION, {}, 400, "prompt"),
    (COMPLETION, {"prompt": None}, 400, "prompt"),
    (COMPLETION, {"prompt": ""}, 400, "prompt"),
    (COMPLETION, {"prompt": []}, 400, "prompt"),
    (COMPLETION, {"prompt": [[]]}, 400, "prompt"),
    (COMPLETION, {"prompt": [1, "a"]}, 400, "prompt"),
    (COMPLETION, {"prompt": [VOCAB_SIZE]}, 400, "prompt"),
    (COMPLETION, {"prompt": [-1]}, 400, "prompt"),
    (COMPLETION, {"prompt": [2**80]}, 400, "prompt"),
    (COMPLETION, {"prompt": {"a": 1}}, 400, "prompt"),
    (COMPLETION, {"prompt": ["a"] * 257}, 400, "prompt"),
    (COMPLETION, {"prompt": "refuse this"}, 400, "prompt"),
    (COMPLETION, {"prompt": "refuse this", "stream": True}, 400, "prompt"),
    (COMPLETION, {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    (COMPLETION, {"prompt": "a", "logprobs": 21}, 400, "logprobs"),
    (COMPLETION, {"prompt": "a", "best_of": 3}, 400, "best_of"),
    (COMPLETION, {"prompt": "a", "suffix": "b"}, 400, "suffix"),
    (COMPLETION, {"prompt": "a", "use_beam_search": True}, 400, "use_beam_search"),
    (COMPLETION, {"prompt": "a", "echo": True, "logprobs": 1, "stream": True}, 400, "echo"),
    (COMPLETION, [1], 400, None),
    (COMPLETION, "text", 400, None),
    (COMPLETION, None, 400, None),
    ("/tokenize", {}, 400, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": USER}, 400, "prompt"),
    ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
    ("/detokenize", {"tokens": [VOCAB_SIZE]}, 400, "tokens"),
    ("/detokenize", {"tokens": ["a"]}, 400, "tokens"),
    ("/v1/nothing", {}, 404, None),
    ("/v1/models", {}, 405, None),
]


@pytest.mark.parametrize(("path", "body", "status", "field"), WRONG, ids=[f"{w[0]} {w[1]!r:.60}" for w in WRONG])
def test_wrong_request(http: httpx.Client, path: str, body: Any, status: int, field: str | None) -> None:
    answer = http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == field
    assert error["message"]
    assert "/home" not in error["message"]
    assert "Traceback" not in error["message"]


@pytest.mark.parametrize("content", [b"", b"{", b'{"prompt": "a",}', b"\xff\xfe", b"[" * 100_000, b'{"prompt": "a"} x'])
def test_bodies_that_are_not_json(http: httpx.Client, content: bytes) -> None:
    answer = http.post(COMPLETION, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


MANY = 10_000


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [1, "a"] * MANY},
        {"prompt": [[1]] * MANY},
        {"prompt": "a", "stop": [1] * MANY},
        {"prompt": "a", "stop_token_ids": ["a"] * MANY},
        {"prompt": "a", "logit_bias": {f"x{i}": "y" for i in range(MANY)}},
    ],
)
def test_a_body_with_many_mistakes_makes_few_complaints(body: dict[str, Any]) -> None:
    """Or else 16 MB of them take minutes and gigabytes."""
    with pytest.raises((ValidationError, RequestError)) as caught:
        completion_params(CompletionBody.model_validate(body))
    if isinstance(caught.value, ValidationError):
        assert caught.value.error_count() < 10


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_numbers_that_json_has_not(http: httpx.Client, number: str) -> None:
    content = f'{{"prompt": "a", "temperature": {number}}}'
    answer = http.post(COMPLETION, content=content, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "temperature")


HARMLESS = [
    {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "unknown": 1},
    {"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "modalities": ["text"], "suffix": None},
    {"temperature": None, "top_p": None, "n": None, "stop": None, "seed": None, "stream": None, "logit_bias": None},
    {"best_of": 1, "stream": False, "top_k": -1, "min_p": 0, "length_penalty": 1.0, "reasoning_effort": "low"},
]


@pytest.mark.parametrize("extra", HARMLESS)
def test_fields_that_ask_for_nothing(http: httpx.Client, extra: dict[str, Any]) -> None:
    for path, body in ((CHAT, {"messages": USER}), (COMPLETION, {"prompt": "a"})):
        answer = http.post(path, json=body | extra | {"max_tokens": 1})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("length", [MAX_MODEL_LEN - 2, MAX_MODEL_LEN - 1, MAX_MODEL_LEN, MAX_MODEL_LEN + 1])
@pytest.mark.parametrize("max_tokens", [1, 1000])
def test_prompts_around_the_context_limit(http: httpx.Client, length: int, max_tokens: int) -> None:
    """C92: refused with numbers when there is no room for one token, else max_tokens is clamped to the room."""
    answer = http.post(COMPLETION, json={"prompt": [65] * length, "max_tokens": max_tokens})
    if length >= MAX_MODEL_LEN:
        assert answer.status_code == 400
        assert f"{length} tokens" in answer.json()["error"]["message"]
        assert str(MAX_MODEL_LEN) in answer.json()["error"]["message"]
    else:
        assert answer.json()["usage"]["completion_tokens"] == min(max_tokens, MAX_MODEL_LEN - length)
    assert http.post(COMPLETION, json={"prompt": "a"}).status_code == 200


def test_body_size_with_and_without_a_length(http: httpx.Client) -> None:
    body = json.dumps({"prompt": "a" * 200_000}).encode()
    headers = {"Content-Type": "application/json"}
    answers = [
        http.post(COMPLETION, content=body, headers=headers),
        http.post(COMPLETION, content=iter([body[:50_000], body[50_000:150_000], body[150_000:]]), headers=headers),
    ]
    assert [answer.status_code for answer in answers] == [413, 413]
    assert "100000 bytes" in answers[0].json()["error"]["message"]


def test_overload_is_429_with_retry_after(served: Served, http: httpx.Client) -> None:
    """16 completions can be open: four computed and twelve waiting."""
    body = {"prompt": "slow" + "x" * 8, "n": 14, "max_tokens": 50, "stream": True}
    with served.http() as other, other.stream("POST", COMPLETION, json=body) as answer:
        lines = answer.iter_lines()  # kept: httpx closes the connection when its iterator is dropped
        next(lines)
        refused = http.post(COMPLETION, json={"prompt": "a", "n": 3})
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert http.post(COMPLETION, json={"prompt": "a", "n": 2, "max_tokens": 1}).status_code == 200


@pytest.fixture(scope="module")
def keyed(model_folder: Path) -> Iterator[Served]:
    yield from serve(EngineConfig(model=str(model_folder)), ServerConfig(port=0, api_key="s3cret-é"))


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer wrong", "s3cret-é", "Basic s3cret-é"])
def test_without_the_key(keyed: Served, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header.encode()}
    with keyed.http(headers=headers) as client:
        for method, path in (("POST", COMPLETION), ("GET", "/v1/models"), ("GET", "/moe/loads"), ("POST", "/tokenize")):
            answer = client.request(method, path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert client.get("/health").status_code == 200
        assert client.get("/metrics").status_code == 200


def test_with_the_key_and_the_name_of_a_folder(keyed: Served, model_folder: Path) -> None:
    with keyed.http(headers={"Authorization": "Bearer s3cret-é".encode()}) as client:
        assert client.get("/v1/models").json()["data"][0]["id"] == model_folder.name
        assert "Bearer KEY" in client.get("/").text
