"""`moestro generate`"""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated

import typer

from moestro.cli.model import Model, load
from moestro.engine.config import EngineConfig
from moestro.errors import RequestError


def generate(
    model: Model = "demo",
    *,
    prompt: Annotated[str | None, typer.Option(help="Text to continue; - reads it from stdin.")] = None,
    prompt_token_ids: Annotated[str | None, typer.Option(help="Token ids to continue, as in 1,2,3.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample among the likeliest tokens of this joint probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample among so many likeliest tokens; 0 is off.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Go on past end tokens.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    engine: EngineConfig,
) -> None:
    """Continue a prompt and print the text."""
    from moestro.engine.request import SamplingParams

    given = _prompt(prompt, prompt_token_ids)
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        stop=stop or [],
        ignore_eos=ignore_eos,
    )
    llm = load(engine)
    started = time.perf_counter()
    text, token_ids, reason, error = "", list[int](), None, None
    for delta in llm.stream(given, params):
        text += delta.text
        token_ids += delta.token_ids
        reason, error = delta.finish_reason, delta.error
        if not as_json:
            print(delta.text if llm.tokenizer else "".join(f"{i} " for i in delta.token_ids), end="", flush=True)
    seconds = time.perf_counter() - started
    if reason == "error":
        raise RequestError(error or "the engine failed")
    if not as_json:
        print()
        return
    num_prompt = len(given) if isinstance(given, list) else len(llm.tokenizer.encode(given)) if llm.tokenizer else 0
    result = {
        "text": text,
        "token_ids": token_ids,
        "finish_reason": reason,
        "prompt_tokens": num_prompt,
        "completion_tokens": len(token_ids),
        "tokens_per_s": round(len(token_ids) / seconds, 3),
    }
    print(json.dumps(result, ensure_ascii=False))


def _prompt(text: str | None, token_ids: str | None) -> str | list[int]:
    if (text is None) == (token_ids is None):
        raise RequestError("give either --prompt or --prompt-token-ids", "prompt")
    if text is not None:
        return sys.stdin.read() if text == "-" else text
    try:
        return [int(part) for part in (token_ids or "").split(",")]
    except ValueError:
        raise RequestError(f"--prompt-token-ids {token_ids!r} must be whole numbers with commas between") from None
