"""Tool calls in a model's text: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, the form that Hermes and
Qwen models were trained on, and that models are held to when a call is required."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_CALLS = 128
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
# A text inside the tags that does not begin like a call is given up on after so many characters, and is content.
_MAX_HEAD = 512


def with_tools(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with the tools told in its system message, for chat templates that know nothing of tools."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = (
        f"You may call these functions:\n<tools>\n{lines}\n</tools>\nTo call one, answer with its name and arguments:\n"
        f'{OPEN}\n{{"name": NAME, "arguments": OBJECT}}\n{CLOSE}'
    )
    if messages and messages[0].get("role") == "system":
        first = messages[0]
        return [{**first, "content": f"{first.get('content') or ''}\n\n{text}".strip()}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


@dataclass(frozen=True)
class ToolPiece:
    """A part of the answer, in order.

    kind: "content" with its text; "start" of call number `index` with the tool's name as text; "arguments" with a part
    of the call's arguments, which are a JSON object's text in the end.
    """

    kind: Literal["content", "start", "arguments"]
    text: str
    index: int = -1


class ToolCallParser:
    """Splits text that arrives in parts into content and calls. Text that only looks like a call stays content."""

    def __init__(self, names: frozenset[str]) -> None:
        """names: the tools there are; a call of another one is content."""
        self._names = names
        self._held = ""
        self._in_call = False
        self._arguments: _ObjectEnd | None = None
        self._after_call = False
        self.num_calls = 0

    def push(self, text: str) -> list[ToolPiece]:
        """The pieces that have become certain."""
        self._held += text
        pieces: list[ToolPiece] = []
        while self._advance(pieces):
            pass
        return pieces

    def flush(self) -> list[ToolPiece]:
        """What is left when the text is over; an unfinished call keeps what it has, an unclear one is content."""
        held, self._held = self._held, ""
        if self._arguments is not None:
            self._arguments = None
            return []  # all of it has been sent, and what follows the arguments is only their wrapping
        if self._in_call:
            self._in_call = False
            whole = self._whole_call(held)
            return whole if whole is not None else [ToolPiece("content", OPEN + held)]
        return self._content(held)

    def _advance(self, pieces: list[ToolPiece]) -> bool:
        """Take one part off the held text; False when more text is needed first."""
        if self._arguments is not None:
            return self._take_arguments(pieces)
        if self._in_call:
            return self._take_head(pieces)
        start = self._held.find(OPEN)
        if start >= 0 and self.num_calls < MAX_CALLS:
            pieces += self._content(self._held[:start])
            self._held, self._in_call = self._held[start + len(OPEN) :], True
            return True
        keep = _overlap(self._held, OPEN)
        pieces += self._content(self._held[: len(self._held) - keep])
        self._held = self._held[len(self._held) - keep :]
        return False

    def _take_head(self, pieces: list[ToolPiece]) -> bool:
        if (match := _HEAD.match(self._held)) and (name := _text_of(match[1])) in self._names:
            pieces.append(self._start(name))
            self._held, self._arguments = self._held[match.end() :], _ObjectEnd()
            return True
        end = self._held.find(CLOSE)
        if end >= 0:
            inside, self._held, self._in_call = self._held[:end], self._held[end + len(CLOSE) :], False
            whole = self._whole_call(inside)
            pieces += whole if whole is not None else [ToolPiece("content", OPEN + inside + CLOSE)]
            return True
        begins_well = self._held.lstrip()[:1] in ("", "{")
        if not begins_well and len(self._held) > _MAX_HEAD:
            pieces.append(ToolPiece("content", OPEN + self._held))
            self._held, self._in_call = "", False
        return False

    def _take_arguments(self, pieces: list[ToolPiece]) -> bool:
        assert self._arguments is not None
        if not self._arguments.done:
            end = self._arguments.push(self._held)
            if end:
                pieces.append(ToolPiece("arguments", self._held[:end], self.num_calls - 1))
                self._held = self._held[end:]
        close = self._held.find(CLOSE)
        if not self._arguments.done or close < 0:
            return False
        self._held, self._in_call, self._arguments = self._held[close + len(CLOSE) :], False, None
        return True

    def _whole_call(self, text: str) -> list[ToolPiece] | None:
        """A call whose fields come in another order, or without arguments."""
        try:
            call = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(call, dict) or call.get("name") not in self._names:
            return None
        arguments: Any = call.get("arguments", call.get("parameters", {}))
        if isinstance(arguments, str):
            return None
        return [
            self._start(call["name"]),
            ToolPiece("arguments", json.dumps(arguments, ensure_ascii=False), self.num_calls - 1),
        ]

    def _start(self, name: str) -> ToolPiece:
        self._after_call = True
        self.num_calls += 1
        return ToolPiece("start", name, self.num_calls - 1)

    def _content(self, text: str) -> list[ToolPiece]:
        """White space after a call is what separates it from the next, not content."""
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        return [ToolPiece("content", text)] if text else []


class _ObjectEnd:
    """Finds the end of a JSON object in text that arrives in parts."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.done = False

    def push(self, text: str) -> int:
        """Number of characters that belong to the object."""
        for place, char in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = char == "\\"
                self._in_string = char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.done = True
                    return place + 1
        return len(text)


def _text_of(quoted: str) -> str:
    try:
        return str(json.loads(quoted))
    except ValueError:
        return ""


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of the text that may begin the mark."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)
