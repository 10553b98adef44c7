"""C86 and C87: streamed text equals the decoded whole, and stop strings are found wherever they are cut."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import TOKENIZERS

from moestro.text.stream import MAX_HELD_BYTES, TextStream, _StopMatcher
from moestro.text.tokenizer import Tokenizer


def stream_all(tokenizer: Tokenizer, ids: list[int], **options: object) -> tuple[list[str], str | None]:
    stream = TextStream(tokenizer, **options)
    matched = None
    deltas = []
    for token_id in ids:
        text, matched = stream.push([token_id])
        deltas.append(text)
        if matched is not None:
            break
    return [*deltas, stream.flush()], matched


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    table = {tokenizer.token_bytes(i): i for i in reversed(range(3, tokenizer.vocab_size))}
    return [table[bytes([b])] for b in data]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_deltas_add_up_to_the_decoded_whole(name: str, skip: bool, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=30))
    if name == "byte_fallback" and longest_run(tokenizer, ids, skip) >= MAX_HELD_BYTES:
        return  # the documented exception, tested below
    deltas, _ = stream_all(tokenizer, ids, skip_special_tokens=skip)
    assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=skip)


def longest_run(tokenizer: Tokenizer, ids: list[int], skip: bool) -> int:
    kept = [i for i in ids if not (skip and i in tokenizer.special_ids) and tokenizer.piece(i) is not None]
    return max(
        accumulate((tokenizer.fallback_byte(i) is not None for i in kept), lambda n, b: n + 1 if b else 0), default=0
    )


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40))
def test_valid_text_in_single_bytes(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = byte_ids(tokenizer, b"-" + text.encode())
    assert "".join(stream_all(tokenizer, ids)[0]) == "-" + text


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_emoji_in_four_tokens_then_a_space(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    space = (
        tokenizer.encode(" a", add_special_tokens=False)[-1:] if name == "byte_fallback" else byte_ids(tokenizer, b" a")
    )
    ids = byte_ids(tokenizer, "x😀".encode()) + space
    deltas, _ = stream_all(tokenizer, ids)
    assert not any("�" in delta for delta in deltas)
    assert "".join(deltas) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("data", [b"a\xffb", b"a\xe4\xb8", b"\xf0\x9f\x98", b"\x80\x80\x80\x80\x80", b"\xf0\x9f a"])
def test_lone_invalid_bytes_and_an_end_in_mid_character(name: str, data: bytes) -> None:
    tokenizer = TOKENIZERS[name]
    ids = byte_ids(tokenizer, data)
    assert "".join(stream_all(tokenizer, ids)[0]) == tokenizer.decode(ids)


def test_byte_level_holds_no_more_than_a_character() -> None:
    stream = TextStream(TOKENIZERS["byte_level"])
    sent = 0
    for i, token_id in enumerate(byte_ids(TOKENIZERS["byte_level"], b"\x80" * 50), start=1):
        sent += len(stream.push([token_id])[0])
        assert sent >= i - 3


def test_a_long_byte_run_is_sent_before_it_ends() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    text = "한국어😀" * 20
    deltas, _ = stream_all(tokenizer, byte_ids(tokenizer, text.encode()))
    assert "".join(deltas) == text
    longest_silence = max(len(part) for part in "".join("." if d else " " for d in deltas[:-1]).split("."))
    assert longest_silence < MAX_HELD_BYTES


def test_a_long_run_keeps_what_was_sent_when_it_turns_out_invalid() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    deltas, _ = stream_all(tokenizer, byte_ids(tokenizer, b"a" * MAX_HELD_BYTES + b"\xff"))
    assert "".join(deltas) == "a" * MAX_HELD_BYTES + "�"


@pytest.mark.parametrize("include", [True, False])
def test_stop_string_over_a_token_boundary(include: bool) -> None:
    """The client gets "The quick br" and never a part of "own fox"."""
    tokenizer = TOKENIZERS["byte_level"]
    ids = [i for part in ("The", " quick", " br", "own", " f", "ox", " jumps") for i in tokenizer.encode(part)]
    deltas, matched = stream_all(tokenizer, ids, stop=["own fox"], include_stop=include)
    assert matched == "own fox"
    assert "".join(deltas) == ("The quick brown fox" if include else "The quick br")


def test_held_text_is_released_when_it_cannot_match() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    stream = TextStream(tokenizer, stop=["aab"])
    assert stream.push(tokenizer.encode("aa")) == ("", None)
    assert stream.push(tokenizer.encode("a")) == ("a", None)  # "aa" may still begin the stop string
    assert stream.push(tokenizer.encode("c")) == ("aac", None)
    assert stream.push(tokenizer.encode("xaa")) == ("x", None)
    assert stream.flush() == "aa"


def test_newline_stop_in_a_byte_run_ends_at_once() -> None:
    """Mixtral's newline is the byte token <0x0A>: generation must not need the next token to see it."""
    tokenizer = TOKENIZERS["byte_fallback"]
    stream = TextStream(tokenizer, stop=["\n"])
    assert stream.push(tokenizer.encode("fox")[-1:])[1] is None
    assert stream.push(byte_ids(tokenizer, b"\n"))[1] == "\n"
    assert stream.push(byte_ids(tokenizer, b"z")) == ("", "\n")
    assert stream.flush() == ""


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    data=st.data(),
)
def test_stop_matcher_equals_a_plain_search(text: str, stops: list[str], data: st.DataObject) -> None:
    ends = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
    expected = min(ends)[2] if ends else None
    kept = text[: min(ends)[0] + min(ends)[1]] if ends else text
    matcher = _StopMatcher(stops)
    got, rest = "", text
    while rest and matcher.matched is None:
        cut = data.draw(st.integers(1, len(rest)))
        got += matcher.push(rest[:cut])
        assert kept.startswith(got)
        rest = rest[cut:]
    assert (matcher.matched, got + matcher.held_text) == (expected, kept)
