"""Tools and JSON schemas with the official client, over a small random model that has to obey the grammar."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel
from serving import Served, serve, write_fake_model

from moestro.checkpoint.synth import TINY, write_checkpoint
from moestro.engine.config import EngineConfig
from moestro.engine.worker import build_loop
from moestro.server.config import ServerConfig

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"$ref": "#/$defs/city"}},
                "required": ["city"],
                "additionalProperties": False,
                "$defs": {"city": {"enum": ["Rome", "Oslo"]}},
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "clock",
            "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
        },
    },
]
USER: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = TINY["qwen3_moe"] | {"eos_token_id": 2, "max_position_embeddings": 4096}
    return write_fake_model(write_checkpoint(config, tmp_path_factory.mktemp("tools"), seed=7))


@pytest.fixture(scope="module")
def real(folder: Path) -> Iterator[Served]:
    engine = EngineConfig(
        model=str(folder), served_model_name="m", kernels="reference", kv_memory="16MB", num_threads=1, max_num_seqs=4
    )
    yield from serve(engine, ServerConfig(port=0), build_loop)


@pytest.fixture(scope="module")
def client(real: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=real.url + "/v1", api_key="none", http_client=real.http(), max_retries=0)


def check(call: Any) -> None:
    assert call.type == "function"
    assert call.id.startswith("call_")
    arguments = json.loads(call.function.arguments)
    if call.function.name == "weather":
        assert arguments["city"] in ("Rome", "Oslo")
    else:
        assert (call.function.name, arguments) == ("clock", {})


def test_required(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="m",
        messages=USER,
        tools=TOOLS,
        tool_choice="required",
        n=3,
        seed=1,
        max_tokens=600,
        parallel_tool_calls=False,
    )
    for choice in answer.choices:
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        [call] = choice.message.tool_calls or []
        check(call)
    assert len({c.id for choice in answer.choices for c in choice.message.tool_calls or []}) == 3


def test_named(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(
        model="m",
        messages=USER,
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "clock"}},
        seed=1,
        max_tokens=600,
    ).choices[0]
    [call] = choice.message.tool_calls or []
    assert (choice.finish_reason, call.function.name, call.function.arguments) == ("stop", "clock", "{}")


def test_streamed_is_whole(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {
        "model": "m",
        "messages": USER,
        "tools": TOOLS,
        "tool_choice": "required",
        "seed": 5,
        "max_tokens": 600,
    }
    whole = client.chat.completions.create(**body).choices[0]
    names, arguments, reasons, ids = [], dict[int, str](), set(), set()
    for chunk in client.chat.completions.create(**body, stream=True):
        [choice] = chunk.choices
        reasons.add(choice.finish_reason)
        assert not choice.delta.content
        for call in choice.delta.tool_calls or []:
            if call.id:
                ids.add(call.id)
                names.append(call.function.name)
            arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
    calls = whole.message.tool_calls or []
    assert names == [c.function.name for c in calls]
    assert list(arguments.values()) == [c.function.arguments for c in calls]
    assert reasons == {None, whole.finish_reason}
    assert len(ids) == len(calls)


def test_auto_reads_the_models_own_calls(client: openai.OpenAI) -> None:
    """The text is dictated here; what counts is that it is read as the model's own."""
    text = 'Let me see. <tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    choice = client.chat.completions.create(
        model="m", messages=USER, tools=TOOLS, max_tokens=200, extra_body={"structured_outputs": {"choice": [text]}}
    ).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Let me see. ", "tool_calls")
    check((choice.message.tool_calls or [])[0])
    none = client.chat.completions.create(
        model="m",
        messages=USER,
        tools=TOOLS,
        tool_choice="none",
        max_tokens=200,
        extra_body={"structured_outputs": {"choice": [text]}},
    ).choices[0]
    assert (none.message.content, none.message.tool_calls, none.finish_reason) == (text, None, "stop")


def test_a_conversation_with_calls_and_their_results(client: openai.OpenAI) -> None:
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    messages: list[Any] = [
        *USER,
        {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
    ]
    answer = client.chat.completions.create(model="m", messages=messages, tools=TOOLS, max_tokens=3)
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 3


class City(BaseModel):
    name: str
    size: int


def test_json_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["Rome", "Oslo"]}, "size": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["name", "size"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}}
    answer = client.chat.completions.create(
        model="m", messages=USER, response_format=form, max_tokens=400, n=3, seed=2, logprobs=True, top_logprobs=2
    )
    for choice in answer.choices:
        city = City.model_validate_json(choice.message.content or "")
        assert city.name in ("Rome", "Oslo")
        assert choice.finish_reason == "stop"
        assert choice.logprobs is not None
        assert all(p.logprob >= -9999 for p in choice.logprobs.content or [])
    parts = client.chat.completions.create(
        model="m", messages=USER, response_format=form, max_tokens=400, seed=2, stream=True
    )
    City.model_validate_json("".join(c.choices[0].delta.content or "" for c in parts))


def test_the_clients_own_parsing(client: openai.OpenAI) -> None:
    """A free string may run on for ever in a random model, so its characters are few and its end is near."""
    form: Any = {"structured_outputs": {"json": {"enum": [{"name": "x", "size": 1}]}}}
    answer = client.chat.completions.create(model="m", messages=USER, max_tokens=100, extra_body=form)
    assert City.model_validate_json(answer.choices[0].message.content or "") == City(name="x", size=1)


def test_completions_take_forms_too(real: Served) -> None:
    with real.http() as http:
        body = {"prompt": ["a", "b"], "structured_outputs": {"regex": "[0-9]{3}"}, "max_tokens": 9, "n": 2}
        choices = http.post("/v1/completions", json=body).json()["choices"]
    assert len(choices) == 4
    assert all(c["text"].isdigit() and len(c["text"]) == 3 for c in choices)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nope"}}}}, "response_format"),
        ({"structured_outputs": {"regex": "(("}}, "structured_outputs"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": 3}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
)
def test_wrong_schemas_name_the_clients_field(real: Served, body: dict[str, Any], field: str) -> None:
    with real.http() as http:
        answer = http.post("/v1/chat/completions", json={"messages": USER, **body})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
    assert "cannot be used" in answer.json()["error"]["message"]


def test_nothing_is_left_behind(real: Served) -> None:
    with real.http() as http:
        page = http.get("/metrics").text
    assert isinstance(http, httpx.Client)
    assert 'moestro:num_requests_running{model_name="m"} 0.0' in page
