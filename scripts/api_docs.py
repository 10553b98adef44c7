"""Writes docs/api.md and docs/openapi.json from the server's schema: .venv/bin/python scripts/api_docs.py

A test fails when they are not current. What vLLM has comes from docs/vllm_api.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from moestro.server.app import create_app
from moestro.server.config import ServerConfig
from moestro.server.schema import NOT_IMPLEMENTED, ChatBody, CompletionBody
from moestro.server.service import Service

DOCS = Path(__file__).parents[1] / "docs"
NOTES = {
    "add_special_tokens": "for chat, templates add what is needed",
    "best_of": "refused unless equal to n: vLLM removed it, OpenAI deprecated it",
    "echo": "completions, also with logprobs; refused for chat",
    "ignore_eos": "vLLM's",
    "logit_bias": "up to 300 tokens, -100 to 100",
    "logprobs": "minus infinity is -9999.0; the model's own, before temperature and penalties; up to 20",
    "max_completion_tokens": "wins over max_tokens",
    "max_tokens": "beyond the context it is clamped; 16 for completions, the rest of the context for chat",
    "model": "may be left out; another model's name is 404",
    "n": "up to 64",
    "parallel_tool_calls": "false: one call, when tool_choice asks for calls",
    "prompt": "a text, texts, token ids, or lists of them; up to 256",
    "prompt_logprobs": "not while streaming",
    "reasoning_effort": "given to the chat template",
    "response_format": "text, json_object, json_schema; needs the extra `structured`",
    "return_token_ids": "vLLM's",
    "seed": "same seed, same tokens, in any batch",
    "stop": "up to 16 strings; never part of the text, unless include_stop_str_in_output",
    "stream_options": "include_usage; needs stream",
    "structured_outputs": "json, regex, choice, grammar (llguidance's Lark dialect), json_object; needs `structured`",
    "tool_choice": "none, auto, required, a named function; required and named hold the model to the schema",
    "tools": "functions; read as `<tool_call>` JSON; told in the system message when the template knows no tools",
    "user": "accepted, not used",
}
INTRO = """# HTTP API

Made by `scripts/api_docs.py`; a test compares. The OpenAPI document is in [openapi.json](openapi.json) and at
`/openapi.json` of a running server.

Fields that nobody knows are ignored, as OpenAI-compatible servers do. Fields that are known, would change the answer
and are not implemented are refused by name (HTTP 400), unless their value asks for nothing.

`/v1/responses` is not there: it asks for stored conversations and background work, which belong in front of an engine.
Tool calls in other forms than `<tool_call>{JSON}</tool_call>` (Mistral's, Llama's, Qwen3-Coder's XML) are not read when
tool_choice is auto; they stay in the text.
"""


def openapi() -> dict[str, Any]:
    """The document, as a server without a model would give it."""
    return create_app(cast(Service, _NoService())).openapi()


class _NoService:
    """What building the application asks of a service."""

    name = "MODEL"
    created = 0
    config = ServerConfig()

    class info:
        max_model_len = 0


def api_page() -> str:
    """docs/api.md as text."""
    theirs = json.loads((DOCS / "vllm_api.json").read_text())
    version = theirs["version"]
    parts = [INTRO, "## Endpoints", "", f"| endpoint | moestro | vLLM {version} |", "|---|---|---|"]
    ours = [path.replace("{name}", "{model}") for path in openapi()["paths"]]
    known = {"/metrics", *theirs["paths"]}
    for path in sorted({*ours, "/v1/responses", "/v1/embeddings", "/v1/messages"}):
        parts.append(f"| `{path}` | {_mark(path in ours)} | {_mark(path in known)} |")
    for title, body, key in (
        ("/v1/chat/completions", ChatBody, "chat"),
        ("/v1/completions", CompletionBody, "completions"),
    ):
        parts += ["", f"## Fields of {title}", "", f"| field | moestro | vLLM {version} | notes |", "|---|---|---|---|"]
        for name in sorted({*body.model_fields, *theirs[key]}):
            note = NOTES.get(name, "")
            parts.append(f"| `{name}` | {_here(name, body)} | {_mark(name in theirs[key])} | {note} |")
        ours_only = sorted(set(NOT_IMPLEMENTED) - set(theirs[key]) - set(body.model_fields))
        parts += ["", f"Also refused by name: {', '.join(f'`{name}`' for name in ours_only)}."]
    return "\n".join(parts) + "\n"


def _here(name: str, body: type[ChatBody] | type[CompletionBody]) -> str:
    if name in body.model_fields:
        return "yes"
    return "refused" if name in NOT_IMPLEMENTED else "ignored"


def _mark(there: bool) -> str:
    return "yes" if there else "no"


if __name__ == "__main__":
    (DOCS / "api.md").write_text(api_page())
    (DOCS / "openapi.json").write_text(json.dumps(openapi(), indent=1) + "\n")
