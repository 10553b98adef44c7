"""Text of a growing list of tokens, piece by piece: characters are never cut and stop strings never leak."""

from __future__ import annotations

import codecs
from typing import Protocol

from moestro.text.tokenizer import Tokenizer, byte_level_bytes

# A run of <0x..> tokens is read as UTF-8 as a whole or not at all, so it is held until it ends, but no longer than
# this: four characters of four bytes. A longer run that later turns out to be invalid keeps what was already sent.
MAX_HELD_BYTES = 16
# Tokens without any text at the start of a text (a lone space that the decoder strips) are held no longer than this.
_MAX_EMPTY_START = 16


class TextStream:
    """Turns tokens into text increments whose concatenation is the decoded whole, and ends it at a stop string.

    stop: strings that end the text; the one that is complete first counts, the longest if several end together.
    include_stop: keep the stop string in the text. skip_special_tokens: special tokens have no text.
    Work per token does not depend on how many came before.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: list[str] | None = None,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder: _Decoder = _ByteLevelDecoder(tokenizer) if tokenizer.byte_level else _ChunkDecoder(tokenizer)
        self._stop = _StopMatcher(stop or [])
        self._include_stop = include_stop
        self._stopped = False

    def push(self, token_ids: list[int]) -> tuple[str, str | None]:
        """Add tokens. Returns the text now certain, and the stop string if one was met; no text follows that."""
        pieces = []
        for token_id in token_ids:
            if self._stopped:
                break
            if token_id in self._skip:
                continue
            pieces.append(self._advance(self._decoder.push(token_id)))
        return "".join(pieces), self._stop.matched

    def flush(self) -> str:
        """Text still held back when no more tokens will come; an unfinished character becomes U+FFFD."""
        if self._stopped:
            return ""
        self._stopped = True
        return self._stop.held_text + self._decoder.flush()

    def _advance(self, text: str) -> str:
        out = self._stop.push(text)
        if self._stop.matched is None and (pending := self._decoder.readable()):
            # A stop string inside a held byte run ends the text now: generation must not run on until the run does.
            trial = self._stop.copy()
            ahead = trial.push(pending)
            if trial.matched is not None:
                out, self._stop = out + ahead, trial
        if self._stop.matched is not None:
            self._stopped = True
            if self._include_stop:
                out += self._stop.matched
        return out


class _Decoder(Protocol):
    def push(self, token_id: int) -> str: ...

    def readable(self) -> str:
        """Text that is held back although it is complete, as it would read if nothing followed."""
        ...

    def flush(self) -> str: ...


class _ByteLevelDecoder:
    """Tokens are bytes; at most three of them, an incomplete character, are held."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        piece = self._tokenizer.piece(token_id)
        return "" if piece is None else self._utf8.decode(byte_level_bytes(piece))

    def readable(self) -> str:
        return ""

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _ChunkDecoder:
    """Any other decoder: a token's text depends on whether it is the first, and on the byte run that it is part of."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._at_start = True
        self._held: list[int] = []
        self._run: list[int] = []  # the bytes of _held, when it is a byte run

    def push(self, token_id: int) -> str:
        if self._tokenizer.piece(token_id) is None:
            return ""
        byte = self._tokenizer.fallback_byte(token_id)
        if byte is None:
            closed = self._take(len(self._held)) if self._run else ""
            self._held.append(token_id)
            return closed + self._take(len(self._held))
        self._held.append(token_id)
        self._run.append(byte)
        if len(self._run) < MAX_HELD_BYTES:
            return ""
        return self._take(len(self._held) - _incomplete_tail(bytes(self._run)))

    def readable(self) -> str:
        try:
            bytes(self._run).decode()
        except UnicodeDecodeError:
            return ""
        return self._text(self._held) if self._run else ""

    def flush(self) -> str:
        self._at_start, text = False, self._text(self._held)
        self._held, self._run = [], []
        return text

    def _text(self, ids: list[int]) -> str:
        if self._at_start:
            return self._tokenizer.decode(ids, skip_special_tokens=False)
        return self._tokenizer.decode_inside(ids)

    def _take(self, count: int) -> str:
        """Release the text of the first `count` held tokens."""
        text = self._text(self._held[:count])
        if self._at_start and not text and count < _MAX_EMPTY_START:
            self._run = []
            return ""
        self._at_start = False
        kept = len(self._held) - count
        self._held = self._held[count:]
        self._run = self._run[len(self._run) - kept :] if kept else []
        return text


def _incomplete_tail(data: bytes) -> int:
    """Number of bytes at the end (0..3) that begin a character still unfinished."""
    for length in range(1, min(3, len(data)) + 1):
        lead = data[-length]
        if lead & 0xC0 != 0x80:
            needed = 4 if lead >= 0xF0 else 3 if lead >= 0xE0 else 2 if lead >= 0xC0 else 1
            return length if needed > length else 0
    return 0


class _StopMatcher:
    """Finds the stop strings in text that arrives in pieces, one Knuth-Morris-Pratt automaton a string.

    The state of an automaton is the length of its string's longest beginning that the text ends with; the longest state
    of all is what has to be held back.
    """

    def __init__(self, stops: list[str]) -> None:
        self._stops = stops
        self._failures = [_failure_table(stop) for stop in stops]
        self._states = [0] * len(stops)
        self.held_text = ""
        self.matched: str | None = None

    def copy(self) -> _StopMatcher:
        other = _StopMatcher.__new__(_StopMatcher)
        other._stops, other._failures, other._states = self._stops, self._failures, list(self._states)
        other.held_text, other.matched = self.held_text, self.matched
        return other

    def push(self, text: str) -> str:
        """Text that cannot be part of a stop string any more; on a match, what precedes the stop string."""
        if not self._stops:
            return text
        text_start = len(self.held_text)
        whole = self.held_text + text
        for position in range(text_start, len(whole)):
            self._step(whole[position])
            hits = [stop for stop, state in zip(self._stops, self._states, strict=True) if state == len(stop)]
            if hits:
                self.matched = max(hits, key=len)
                self.held_text = ""
                return whole[: position + 1 - len(self.matched)]
        keep = max(self._states)
        cut = len(whole) - keep
        self.held_text = whole[cut:]
        return whole[:cut]

    def _step(self, char: str) -> None:
        for i, stop in enumerate(self._stops):
            state = self._states[i]
            while state and stop[state] != char:
                state = self._failures[i][state - 1]
            self._states[i] = state + 1 if stop[state] == char else 0


def _failure_table(stop: str) -> list[int]:
    """Entry i: length of the longest proper beginning of stop[:i+1] that is also its end."""
    table = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = table[length - 1]
        length += stop[i] == stop[length]
        table[i] = length
    return table
