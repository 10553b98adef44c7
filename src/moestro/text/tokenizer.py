"""A checkpoint's tokenizer: text to token ids and back, read from tokenizer.json."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as _Backend

from moestro.errors import CheckpointError, RequestError

_OTHER_TOKENIZER_FILES = ("tokenizer.model", "tiktoken.model", "tekken.json", "vocab.json", "spiece.model")

# Decoders in which the text of a token depends on its neighbours only through open byte runs and the start of the text,
# which is what TextStream relies on. Others (BPEDecoder, CTC) look at the next token.
_STREAMABLE_DECODERS = ("ByteLevel", "Metaspace", "WordPiece", "Replace", "ByteFallback", "Fuse", "Strip")


class Tokenizer:
    """Token ids of a text and the text of token ids, exactly as the `tokenizers` library gives them.

    special_ids: ids that skip_special_tokens leaves out. byte_level: every token stands for plain bytes (GPT-2's
    alphabet), so that text is their concatenation read as UTF-8.
    """

    def __init__(self, backend: _Backend, config: dict[str, Any] | None = None, name: str = "tokenizer.json") -> None:
        """config: the parsed tokenizer_config.json. name: what messages call the file.

        Raises CheckpointError when the decoder is one that TextStream cannot follow.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.config = config or {}
        decoders = _decoder_types(json.loads(backend.to_str()).get("decoder"))
        unknown = [kind for kind in decoders if kind not in _STREAMABLE_DECODERS]
        if unknown:
            raise CheckpointError(
                f"{name}: decoder {unknown[0]} is not supported; supported are {', '.join(_STREAMABLE_DECODERS)}"
            )
        self.byte_level = decoders == ["ByteLevel"]
        self.byte_fallback = "ByteFallback" in decoders
        self.special_ids = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer | None:
        """The tokenizer of a checkpoint folder, None when it has none.

        Raises CheckpointError when the files are damaged or of a kind that needs converting first.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            other = next((n for n in _OTHER_TOKENIZER_FILES if (folder / n).is_file()), None)
            if other is None:
                return None
            raise CheckpointError(
                f"{folder} has {other} but no tokenizer.json, which is the one format read here; make it with "
                f"transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            )
        try:
            backend = _Backend.from_file(str(path))
        except Exception as error:  # noqa: BLE001 - the library raises bare Exception for every kind of damage
            raise CheckpointError(f"{path} is not a readable tokenizer: {error}") from None
        return cls(backend, read_json(folder / "tokenizer_config.json"), str(path))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; the model's own vocabulary may be padded beyond it."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def to_json(self) -> str:
        """The whole tokenizer as tokenizer.json has it."""
        return self._backend.to_str()

    @cached_property
    def named_special_tokens(self) -> dict[str, str]:
        """bos_token, eos_token and so on of tokenizer_config.json, as plain strings."""
        named = {}
        for key, value in self.config.items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                named[key] = text
        return named

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids of tokenizer_config.json's eos_token; empty when it names none that the vocabulary has."""
        token = self.named_special_tokens.get("eos_token")
        token_id = None if token is None else self._backend.token_to_id(token)
        return () if token_id is None else (token_id,)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. add_special_tokens: let tokenizer.json add what it adds, such as a begin token.

        Raises RequestError for text that is not Unicode (a lone surrogate, which JSON can carry and UTF-8 cannot).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text has a lone surrogate at character {error.start}, which is not Unicode text"
            ) from None
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids outside the vocabulary have none.

        Raises RequestError for an id that is negative or beyond 2^32.
        """
        wrong = next((i for i in ids if not 0 <= i < 2**32), None)
        if wrong is not None:
            raise RequestError(f"token id {wrong} is not in the vocabulary of {self.vocab_size} tokens")
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def piece(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it, None outside of it."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None

    def token_text(self, token_id: int) -> str:
        """Text of one token inside a text, with its leading space; U+FFFD where it is part of a character."""
        return self.decode_inside([token_id])

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes of one token, right also for a token that is only part of a character."""
        piece = self.piece(token_id)
        if piece is None:
            return b""
        if self.byte_level:
            return byte_level_bytes(piece)
        byte = self.fallback_byte(token_id)
        return self.token_text(token_id).encode() if byte is None else bytes([byte])

    def fallback_byte(self, token_id: int) -> int | None:
        """The byte that a <0x0A>-style token stands for, None for other tokens."""
        piece = self.piece(token_id) if self.byte_fallback else None
        if piece is None or len(piece) != 6 or not (piece.startswith("<0x") and piece.endswith(">")):
            return None
        try:
            return int(piece[3:5], 16)
        except ValueError:
            return None

    def decode_inside(self, ids: list[int]) -> str:
        """Text of ids as they read inside a longer text, where rules for the first token do not apply."""
        if self.byte_level or not ids:
            return self.decode(ids, skip_special_tokens=False)
        marker, length = self._marker
        return self.decode([marker, *ids], skip_special_tokens=False)[length:]

    @cached_property
    def _marker(self) -> tuple[int, int]:
        """An ordinary token and the length of its text, put before others to keep them from being first in the text."""
        for piece, token_id in sorted(
            self._backend.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1]
        ):
            text = self.decode([token_id], skip_special_tokens=False)
            if text == piece and not text.startswith((" ", "▁")) and self.fallback_byte(token_id) is None:
                return token_id, len(text)
        raise CheckpointError("the tokenizer has no token with text of its own")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, {} when the file is absent. Raises CheckpointError when it holds anything else."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError both are
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def _decoder_types(decoder: dict[str, Any] | None) -> list[str]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [kind for part in decoder["decoders"] for kind in _decoder_types(part)]
    if decoder["type"] == "Strip" and decoder["stop"]:
        return ["Strip at the end"]
    return [decoder["type"]]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes: printable Latin-1 for itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHAR = _byte_alphabet()


def byte_level_bytes(piece: str) -> bytes:
    """Bytes of a token spelled in GPT-2's byte alphabet; one with other characters (an added one) is its own text."""
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in piece])
    except KeyError:
        return piece.encode()
