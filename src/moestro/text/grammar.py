"""Constrained decoding: which tokens may come next when the text has to follow a JSON schema, a regular expression or a
grammar. The grammar engine is llguidance, an extra (`pip install 'moestro[structured]'`)."""

from __future__ import annotations

import importlib
import importlib.util
import json as jsonlib
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import msgspec

from moestro.errors import RequestError
from moestro.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # requests carry StructuredOutputs, and the scheduler knows requests: it stays free of numpy
    import numpy as np
    from numpy.typing import NDArray

MAX_GRAMMAR_CHARS = 500_000
MAX_CHOICES = 10_000
FIELD = "structured_outputs"
# Models like to indent; without a bound, some never stop doing so.
_WHITESPACE = {"whitespace_pattern": r"\n?[ \t]{0,40}"}
_CACHED = 64
_KINDS = ("json", "regex", "choice", "grammar", "json_object")


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """What the text has to look like; exactly one field is given. Names are vLLM's.

    json: a JSON schema, as an object or as text. regex: Rust's syntax, of the whole text. choice: one of these strings.
    grammar: llguidance's Lark dialect. json_object: any JSON object. Raises RequestError("structured_outputs").
    """

    json: dict[str, Any] | str | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        given = [
            kind for kind in _KINDS if getattr(self, kind) not in (None, False) or (kind == "json" and self._false)
        ]
        if len(given) != 1:
            raise RequestError(f"structured_outputs takes exactly one of {', '.join(_KINDS)}", FIELD)
        if self.choice is not None and (
            not 0 < len(self.choice) <= MAX_CHOICES or not all(isinstance(c, str) and c for c in self.choice)
        ):
            raise RequestError(f"choice takes 1 to {MAX_CHOICES} non-empty strings", FIELD)

    @property
    def _false(self) -> bool:
        return self.json is False  # a schema that nothing fits


class GrammarCompiler:
    """Makes the grammars of one model's requests; the tokenizer's tables are built at the first."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, end_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = sorted(end_ids)
        self._tables: Any = None
        self._compiled: OrderedDict[str, Any] = OrderedDict()

    def start(self, wanted: StructuredOutputs) -> Grammar:
        """A grammar at the beginning of a text.

        Raises RequestError("structured_outputs") when it is wrong or too complex, when llguidance is not installed, and
        for a model without tokenizer or end token.
        """
        library = _library()
        if self._tables is None:
            self._tables = self._build_tables(library)
        source = _source(library, wanted)
        if len(source) > MAX_GRAMMAR_CHARS:
            raise RequestError(f"the grammar has {len(source)} characters; {MAX_GRAMMAR_CHARS} are the limit", FIELD)
        matcher = self._compiled.get(source)
        if matcher is None:
            matcher = library.LLMatcher(self._tables, source, log_level=0, limits=_limits(library))
            if matcher.is_error():
                raise RequestError(f"the schema or grammar cannot be used: {_first_line(matcher.get_error())}", FIELD)
            self._compiled[source] = matcher
            if len(self._compiled) > _CACHED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(source)
        return Grammar(matcher.deep_copy())

    def _build_tables(self, library: Any) -> Any:
        if self._tokenizer is None:
            raise RequestError("structured outputs need a tokenizer, which this model has not", FIELD)
        size = max(self._vocab_size, self._tokenizer.vocab_size)
        end_ids = [i for i in self._end_ids if i < size]
        if not end_ids:
            raise RequestError("structured outputs need an end token, and this model names none", FIELD)
        try:
            return library.LLTokenizer(self._tokenizer.to_json(), n_vocab=size, eos_token=end_ids)
        except ValueError as error:
            raise RequestError(
                f"llguidance cannot use this model's tokenizer: {_first_line(str(error))}", FIELD
            ) from None


class Grammar:
    """The state of one text that follows a grammar."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    @property
    def done(self) -> bool:
        """Whether the text is complete and nothing can be added to it."""
        return bool(self._matcher.is_stopped())

    @property
    def error(self) -> str | None:
        """Why the grammar cannot go on, such as its own complexity limits; None while it can."""
        return _first_line(self._matcher.get_error()) if self._matcher.is_error() else None

    def allowed(self, vocab_size: int) -> NDArray[np.bool_]:
        """bool [vocab_size]: the tokens that may come next, end tokens where the text is complete."""
        import numpy as np

        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        allowed = np.zeros(vocab_size, dtype=np.bool_)
        allowed[: bits.size] = bits[:vocab_size]
        return allowed

    def advance(self, token_id: int) -> None:
        """Take in a token; afterwards `error` tells if it did not fit."""
        self._matcher.consume_token(token_id)


def is_available() -> bool:
    """Whether llguidance is installed."""
    return importlib.util.find_spec("llguidance") is not None


def _library() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ModuleNotFoundError:
        raise RequestError(
            "structured outputs need llguidance, which is not installed here: pip install 'moestro[structured]'", FIELD
        ) from None


def _limits(library: Any) -> Any:
    # Error texts go to clients: they should name what is wrong and not the parser's inside.
    return library.LLParserLimits(verbose_errors=False)


def _source(library: Any, wanted: StructuredOutputs) -> str:
    make = library.LLMatcher
    try:
        if wanted.json_object:
            return str(make.grammar_from_json_schema({"type": "object"}, defaults=_WHITESPACE))
        if wanted.json is not None:
            schema = wanted.json if isinstance(wanted.json, str) else jsonlib.dumps(wanted.json)
            return str(make.grammar_from_json_schema(schema, defaults=_WHITESPACE))
        if wanted.regex is not None:
            return str(make.grammar_from_regex(wanted.regex))
        if wanted.choice is not None:
            return str(make.grammar_from_lark("start: " + " | ".join(jsonlib.dumps(c) for c in wanted.choice)))
        return str(make.grammar_from_lark(wanted.grammar))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the schema or grammar cannot be used: {_first_line(str(error))}", FIELD) from None


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines)[:300] if lines else "no reason is given"
