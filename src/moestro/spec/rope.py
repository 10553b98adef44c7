"""Rotary position embeddings: read from both published forms of the config, and turned into frequencies.

The forms are `rope_theta` beside `rope_scaling` (with `type` or `rope_type`), and the `rope_parameters` of transformers
5, which is always filled. Methods: YaRN (arXiv 2309.00071), longrope (arXiv 2402.13753), Llama 3.1's, linear.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from moestro.errors import ConfigError
from moestro.spec.fields import RopeSpec
from moestro.spec.read import ConfigReader

Kind = Literal["default", "linear", "llama3", "yarn", "longrope"]
_NOTHING_HARMLESS: frozenset[str] = frozenset()


@dataclass(frozen=True)
class RopeReading:
    """A rotary embedding, and the factor it puts into the softmax scale of latent attention (mscale_all_dim)."""

    rope: RopeSpec
    softmax_factor: float = 1.0


def read_rope(
    config: ConfigReader,
    head_dim: int,
    max_position: int,
    *,
    interleaved: bool = False,
    partial_default: float | None = None,
    own_mscales: bool = False,
) -> RopeReading:
    """Read the rotary embedding of a config.

    partial_default: the share of a head that is rotated when the config does not say; None when it is always all of it.
    own_mscales: longrope's cos/sin factors are stated as short_mscale and long_mscale (Phi-3.5-MoE).
    Raises ConfigError for an unknown type, for a key that is missing, and for one that the type does not use.
    """
    inner = _inner(config)
    kind = inner.default(("rope_type", "type"), str, "default")
    if kind not in get_args(Kind):
        raise ConfigError(f"{inner.where}: rope_type={kind!r} is not supported; supported: {', '.join(get_args(Kind))}")
    theta = _either(config, inner, "rope_theta")
    if theta is None:
        theta = config.require_to_run("rope_theta", float, 10000.0, at_least=1.0)
    if theta <= 1.0:
        raise ConfigError(f"{inner.where}: rope_theta={theta} must be larger than 1")
    rotary_dim = _rotary_dim(config, inner, head_dim, partial_default)
    base = RopeSpec(theta=theta, rotary_dim=rotary_dim, interleaved=interleaved)
    if kind == "default":
        # Left-over notes of an older scaled config: harmless for the frequencies, but the reader must know them.
        config.ignore("original_max_position_embeddings")
        reading = RopeReading(base)
    elif kind == "linear":
        config.ignore("original_max_position_embeddings")
        reading = RopeReading(_replace(base, kind="linear", factor=_factor(inner)))
    elif kind == "llama3":
        reading = RopeReading(_llama3(config, inner, base, max_position))
    elif kind == "yarn":
        reading = _yarn(config, inner, base, max_position)
    else:
        reading = RopeReading(_longrope(config, inner, base, max_position, own_mscales))
    inner.finish(_NOTHING_HARMLESS)
    return reading


def inverse_frequencies(rope: RopeSpec, context: int | None = None) -> list[float]:
    """The angle a position step turns each pair by: rotary_dim / 2 numbers in radians.

    context: tokens the table is made for; longrope uses its long factors beyond original_max_position.
    """
    half = rope.rotary_dim // 2
    plain = [rope.theta ** (-2.0 * i / rope.rotary_dim) for i in range(half)]
    if rope.kind == "linear":
        return [f / rope.factor for f in plain]
    if rope.kind == "llama3":
        return [_llama3_frequency(f, rope) for f in plain]
    if rope.kind == "yarn":
        low, high = yarn_correction_range(rope)
        ramp = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(half)]
        return [f * (1.0 - r) + f / rope.factor * r for f, r in zip(plain, ramp, strict=True)]
    if rope.kind == "longrope":
        factors = rope.long_factor if _is_long(rope, context) else rope.short_factor
        assert factors is not None, "a model without its longrope factors is blocked and never built"
        return [f / g for f, g in zip(plain, factors, strict=True)]
    return plain


def yarn_correction_range(rope: RopeSpec) -> tuple[float, float]:
    """The dimensions between which YaRN goes over from the original to the interpolated frequencies."""
    assert rope.original_max_position is not None

    def dimension(rotations: float) -> float:
        turns = rope.original_max_position / (rotations * 2 * math.pi)  # type: ignore[operator]
        return rope.rotary_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    return low, high + 0.001 if low == high else high  # the published guard against a ramp of width zero


def _is_long(rope: RopeSpec, context: int | None) -> bool:
    return context is not None and rope.original_max_position is not None and context > rope.original_max_position


def _llama3_frequency(frequency: float, rope: RopeSpec) -> float:
    assert rope.original_max_position is not None
    turns = rope.original_max_position * frequency / (2 * math.pi)
    if turns > rope.high_freq_factor:
        return frequency
    if turns < rope.low_freq_factor:
        return frequency / rope.factor
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return (1 - smooth) * frequency / rope.factor + smooth * frequency


def _mscale(scale: float, mscale: float = 1.0) -> float:
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


def _inner(config: ConfigReader) -> ConfigReader:
    """The object with the rope keys, under its old or its new name."""
    new, old = config.child("rope_parameters"), config.child("rope_scaling")
    if new and old and config.raw("rope_parameters") != config.raw("rope_scaling"):
        raise ConfigError(f"{config.where}: rope_parameters and rope_scaling are both set and differ; keep one of them")
    return new or old or ConfigReader({}, f"{config.where}: rope_scaling", config.blockers)


def _either(config: ConfigReader, inner: ConfigReader, key: str) -> float | None:
    """A number that may stand beside the rope object or in it."""
    outside, inside = config.optional(key, float), inner.optional(key, float)
    if outside is not None and inside is not None and outside != inside:
        raise ConfigError(f"{config.where}: {key}={outside:g} and {inner.where}: {key}={inside:g} differ")
    return outside if inside is None else inside


def _rotary_dim(config: ConfigReader, inner: ConfigReader, head_dim: int, partial_default: float | None) -> int:
    share = _either(config, inner, "partial_rotary_factor")
    if partial_default is None and share not in (None, 1.0):
        raise ConfigError(
            f"{inner.where}: partial_rotary_factor={share:g} is not supported for this family; supported: 1.0"
        )
    share = share if share is not None else partial_default if partial_default is not None else 1.0
    rotary_dim = int(head_dim * share)
    if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
        raise ConfigError(
            f"{inner.where}: {rotary_dim} rotated dimensions ({share:g} of head_dim={head_dim}) must be even, 2 or more"
        )
    return rotary_dim


def _replace(base: RopeSpec, **changes: Any) -> RopeSpec:
    return RopeSpec(**{"theta": base.theta, "rotary_dim": base.rotary_dim, "interleaved": base.interleaved, **changes})


def _factor(inner: ConfigReader) -> float:
    return inner.require("factor", float, at_least=1.0)


def _original(config: ConfigReader, inner: ConfigReader, max_position: int) -> int:
    """The context of the first training; transformers takes max_position_embeddings when it is not stated."""
    value = _either(config, inner, "original_max_position_embeddings")
    value = max_position if value is None else value
    if value < 2 or value != int(value):
        raise ConfigError(f"{inner.where}: original_max_position_embeddings={value:g} must be an integer of at least 2")
    return int(value)


def _llama3(config: ConfigReader, inner: ConfigReader, base: RopeSpec, max_position: int) -> RopeSpec:
    low = inner.require("low_freq_factor", float, at_least=0.0)
    high = inner.require("high_freq_factor", float)
    if high <= low:
        raise ConfigError(f"{inner.where}: high_freq_factor={high:g} must be larger than low_freq_factor={low:g}")
    return _replace(
        base,
        kind="llama3",
        factor=_factor(inner),
        original_max_position=_original(config, inner, max_position),
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(config: ConfigReader, inner: ConfigReader, base: RopeSpec, max_position: int) -> RopeReading:
    factor = _factor(inner)
    mscale, all_dim = inner.optional("mscale", float), inner.optional("mscale_all_dim", float)
    attention_factor = inner.optional("attention_factor", float, at_least=0.0)
    if attention_factor is None:
        attention_factor = _mscale(factor, mscale) / _mscale(factor, all_dim) if mscale and all_dim else _mscale(factor)
    beta_fast, beta_slow = (inner.optional(key, float, at_least=0.0) for key in ("beta_fast", "beta_slow"))
    rope = _replace(
        base,
        kind="yarn",
        factor=factor,
        original_max_position=_original(config, inner, max_position),
        cos_sin_factor=attention_factor,
        beta_fast=beta_fast or 32.0,
        beta_slow=beta_slow or 1.0,
        truncate=inner.default("truncate", bool, True),
    )
    low, high = yarn_correction_range(rope)
    if low >= high:
        raise ConfigError(f"{inner.where}: beta_fast={rope.beta_fast:g} and beta_slow={rope.beta_slow:g} leave no ramp")
    return RopeReading(rope, softmax_factor=_mscale(factor, all_dim) ** 2 if all_dim else 1.0)


def _longrope(
    config: ConfigReader, inner: ConfigReader, base: RopeSpec, max_position: int, own_mscales: bool
) -> RopeSpec:
    original = _original(config, inner, max_position)
    factor = inner.optional("factor", float, at_least=0.0)
    factor = max_position / original if factor is None else factor
    attention_factor = inner.optional("attention_factor", float, at_least=0.0)
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    long_cos_sin_factor = attention_factor
    if own_mscales:
        attention_factor = _number_to_run(inner, "short_mscale")
        long_cos_sin_factor = _number_to_run(inner, "long_mscale")
    return _replace(
        base,
        kind="longrope",
        factor=factor,
        original_max_position=original,
        cos_sin_factor=attention_factor,
        long_cos_sin_factor=long_cos_sin_factor,
        short_factor=_factors(inner, "short_factor", base.rotary_dim // 2),
        long_factor=_factors(inner, "long_factor", base.rotary_dim // 2),
    )


def _number_to_run(inner: ConfigReader, key: str) -> float:
    """A number that partial copies of a config replace by a note."""
    if isinstance(inner.raw(key), str):
        inner.blockers.append(
            f"{key} of the rope scaling is a note, not a number; take it from the released config.json."
        )
        return 1.0
    return inner.require_to_run(key, float, 1.0, at_least=0.0)


def _factors(inner: ConfigReader, key: str, length: int) -> tuple[float, ...] | None:
    value = inner.raw(key)
    if value is None or isinstance(value, str):
        inner.blockers.append(
            f"{key} of the rope scaling is not a list of numbers; take it from the released config.json."
        )
        return None
    numbers = (
        [ConfigReader({key: v}, inner.where).require(key, float) for v in value] if isinstance(value, list) else []
    )
    if len(numbers) != length or min(numbers, default=0.0) <= 0:
        raise ConfigError(f"{inner.where}: {key} must be a list of {length} positive numbers")
    return tuple(numbers)
