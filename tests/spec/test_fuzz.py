"""Whatever a config holds, reading it gives a model or a MoestroError; nothing else."""

import contextlib
import copy
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moestro.checkpoint.synth import TINY
from moestro.errors import MoestroError
from moestro.spec.describe import describe
from moestro.spec.registry import read_spec
from moestro.spec.rope import inverse_frequencies
from tests.spec.real import SIZES, config

NASTY = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.sampled_from([0, -1, 2**31, 2**63, 10**30, 10**400, 1e308, 5e-324, float("nan"), float("inf"), -0.0, 0.5, 1e-9]),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.one_of(st.integers(-2, 70), st.text(max_size=3), st.none(), st.floats()), max_size=8),
    st.dictionaries(st.text(max_size=8), st.integers(), max_size=3),
    st.sampled_from(["yarn", "longrope", "llama3", "linear", "silu", "greedy", "sliding_attention", "bfloat16"]),
)
BASES = [*TINY.values(), *(config(name) for name in SIZES)]


def paths(value: Any, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = [prefix] if prefix else []
    if isinstance(value, dict):
        found += [p for key in value for p in paths(value[key], (*prefix, key))]
    return found


@settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_mutated_configs(data: st.DataObject) -> None:
    raw = copy.deepcopy(data.draw(st.sampled_from(BASES)))
    for _ in range(data.draw(st.integers(1, 3))):
        *parents, key = data.draw(st.sampled_from(paths(raw)))
        inner = raw
        for parent in parents:
            inner = inner[parent]
        if data.draw(st.booleans()):
            inner[key] = data.draw(NASTY)
        else:
            inner.pop(key)
        if not raw:
            return
    try:
        spec = read_spec(raw)
    except MoestroError:
        return
    json.dumps(describe(spec))
    for layer in spec.layers:
        rope = layer.attention.rope
        if rope is not None and not spec.blockers and rope.rotary_dim < 1000:
            assert all(f >= 0 for f in inverse_frequencies(rope))


@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize("value", [None, -1, 0, 10**400, "many", [], {}, True, float("nan")])
def test_each_key_in_turn(family: str, value: object) -> None:
    for key in TINY[family]:
        with contextlib.suppress(MoestroError):
            describe(read_spec({**TINY[family], key: value}))
