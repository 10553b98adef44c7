"""Grammars as token masks: what may come next, and when a text is complete."""

from __future__ import annotations

import importlib
import json
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from moestro.errors import RequestError
from moestro.text.grammar import Grammar, GrammarCompiler, StructuredOutputs
from moestro.text.tokenizer import Tokenizer

VOCAB = 300  # padded beyond the tokenizer's
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "big": {"type": "boolean"}},
    "required": ["city", "big"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>"])
    return Tokenizer(backend)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCAB, frozenset({256}))


def follow(grammar: Grammar, tokenizer: Tokenizer, text: str) -> bool:
    """Whether a text is allowed token by token."""
    for token in tokenizer.encode(text):
        if not grammar.allowed(VOCAB)[token]:
            return False
        grammar.advance(token)
    return grammar.error is None


def test_a_schema_allows_what_fits_it(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    for text in (
        '{"city":"Oslo","big":true}',
        '{\n  "city": "Rome",\n  "big": false\n}',
        '{"city": "Rome", "big": true}',
    ):
        grammar = compiler.start(StructuredOutputs(json=SCHEMA))
        assert follow(grammar, tokenizer, text), text
        assert json.loads(text)
        assert np.flatnonzero(grammar.allowed(VOCAB)).tolist() == [256]
    for text in ('{"city":"Bonn"', '{"big"', "[", '{"city":"Oslo","big":true,'):
        assert not follow(compiler.start(StructuredOutputs(json=SCHEMA)), tokenizer, text), text


def test_whitespace_is_bounded(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    assert follow(compiler.start(StructuredOutputs(json_object=True)), tokenizer, "{\n" + " " * 40)
    assert not follow(compiler.start(StructuredOutputs(json_object=True)), tokenizer, "{\n" + " " * 41)
    assert not follow(compiler.start(StructuredOutputs(json_object=True)), tokenizer, "{\n\n")


@pytest.mark.parametrize(
    ("wanted", "good", "bad"),
    [
        ({"regex": "[0-9]{3}"}, "123", "12a"),
        ({"choice": ["yes", 'a "no"']}, 'a "no"', "ye "),
        ({"grammar": 'start: "a" /b+/'}, "abb", "b"),
        ({"json_object": True}, '{"a":[1,{}]}', "[1]"),
    ],
)
def test_other_kinds(
    compiler: GrammarCompiler, tokenizer: Tokenizer, wanted: dict[str, Any], good: str, bad: str
) -> None:
    assert follow(compiler.start(StructuredOutputs(**wanted)), tokenizer, good)
    assert not follow(compiler.start(StructuredOutputs(**wanted)), tokenizer, bad)


def test_texts_of_one_grammar_are_independent(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """The compiled grammar is shared; the state is not."""
    first, second = (compiler.start(StructuredOutputs(choice=["ab", "cd"])) for _ in range(2))
    assert follow(first, tokenizer, "ab")
    assert first.done
    assert not second.done
    assert follow(second, tokenizer, "cd")


@pytest.mark.parametrize(
    "wanted",
    [
        {"json": {"type": "nope"}},
        {"json": {"$ref": "http://example.com/x"}},
        {"json": "{"},
        {"json": {"pattern": "(("}},
        {"regex": "(("},
        {"grammar": "start: nothing"},
        {"regex": "a" * 600_000},
    ],
)
def test_wrong_grammars_are_refused(compiler: GrammarCompiler, wanted: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"cannot be used|characters") as caught:
        compiler.start(StructuredOutputs(**wanted))
    assert caught.value.field == "structured_outputs"
    assert len(str(caught.value)) < 400


def test_deep_schemas_are_refused_not_fatal(compiler: GrammarCompiler) -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(400):
        schema = {"type": "array", "items": schema}
    with pytest.raises(RequestError):
        compiler.start(StructuredOutputs(json=schema))


@pytest.mark.parametrize("wanted", [{}, {"json": {}, "regex": "a"}, {"choice": []}, {"choice": [""]}, {"choice": [1]}])
def test_exactly_one_kind(wanted: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        StructuredOutputs(**wanted)


def test_without_the_library_the_message_says_how_to_get_it(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(RequestError, match=r"pip install 'moestro\[structured\]'"):
        GrammarCompiler(tokenizer, VOCAB, frozenset({256})).start(StructuredOutputs(json_object=True))


def test_models_that_cannot_end_or_have_no_text_are_refused(tokenizer: Tokenizer) -> None:
    for compiler in (GrammarCompiler(tokenizer, VOCAB, frozenset()), GrammarCompiler(None, VOCAB, frozenset({1}))):
        with pytest.raises(RequestError, match=r"end token|tokenizer"):
            compiler.start(StructuredOutputs(json_object=True))
