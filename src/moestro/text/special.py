"""The token ids that end a text, from all places where a checkpoint may name them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moestro.errors import CheckpointError
from moestro.text.tokenizer import Tokenizer, read_json


def stop_ids(folder: str | Path, tokenizer: Tokenizer | None = None) -> tuple[int, ...]:
    """End token ids, ascending: the union of config.json, generation_config.json and tokenizer_config.json.

    tokenizer: that of the folder, where it is loaded already. Raises CheckpointError for an eos_token_id that is
    neither an id nor a list of them.
    """
    folder = Path(folder)
    tokenizer = tokenizer or Tokenizer.load(folder)
    found = set(tokenizer.eos_ids if tokenizer else ())
    for name in ("config.json", "generation_config.json"):
        config = read_json(folder / name)
        found.update(_ids(config.get("eos_token_id"), name))
        text_config = config.get("text_config")
        if isinstance(text_config, dict):
            found.update(_ids(text_config.get("eos_token_id"), f"{name} text_config"))
    return tuple(sorted(found))


def _ids(value: Any, where: str) -> list[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise CheckpointError(f"{where}: eos_token_id={value!r} must be a token id or a list of token ids")
    return [i for i in ids if i >= 0]  # some configs write -1 for "none"
