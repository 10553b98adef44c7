"""The `moestro` command: a table of its subcommands, each in a file of its own. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

import moestro
from moestro.cli import bench, chat, generate, inspect, serve
from moestro.cli.border import guarded
from moestro.cli.flags import with_flags

COMMANDS: dict[str, Callable[..., None]] = {
    "serve": serve.serve,
    "generate": generate.generate,
    "chat": chat.chat,
    "inspect": inspect.inspect,
    "bench": bench.bench,
}

app = typer.Typer(
    help="Serve mixture-of-experts language models on the memory you have, and see what their experts do.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for name, command in COMMANDS.items():
    app.command(name)(guarded(with_flags(command)))


def _version(wanted: bool) -> None:
    if wanted:
        print(f"moestro {moestro.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of the `moestro` script."""
    app()
