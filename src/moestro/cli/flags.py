"""Command-line flags from dataclasses: a command asks for a configuration, its fields become the flags.

    def serve(model: str, *, engine: EngineConfig, server: ServerConfig) -> None: ...

gets --max-model-len and all others, with their help texts and defaults. A parameter of the command that has the name
of a field stands for that field.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import Field, fields, is_dataclass
from typing import Annotated, Any, get_type_hints

import typer


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """The command with each dataclass parameter replaced by one option a field."""
    hints = get_type_hints(command, include_extras=True)
    own = inspect.signature(command).parameters
    configs = {name: hints[name] for name in own if is_dataclass(hints[name])}
    parameters = [p.replace(annotation=hints[n], kind=p.KEYWORD_ONLY) for n, p in own.items() if n not in configs]
    taken = {p.name for p in parameters}
    for config in configs.values():
        types = get_type_hints(config)
        parameters += [_option(f, types[f.name], config.__name__) for f in fields(config) if f.name not in taken]

    @functools.wraps(command)
    def run(**options: Any) -> None:
        built = {name: config(**{f.name: options[f.name] for f in fields(config)}) for name, config in configs.items()}
        command(**{name: options[name] for name in own if name in options}, **built)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _option(field: Field[Any], kind: Any, group: str) -> inspect.Parameter:
    flag = f"--{field.name.replace('_', '-')}"
    if kind is bool:
        flag = f"{flag}/--no-{flag[2:]}"
    option = typer.Option(flag, help=field.metadata["help"], rich_help_panel=group)
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=Annotated[kind, option]
    )
