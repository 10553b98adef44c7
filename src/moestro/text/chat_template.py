"""A checkpoint's chat template: messages to the prompt text that the model was trained on."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from moestro.errors import CheckpointError, RequestError
from moestro.text.tokenizer import read_json

MAX_RENDERED_CHARS = 8_000_000
_RESERVED = ("self", "messages", "add_generation_prompt", "documents")


class ChatTemplate:
    """A Jinja template, run in a sandbox with the names and filters that Hugging Face gives templates."""

    def __init__(self, source: str, special_tokens: dict[str, str] | None = None, name: str = "chat template") -> None:
        """special_tokens: bos_token, eos_token and so on, offered to it. Raises CheckpointError on a syntax error."""
        self.source = source
        self._special_tokens = special_tokens or {}
        try:
            # Parsed only: compiling already computes constant expressions, and one can be as large as it likes.
            _environment().parse(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(
                f"{name} is not a valid Jinja template: {error.message} (line {error.lineno})"
            ) from None

    @property
    def knows_tools(self) -> bool:
        """Whether the template tells the model about tools."""
        return "tools" in self.source

    @cached_property
    def _template(self) -> jinja2.Template:
        return _environment().from_string(self.source)

    @classmethod
    def load(cls, folder: str | Path) -> ChatTemplate | None:
        """The template of a folder: chat_template.jinja, else tokenizer_config.json's; None when it has none."""
        folder = Path(folder)
        config = read_json(folder / "tokenizer_config.json")
        path = folder / "chat_template.jinja"
        source: str | None
        if path.is_file():
            source, name = _read_text(path), str(path)
        else:
            source, name = (
                _from_config(config.get("chat_template"), folder),
                f"chat_template in {folder / 'tokenizer_config.json'}",
            )
        if source is None:
            return None
        special = {k: v.get("content") if isinstance(v, dict) else v for k, v in config.items() if k.endswith("_token")}
        return cls(source, {k: v for k, v in special.items() if isinstance(v, str)}, name)

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **kwargs: Any) -> str:
        """Prompt text of a conversation.

        kwargs: further names for the template (enable_thinking and the like). Raises RequestError("messages") when the
        template refuses the conversation or its result is too long, RequestError("chat_template_kwargs") for a reserved
        name.
        """
        check_kwargs(kwargs)
        messages = [{k: v for k, v in message.items() if v is not None} for message in messages]
        names = {**self._special_tokens, **kwargs, "messages": messages, "add_generation_prompt": add_generation_prompt}
        names.setdefault("tools", None)
        names["documents"] = None
        parts, length = [], 0
        try:
            for part in self._template.generate(names):
                parts.append(part)
                length += len(part)
                if length > MAX_RENDERED_CHARS:
                    raise RequestError(f"messages render to more than {MAX_RENDERED_CHARS} characters", "messages")
        except RequestError:
            raise
        except jinja2.TemplateError as error:
            raise RequestError(
                f"the model's chat template refuses these messages: {error.message}", "messages"
            ) from None
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError) as error:
            # The template is a program of the checkpoint's; unusual messages make it fail in any of these ways.
            raise RequestError(f"the model's chat template fails on these messages: {error}", "messages") from None
        return "".join(parts)


def check_kwargs(kwargs: dict[str, Any]) -> None:
    """Raises RequestError("chat_template_kwargs") for names that `render` gives the template itself."""
    reserved = next((key for key in kwargs if key in _RESERVED), None)
    if reserved is not None:
        raise RequestError(f"chat_template_kwargs may not set {reserved}", "chat_template_kwargs")


def missing_template() -> RequestError:
    """The answer to a chat request for a model without a template."""
    return RequestError("this model has no chat template; send the finished prompt to /v1/completions", "messages")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None


def _from_config(value: Any, folder: Path) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        named = {entry.get("name"): entry.get("template") for entry in value}
        source = named.get("default") or next(iter(named.values()), None)
        if isinstance(source, str):
            return source
    raise CheckpointError(
        f"{folder}: chat_template in tokenizer_config.json must be a string or a list of named templates"
    )


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} marks the assistant's part for training; when serving, its body is rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 types it as an instance attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    helpers: dict[str, Callable[..., Any]] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(helpers)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own tojson escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
