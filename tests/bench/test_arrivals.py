"""Traces in both formats, and what is made of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from moestro.bench.arrivals import Arrival, closed, poisson, read_trace, shaped
from moestro.bench.prompts import PromptMaker, calibrated
from moestro.errors import SettingError


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_azure(tmp_path: Path) -> None:
    ours = write(tmp_path / "a.csv", "arrival_s,prompt_tokens,output_tokens\n2.0,10,3\n5.5,20,4\n")
    assert read_trace(ours) == [Arrival(0.0, 10, 3), Arrival(3.5, 20, 4)]
    rows = ["2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:50.9951690,396,109"]
    original = "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows])
    [first, second] = read_trace(write(tmp_path / "b.csv", original))
    assert (first, second.prompt_tokens) == (Arrival(0.0, 374, 44), 396)
    assert second.at_s == pytest.approx(4.314579, abs=1e-5)


def test_mooncake(tmp_path: Path) -> None:
    rows = [
        '{"timestamp": 3000, "input_length": 1000, "output_length": 5, "hash_ids": [0, 2]}',
        '{"timestamp": 0, "input_length": 600, "output_length": 7, "hash_ids": [0, 1]}',
    ]
    assert read_trace(write(tmp_path / "m.jsonl", "\n".join(rows))) == [
        Arrival(0.0, 600, 7, (0, 1)),
        Arrival(3.0, 1000, 5, (0, 2)),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("a,b\n1,2\n", "columns a, b"),
        ("arrival_s,prompt_tokens,output_tokens\n", "no request"),
        ("arrival_s,prompt_tokens,output_tokens\n1,2,x\n", "line 2"),
        ("arrival_s,prompt_tokens,output_tokens\n1,2\n", "line 2"),
        ('{"timestamp": 0}\n', "line 1"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1}\n{', "line 2"),
    ],
)
def test_broken_traces_name_the_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        read_trace(write(tmp_path / "t", text))
    with pytest.raises(SettingError, match="cannot be read"):
        read_trace(tmp_path / "absent")


def test_shaping() -> None:
    trace = [Arrival(float(i), 100 * (i + 1), 10 * (i + 1)) for i in range(10)]
    shape = shaped(trace, duration_s=5, num_requests=3, time_scale=2, length_scale=0.5, max_prompt_tokens=90)
    assert [(a.at_s, a.prompt_tokens, a.output_tokens) for a in shape] == [(0, 50, 5), (2, 90, 10), (4, 90, 15)]
    assert len(shaped(trace, duration_s=5)) == 5


def test_poisson_has_the_rate_and_is_reproducible() -> None:
    plan = poisson(5.0, 2000, 1, 1, seed=3)
    assert plan == poisson(5.0, 2000, 1, 1, seed=3)
    assert plan[-1].at_s == pytest.approx(400, rel=0.1)
    assert len(closed(7, 1, 1)) == 7


def test_prompts_have_the_length_and_shared_beginnings() -> None:
    """A server that counts 1.5 tokens a word and adds 3."""
    maker = calibrated(PromptMaker(seed=1), (8, 15), (40, 63))
    assert len(maker.prompt(0, Arrival(None, 303, 1)).split()) == 200
    assert maker.prompt(0, Arrival(None, 50, 1)) == maker.prompt(0, Arrival(None, 50, 1))
    assert maker.prompt(0, Arrival(None, 50, 1)) != maker.prompt(1, Arrival(None, 50, 1))
    one, two = (maker.prompt(i, Arrival(None, 1200, 1, (7, 8 + i))).split() for i in range(2))
    shared = round(512 / 1.5)
    assert one[:shared] == two[:shared]
    assert one[shared:] != two[shared:]
    assert len(one) == 2 * shared  # blocks say no more than that
