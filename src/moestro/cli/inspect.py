"""`moestro inspect`"""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer


def inspect(
    path: Annotated[
        str, typer.Argument(help="A folder with config.json, such a file itself, a hub id, 'demo' or 'demo-dense'.")
    ] = "demo",
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Tell a model's sizes and options from its config.json alone."""
    from moestro.checkpoint.source import resolve_config
    from moestro.spec.describe import describe
    from moestro.spec.registry import read_spec

    facts = describe(read_spec(resolve_config(path)))
    if as_json:
        print(json.dumps(facts, ensure_ascii=False))
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        if value not in (None, [], {}) and name != "quantization_config":
            print(f"{name.replace('_', ' '):<{width}}  {_shown(name, value)}")


def _shown(name: str, value: Any) -> str:
    if isinstance(value, list):
        return "; ".join(map(str, value))
    if name.endswith("_params"):
        return f"{value / 1e9:.2f} B ({value:,})"
    if "bytes" in name and not isinstance(value, bool):
        return f"{value / 2**30:.2f} GiB ({value:,})" if value >= 2**28 else f"{value / 1024:.1f} KiB"
    return str(value)
