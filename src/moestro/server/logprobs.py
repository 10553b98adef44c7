"""Log-probabilities in the three shapes that clients know: chat's, completions', and vLLM's prompt_logprobs.

JSON has no infinity: a token that was impossible gets LOWEST.
"""

from __future__ import annotations

from typing import Any

from moestro.engine.request import PositionLogprobs, TokenLogprob
from moestro.text.tokenizer import Tokenizer

LOWEST = -9999.0


def finite(logprob: float) -> float:
    return max(logprob, LOWEST)


def chat_logprobs(positions: list[PositionLogprobs], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The `logprobs` of a chat choice; bytes are those of the token itself, also when it is part of a character."""

    def entry(token: TokenLogprob) -> dict[str, Any]:
        data = tokenizer.token_bytes(token.token_id) if tokenizer else token.text.encode()
        return {"token": token.text, "logprob": finite(token.logprob), "bytes": list(data)}

    content = [entry(p.chosen) | {"top_logprobs": [entry(token) for token in p.top]} for p in positions]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """The `logprobs` of a completions choice, offset by offset over all its chunks."""

    def __init__(self) -> None:
        self._offset = 0

    def of(self, positions: list[PositionLogprobs | None], first_text: str = "") -> dict[str, Any]:
        """positions: None for the first token of a prompt, which nothing predicts; first_text is that token's."""
        out: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for position in positions:
            text = first_text if position is None else position.chosen.text
            out["tokens"].append(text)
            out["token_logprobs"].append(None if position is None else finite(position.chosen.logprob))
            out["top_logprobs"].append(None if position is None else _by_text(position))
            out["text_offset"].append(self._offset)
            self._offset += len(text)
        return out


def _by_text(position: PositionLogprobs) -> dict[str, float]:
    """Likeliest first; the chosen token is always there. Of tokens that read alike, the likeliest keeps the place."""
    table: dict[str, float] = {}
    for token in [*position.top, position.chosen]:
        table.setdefault(token.text, finite(token.logprob))
    table[position.chosen.text] = finite(position.chosen.logprob)
    return table


def prompt_logprobs(positions: list[PositionLogprobs | None]) -> list[dict[str, Any] | None]:
    """vLLM's form: a position each, token id to value; null for the first."""

    def entry(token: TokenLogprob) -> dict[str, Any]:
        return {"logprob": finite(token.logprob), "rank": token.rank, "decoded_token": token.text}

    return [None if p is None else {str(t.token_id): entry(t) for t in [p.chosen, *p.top]} for p in positions]
