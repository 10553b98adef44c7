"""`response_format`, `tools` and `tool_choice`: what they ask of the text."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from moestro.errors import RequestError
from moestro.text.grammar import StructuredOutputs
from moestro.text.tool_calls import CLOSE, OPEN

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
# Calls in the spelling that json.dumps has, which is what models were trained on.
_TIGHT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class JsonSchemaFormat(_Part):
    name: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Part):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputsBody(_Part):
    """vLLM's field."""

    json_: dict[str, Any] | str | bool | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Function(_Part):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Part):
    type: Literal["function"]
    function: Function


class NamedFunction(_Part):
    name: str


class NamedTool(_Part):
    type: Literal["function"] = "function"
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


def wanted_form(
    response_format: ResponseFormat | None, extra: StructuredOutputsBody | None
) -> StructuredOutputs | None:
    """The form of the text. Raises RequestError naming the field at fault."""
    from_format = None if response_format is None else _from_format(response_format)
    if extra is None:
        return from_format
    if from_format is not None:
        raise RequestError("structured_outputs and response_format exclude each other", "structured_outputs")
    given = {"json": extra.json_, "regex": extra.regex, "choice": extra.choice, "grammar": extra.grammar}
    return StructuredOutputs(**given, json_object=extra.json_object)  # type: ignore[arg-type]


def _from_format(wanted: ResponseFormat) -> StructuredOutputs | None:
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return StructuredOutputs(json_object=True)
    schema = wanted.json_schema.schema_ if wanted.json_schema is not None else None
    if schema is None:
        raise RequestError("response_format of type json_schema needs json_schema.schema", "response_format")
    return StructuredOutputs(json=schema)


class ToolUse:
    """The tools of one request. forced: the text has to be calls; named: of one tool that the client chose."""

    def __init__(self, tools: list[Tool], choice: ToolChoice | None, parallel: bool | None) -> None:
        """Raises RequestError naming the field at fault."""
        if len(tools) > MAX_TOOLS:
            raise RequestError(f"tools takes up to {MAX_TOOLS} tools", "tools")
        self.functions = {tool.function.name: tool.function for tool in tools}
        for name in self.functions:
            if not _NAME.fullmatch(name):
                raise RequestError(
                    f"tools: the name {name[:80]!r} must be 1 to 64 letters, digits, dots, dashes or underscores",
                    "tools",
                )
        if len(self.functions) != len(tools):
            raise RequestError("tools: two tools have the same name", "tools")
        if not tools and choice not in (None, "none", "auto"):
            raise RequestError("tool_choice needs tools", "tool_choice")
        self.named = isinstance(choice, NamedTool)
        self.forced = self.named or choice == "required"
        self.single = parallel is False or self.named
        self._chosen = list(self.functions)
        if isinstance(choice, NamedTool):
            name = choice.function.name
            if name not in self.functions:
                raise RequestError(f"tool_choice names {name[:80]!r}, which is not among the tools", "tool_choice")
            self._chosen = [name]
        self.active = bool(tools) and choice != "none"

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.functions)

    def form(self) -> StructuredOutputs | None:
        """What the text has to look like for a call that must be made."""
        if not self.forced:
            return None
        # A rule a tool: "$ref" in its parameters means the root of that very schema.
        rules = [self._rule(place, self.functions[name]) for place, name in enumerate(self._chosen)]
        bodies = " | ".join(f"body{place}" for place in range(len(rules)))
        more = "" if self.single else ' ("\\n" call)*'
        opening, closing = json.dumps(OPEN + "\n"), json.dumps("\n" + CLOSE)
        return StructuredOutputs(
            grammar="\n".join([f"start: call{more}", f"call: {opening} ({bodies}) {closing}", *rules, ""])
        )

    @staticmethod
    def _rule(place: int, function: Function) -> str:
        parameters = {"type": "object"} | (function.parameters or {}) | {"x-guidance": _TIGHT}
        head = json.dumps(f'{{"name": {json.dumps(function.name)}, "arguments": ')
        return f'body{place}: {head} args{place} "}}"\nargs{place}: %json {json.dumps(parameters)}'
