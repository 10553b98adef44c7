"""docs/options.md, made from the same dataclasses as the flags: python -m moestro.cli.reference > docs/options.md"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_type_hints

from moestro.bench.config import BenchConfig
from moestro.engine.config import EngineConfig
from moestro.server.config import ServerConfig
from moestro.settings import variables


def options_page() -> str:
    """The whole page as Markdown."""
    return "\n".join(
        [
            "# Options",
            "",
            "Made by `python -m moestro.cli.reference`; a test compares.",
            "In Python the engine's options are keywords of `LLM`.",
            "",
            *_table("Engine: `serve`, `generate`, `chat`, `LLM`", EngineConfig),
            *_table("Server: `serve`", ServerConfig),
            *_table("Load test: `bench`", BenchConfig),
            "## Environment",
            "",
            "| variable | meaning |",
            "|---|---|",
            *(f"| `{v.name}` | {v.help} |" for v in variables()),
            "",
        ]
    )


def _table(title: str, config: type[Any]) -> list[str]:
    types = get_type_hints(config)
    rows = []
    for f in fields(config):
        kind = str(types[f.name]).removeprefix("<class '").removesuffix("'>").replace(" | None", "")
        default = "" if f.default is None else f"`{f.default}`"
        flag = "MODEL" if f.name == "model" else f"--{f.name.replace('_', '-')}"
        rows.append(f"| `{flag}` | {kind} | {default} | {f.metadata['help']} |")
    return [f"## {title}", "", "| flag | type | default | meaning |", "|---|---|---|---|", *rows, ""]


if __name__ == "__main__":
    print(options_page(), end="")
