"""The official client's calls, whole and streamed, and what compatible servers add."""

from __future__ import annotations

import json
import time

import httpx
import openai
import pytest
from fake_loop import MAX_MODEL_LEN, make_tokenizer
from serving import Served

from moestro.engine.messages import decode_to_engine
from moestro.text.tokenizer import byte_level_bytes


@pytest.fixture(scope="module")
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.url + "/v1", api_key="none", http_client=served.http(), max_retries=0)


def test_models(client: openai.OpenAI, http: httpx.Client) -> None:
    [model] = client.models.list().data
    assert model.id == "fake"
    assert client.models.retrieve("fake").model_extra["max_model_len"] == MAX_MODEL_LEN
    assert http.get("/v1/models/other").status_code == 404


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "abc"}], max_tokens=4, n=2, logprobs=True, top_logprobs=2
    )
    assert [c.message.content for c in answer.choices] == [":a;c"] * 2  # the prompt, u:abc;a:, backwards
    assert answer.choices[1].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (8, 8, 16)
    first = answer.choices[0].logprobs.content[0]
    assert (first.token, first.bytes, first.logprob, len(first.top_logprobs)) == (":", [58], -7.0, 2)
    assert first.top_logprobs[0].logprob == -9999.0  # C89: JSON has no minus infinity


def test_chat_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        max_completion_tokens=5,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == ":a;b\n"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 5
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 7


def test_stop_string(client: openai.OpenAI) -> None:
    """C87, over the wire: no part of the stop string is sent."""
    stream = client.completions.create(model="fake", prompt="fedcba", max_tokens=20, stop=["def"], stream=True)
    chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks) == "abc"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert chunks[-1].choices[0].model_extra["stop_reason"] == "def"


def test_characters_are_not_split(client: openai.OpenAI) -> None:
    """C86, over the wire: the fake reads bytes backwards, so that the prompt's bytes are given reversed."""
    ids = [_id(b) for b in reversed("é😀".encode())]
    stream = client.completions.create(model="fake", prompt=ids, max_tokens=6, stream=True)
    assert [c.choices[0].text for c in stream if c.choices[0].text] == ["é", "😀"]


def _id(byte: int) -> int:
    vocab = make_tokenizer().get_vocab()
    return next(i for piece, i in vocab.items() if len(piece) == 1 and byte_level_bytes(piece) == bytes([byte]))


@pytest.mark.parametrize(
    ("prompt", "num_prompts"), [("ab", 1), (["ab", "cd"], 2), ([65, 66], 1), ([[65, 66], [67, 68]], 2)]
)
def test_completion_prompts(client: openai.OpenAI, prompt: str, num_prompts: int) -> None:
    answer = client.completions.create(model="fake", prompt=prompt, max_tokens=2, n=2)
    assert [c.index for c in answer.choices] == list(range(2 * num_prompts))
    assert answer.choices[0].text == answer.choices[1].text
    assert answer.usage.prompt_tokens == 2 * num_prompts
    if prompt == ["ab", "cd"]:
        assert [c.text for c in answer.choices] == ["ba", "ba", "dc", "dc"]


def test_echo_with_logprobs_scores_a_prompt(client: openai.OpenAI) -> None:
    """The way evaluation harnesses ask: max_tokens=0, echo, logprobs; C89: the first prompt token has none."""
    answer = client.completions.create(model="fake", prompt="abc", max_tokens=0, echo=True, logprobs=1)
    [choice] = answer.choices
    assert choice.text == "abc"
    assert choice.logprobs.tokens == ["a", "b", "c"]
    assert choice.logprobs.token_logprobs == [None, -7.0, -7.0]
    assert choice.logprobs.text_offset == [0, 1, 2]
    assert choice.logprobs.top_logprobs[1]["b"] == -7.0
    assert answer.usage.completion_tokens == 0


def test_completion_logprobs_name_the_chosen_token(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="abc", max_tokens=2, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == ["c", "b"]
    assert all(len(table) == 3 for table in logprobs.top_logprobs)
    assert logprobs.top_logprobs[0]["c"] == -7.0
    assert min(logprobs.top_logprobs[0].values()) == -9999.0


def test_prompt_logprobs_in_vllm_form(http: httpx.Client) -> None:
    body = {"prompt": [65, 66], "max_tokens": 1, "prompt_logprobs": 1}
    [choice] = http.post("/v1/completions", json=body).json()["choices"]
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1]["66"] == {"logprob": -7.0, "rank": 100, "decoded_token": _token(66)}


def _token(token_id: int) -> str:
    return make_tokenizer().decode([token_id])


