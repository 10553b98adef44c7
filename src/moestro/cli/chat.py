"""`moestro chat`"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moestro.cli.model import Model, load
from moestro.engine.config import EngineConfig
from moestro.errors import RequestError

if TYPE_CHECKING:
    from moestro.engine.llm import LLM
    from moestro.engine.request import SamplingParams
    from moestro.text.chat_template import ChatTemplate


def chat(
    model: Model = "demo",
    *,
    system: Annotated[str | None, typer.Option(help="System message that the conversation begins with.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens an answer; as many as fit when not given.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.")] = 0.7,
    top_p: Annotated[float, typer.Option(help="Sample among the likeliest tokens of this joint probability.")] = 0.95,
    engine: EngineConfig,
) -> None:
    """Talk to a model in the terminal. /reset forgets the conversation, /exit ends; Ctrl-C stops an answer."""
    from rich.console import Console

    from moestro.engine.request import SamplingParams
    from moestro.text.chat_template import ChatTemplate, missing_template

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p)
    llm = load(engine)
    template = ChatTemplate.load(engine.tokenizer or llm.info.folder)
    if template is None:
        raise missing_template()
    console = Console(highlight=False)
    start: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    console.print(f"{llm.info.name}: /reset forgets, /exit ends", style="dim")
    for line in _lines(console):
        if line == "/exit":
            return
        if line == "/reset":
            messages = list(start)
            continue
        messages.append({"role": "user", "content": line})
        try:
            answer = _answer(llm, template, messages, params)
        except RequestError as error:
            messages.pop()
            console.print(f"{error} (/reset makes room)", style="red", markup=False)
            continue
        messages.append({"role": "assistant", "content": answer})


def _lines(console: Any) -> Iterator[str]:
    """What the user types, line by line, until the end of input or Ctrl-C at the prompt."""
    if sys.stdin.isatty():
        import readline  # noqa: F401 - importing it gives input() its line editing
    while True:
        try:
            line = console.input("[bold]> [/bold]") if sys.stdin.isatty() else input()
        except EOFError:
            return
        if line.strip():
            yield line.strip()


def _answer(llm: LLM, template: ChatTemplate, messages: list[dict[str, Any]], params: SamplingParams) -> str:
    """Print an answer as it grows. Ctrl-C ends it there; what was said stays in the conversation."""
    assert llm.tokenizer is not None, "a chat template comes with a tokenizer"
    ids = llm.tokenizer.encode(template.render(messages), add_special_tokens=False)
    text = ""
    deltas = llm.stream(ids, params)
    try:
        for delta in deltas:
            text += delta.text
            print(delta.text, end="", flush=True)
            if delta.finish_reason == "error":
                raise RequestError(delta.error or "the engine failed")
    except KeyboardInterrupt:
        deltas.close()  # type: ignore[attr-defined]
    print()
    return text
