"""Chat templates render as Hugging Face renders them, in a sandbox, and fail as sentences."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moestro.errors import CheckpointError, RequestError
from moestro.text import chat_template
from moestro.text.chat_template import ChatTemplate

MESSAGES = [{"role": "system", "content": "Be <b>brief</b>."}, {"role": "user", "content": 'Hi "you" é'}]
CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
TEMPLATES = {
    "chatml": CHATML,
    "tojson and loop controls": """{{ bos_token }}
  {% for m in messages %}
    {% if m.role == 'system' %}
      {% continue %}
    {% endif %}
{{ m | tojson }} {{ m | tojson(indent=2) }}
  {% endfor %}
""",
    "generation tag": "{% for m in messages %}{% generation %}{{ m.content }}\n{% endgeneration %}!{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "date": "{{ strftime_now('%Y') }}",
    "tools test": "{% if tools %}tools{% else %}none{% endif %}{{ documents is none }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_equal_to_transformers(name: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    theirs, _ = render_jinja_template(
        [MESSAGES], chat_template=TEMPLATES[name], add_generation_prompt=True, bos_token="<s>"
    )
    ours = ChatTemplate(TEMPLATES[name], {"bos_token": "<s>"}).render(MESSAGES)
    assert ours == theirs[0]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": {"chat_template": "A{{ eos_token }}", "eos_token": {"content": "E"}}}, "AE"),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
                }
            },
            "D",
        ),
        ({"tokenizer_config.json": {"chat_template": "A"}, "chat_template.jinja": "J"}, "J"),
        ({"tokenizer_config.json": {}}, None),
        ({}, None),
    ],
)
def test_where_the_template_comes_from(files: dict[str, object], expected: str | None, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    template = ChatTemplate.load(tmp_path)
    assert (template.render(MESSAGES) if template else None) == expected


@pytest.mark.parametrize("value", [3, [{"name": "x"}], ["a"], []])
def test_chat_template_of_the_wrong_type(value: object, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    with pytest.raises(CheckpointError, match="chat_template"):
        ChatTemplate.load(tmp_path)


def test_syntax_error_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("line\n{% if %}")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja.*line 2"):
        ChatTemplate.load(tmp_path)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[7].content }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 // 0 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}x{% endfor %}",
    ],
)
def test_failing_templates_are_request_errors(source: str) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(source).render(MESSAGES)
    assert caught.value.field == "messages"


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARS", 100)
    with pytest.raises(RequestError, match="more than 100 characters"):
        ChatTemplate("{% for i in range(1000) %}abc{% endfor %}").render(MESSAGES)


def test_kwargs_reach_the_template_but_not_its_own_names() -> None:
    template = ChatTemplate("{{ enable_thinking }}")
    assert template.render(MESSAGES, enable_thinking=False) == "False"
    with pytest.raises(RequestError, match="documents"):
        template.render(MESSAGES, documents=[1])


def test_none_values_in_messages_are_left_out() -> None:
    source = "{{ 'tool_calls' in messages[0] }}"
    assert ChatTemplate(source).render([{"role": "user", "content": "x", "tool_calls": None}]) == "False"