def test_echo_in_a_stream(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model="fake", prompt=["ab", "cd"], max_tokens=1, echo=True, stream=True))
    texts = {i: "".join(c.choices[0].text for c in chunks if c.choices[0].index == i) for i in (0, 1)}
    assert texts == {0: "abb", 1: "cdd"}


def test_tokenize_and_back(http: httpx.Client) -> None:
    answer = http.post("/tokenize", json={"prompt": "a b", "return_token_strs": True}).json()
    assert (answer["count"], answer["max_model_len"], answer["token_strs"]) == (3, MAX_MODEL_LEN, ["a", "Ġ", "b"])
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "a b"}
    chat = http.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}], "add_generation_prompt": False})
    assert http.post("/detokenize", json={"tokens": chat.json()["tokens"]}).json() == {"prompt": "u:x;"}


def test_stream_format(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": "ab", "max_tokens": 2, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(e.removeprefix("data: "))["object"] == "text_completion" for e in events[:-2])


def test_page_health_and_loads(http: httpx.Client) -> None:
    page = http.get("/")
    assert "fake" in page.text
    assert "curl http://127.0.0.1" in page.text
    assert http.get("/health").json() == {"status": "ok"}
    loads = http.get("/moe/loads", params={"window": "total"}).json()
    assert (loads["window"], loads["top_k"], loads["layers"]) == ("total", 2, [0, 1])
    assert len(loads["loads"]) == 2
    assert http.get("/moe/loads", params={"window": "last"}).status_code == 400


def metrics(http: httpx.Client) -> dict[str, float]:
    lines = [line for line in http.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_metrics_count_each_request_once(http: httpx.Client) -> None:
    """C94."""
    before = metrics(http)
    http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 4})
    http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 4, "n": 2, "stream": True})
    http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 50, "stop": "b"})
    http.post("/v1/completions", json={"prompt": "abc", "max_tokens": -1})
    after = metrics(http)

    def grew(name: str, labels: str = "") -> float:
        key = f'moestro:{name}{{{labels}model_name="fake"}}'
        return after[key] - before[key]

    assert grew("request_success_total", 'finished_reason="length",') == 2
    assert grew("request_success_total", 'finished_reason="stop",') == 1
    assert grew("request_success_total", 'finished_reason="error",') == 0
    assert grew("generation_tokens_total") == 4 + 8 + 2
    assert grew("prompt_tokens_total") == 9
    assert grew("time_to_first_token_seconds_count") == 3
    assert grew("e2e_request_latency_seconds_count") == 3
    assert grew("inter_token_latency_seconds_count") == 3 + 6 + 1
    assert grew("engine_steps_total") > 0
    assert after['moestro:num_requests_running{model_name="fake"}'] == 0
    assert after['moestro:expert_tokens_total{layer="0",model_name="fake"}'] == 6
    assert after['moestro:expert_tokens_max{layer="1",model_name="fake"}'] == 3


def test_requests_that_end_by_themselves_send_no_abort(
    served: Served, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C91: aborts of finished requests once were most of the engine's messages."""
    sent: list[object] = []
    send = served.service.client._send_bytes
    monkeypatch.setattr(
        served.service.client, "_send_bytes", lambda data: (sent.append(decode_to_engine(data)), send(data))
    )
    for stream in (True, False):
        body = {"prompt": ["ab", "cd"], "max_tokens": 2, "n": 2, "stream": stream}
        assert http.post("/v1/completions", json=body).status_code == 200
    http.get("/health")
    assert [type(message).__name__ for message in sent] == ["Add"] * 4


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_stops_its_request(served: Served, http: httpx.Client, stream: bool) -> None:
    """C91: within a step, counted once, and no abort is sent for requests that ended by themselves."""
    aborted = 'moestro:request_success_total{finished_reason="abort",model_name="fake"}'
    before = metrics(http)[aborted]
    body = {"prompt": "slow" + "x" * 8, "stream": stream, "max_tokens": 50}
    with served.http() as other:
        if stream:
            with other.stream("POST", "/v1/completions", json=body) as answer:
                next(answer.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                other.post("/v1/completions", json=body, timeout=0.2)
    deadline = time.monotonic() + 5
    while served.service.client.num_open and time.monotonic() < deadline:
        time.sleep(0.005)
    after = metrics(http)
    assert served.service.client.num_open == 0
    assert after[aborted] == before + 1
    assert after['moestro:num_requests_running{model_name="fake"}'] == 0
    assert served.service.client.stats.finished.get("abort", 0) == after[aborted]
