"""Tool calls in text that arrives in parts."""

from __future__ import annotations

import json
import random

import pytest

from moestro.text.tool_calls import ToolCallParser, ToolPiece, with_tools

NAMES = frozenset({"add", "look"})
ONE = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "s": "} <\\" {"}}\n</tool_call>'


def parse(parts: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """(content, [(name, arguments)])"""
    parser = ToolCallParser(NAMES)
    pieces: list[ToolPiece] = [piece for part in parts for piece in parser.push(part)] + parser.flush()
    calls = []
    for piece in pieces:
        if piece.kind == "start":
            assert piece.index == len(calls)
            calls.append((piece.text, ""))
        elif piece.kind == "arguments":
            calls[piece.index] = (calls[piece.index][0], calls[piece.index][1] + piece.text)
    assert parser.num_calls == len(calls)
    return "".join(p.text for p in pieces if p.kind == "content"), calls


CASES = [
    ("plain < text", "plain < text", []),
    (ONE, "", [("add", '{"a": 1, "s": "} <\\" {"}')]),
    ("I will.\n" + ONE, "I will.\n", [("add", '{"a": 1, "s": "} <\\" {"}')]),
    (ONE + "\n" + ONE, "", [("add", '{"a": 1, "s": "} <\\" {"}')] * 2),
    (ONE + "\nDone now", "Done now", [("add", '{"a": 1, "s": "} <\\" {"}')]),
    ('<tool_call>{"arguments": {"b": [1]}, "name": "look"}</tool_call>', "", [("look", '{"b": [1]}')]),
    ('<tool_call>{"name": "look"}</tool_call>', "", [("look", "{}")]),
    ('<tool_call>{"name": "look", "parameters": {}}</tool_call>', "", [("look", "{}")]),
    ('<tool_call>{"name": "look", "arguments": {"b": [1', "", [("look", '{"b": [1')]),  # cut by max_tokens
    ('<tool_call>{"name": "other", "arguments": {}}</tool_call>', None, []),
    ("<tool_call>not json</tool_call> x", None, []),
    ("<tool_call>", None, []),
    ("<tool_ca", None, []),
    ('<tool_call>{"name": "add", "arguments": "text"}</tool_call>', None, []),
    ("<tool_call>" + "a" * 2000, None, []),
]


@pytest.mark.parametrize(("text", "content", "calls"), CASES, ids=[c[0][:50] for c in CASES])
def test_whole_and_in_any_parts(text: str, content: str | None, calls: list[tuple[str, str]]) -> None:
    """content None: all of the text."""
    expected = (text if content is None else content, calls)
    assert parse([text]) == expected
    assert parse(list(text)) == expected
    for seed in range(30):
        cuts = sorted(random.Random(seed).sample(range(len(text) + 1), min(4, len(text))))
        assert parse([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == expected


def test_arguments_stream_before_the_call_is_complete() -> None:
    parser = ToolCallParser(NAMES)
    assert parser.push('<tool_call>{"name": "add", "arguments": {"a": ') == [
        ToolPiece("start", "add", 0),
        ToolPiece("arguments", '{"a": ', 0),
    ]


def test_templates_without_tools_are_told_in_the_system_message() -> None:
    tool = {"type": "function", "function": {"name": "add"}}
    [system, user] = with_tools([{"role": "user", "content": "hi"}], [tool])
    assert json.dumps(tool) in system["content"]
    assert user == {"role": "user", "content": "hi"}
    [system] = with_tools([{"role": "system", "content": "Be kind."}], [tool])
    assert system["content"].startswith("Be kind.\n\n")
