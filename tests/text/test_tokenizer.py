"""Loading, encoding and the parts of tokens; C97: end tokens come from three files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_tokenizers import TOKENIZERS

from moestro.errors import CheckpointError, RequestError
from moestro.text.special import stop_ids
from moestro.text.tokenizer import Tokenizer


def save(name: str, folder: Path) -> None:
    TOKENIZERS[name]._backend.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback", "metaspace"])
def test_round_trip_through_a_folder(name: str, tmp_path: Path) -> None:
    save(name, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>", "special": True}}))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode("a fox")).split() == ["a", "fox"] or name == "metaspace"
    assert tokenizer.eos_ids == (1,)
    assert {0, 1, 2} <= tokenizer.special_ids


def test_no_tokenizer_files_is_none(tmp_path: Path) -> None:
    assert Tokenizer.load(tmp_path) is None


@pytest.mark.parametrize("name", ["tokenizer.model", "tiktoken.model", "vocab.json"])
def test_other_formats_say_what_is_needed(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=rf"{name}.*tokenizer\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"\xff\xfe", b"[]"])
def test_damaged_files_are_one_sentence(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a readable tokenizer"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", ["[1]", "{"])
def test_damaged_tokenizer_config(content: str, tmp_path: Path) -> None:
    save("byte_level", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        Tokenizer.load(tmp_path)


def test_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(RequestError, match="surrogate at character 2"):
        TOKENIZERS["byte_level"].encode("ab\ud800")


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_ids_that_no_vocabulary_has(token_id: int) -> None:
    with pytest.raises(RequestError, match=str(token_id)):
        TOKENIZERS["byte_level"].decode([token_id])
    assert TOKENIZERS["byte_level"].token_text(10**6) == ""


def test_token_text_and_bytes() -> None:
    level, fallback = TOKENIZERS["byte_level"], TOKENIZERS["byte_fallback"]
    half = next(i for i in range(level.vocab_size) if level.token_bytes(i) == b"\xf0")
    assert (level.token_text(half), level.token_text(1)) == ("�", "</s>")
    fox = fallback._backend.token_to_id("▁fox")
    newline = fallback._backend.token_to_id("<0x0A>")
    assert (fallback.token_text(fox), fallback.token_bytes(fox)) == (" fox", b" fox")
    assert (fallback.token_text(newline), fallback.token_bytes(newline)) == ("\n", b"\n")


def test_truncation_in_the_file_does_not_cut_prompts(tmp_path: Path) -> None:
    save("byte_level", tmp_path)
    raw = json.loads((tmp_path / "tokenizer.json").read_text())
    raw["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode("lazy quick brown dog")) == "lazy quick brown dog"


@pytest.mark.parametrize(
    ("config", "generation", "named", "expected"),
    [
        ({"eos_token_id": [1, 2]}, {"eos_token_id": 3}, "</s>", (1, 2, 3)),
        ({"eos_token_id": 5}, {}, None, (5,)),
        ({"eos_token_id": None}, {"eos_token_id": [7, 7]}, "</s>", (1, 7)),
        ({"text_config": {"eos_token_id": 4}}, {"eos_token_id": -1}, None, (4,)),
        ({}, {}, "not in the vocabulary", ()),
    ],
)
def test_end_tokens_are_the_union_of_three_files(
    config: dict[str, object],
    generation: dict[str, object],
    named: str | None,
    expected: tuple[int, ...],
    tmp_path: Path,
) -> None:
    """C97."""
    save("byte_level", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": named}))
    assert stop_ids(tmp_path) == expected


@pytest.mark.parametrize("value", ["2", [1, "2"], True, {"a": 1}])
def test_end_tokens_of_the_wrong_type(value: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(CheckpointError, match=r"config\.json: eos_token_id"):
        stop_ids(tmp_path)
