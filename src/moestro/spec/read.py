"""Typed reading of config.json: every value is asked for by name and kind, and a key that nobody asked for is an error.

An option that is not known here may change the model, and a model that is computed wrongly still talks fluently. Keys
that cannot change the result of inference are in one table.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from moestro.errors import ConfigError

T = TypeVar("T", int, float, bool, str, "list[Any]", "dict[str, Any]")

# Beyond any size and constant of a model; a larger number is a slip or an attack.
LARGEST_INT = 2**31 - 1
LARGEST_FLOAT = 1e15

HARMLESS = frozenset(
    {
        # training: dropout, initialisation, auxiliary losses, noise
        *("attention_dropout", "attn_pdrop", "dropout", "embd_pdrop", "hidden_dropout", "resid_pdrop"),
        *("initializer_range", "gradient_checkpointing", "pretraining_tp", "ep_size", "input_jitter_noise"),
        *("aux_loss_alpha", "seq_aux", "router_aux_loss_coef", "router_z_loss_coef", "output_router_logits"),
        # the library that wrote the file, and how it runs
        *("transformers_version", "_name_or_path", "name_or_path", "auto_map", "use_cache", "use_bfloat16"),
        *("_attn_implementation", "attn_implementation", "_experts_implementation", "experts_implementation"),
        # what a call returns, how it is sliced, labels of other heads
        *("torchscript", "return_dict", "output_attentions", "output_hidden_states", "chunk_size_feed_forward"),
        *("id2label", "label2id", "problem_type", "num_labels", "finetuning_task", "task_specific_params"),
        # tokens that the engine does not feed by itself
        *("pad_token_id", "sep_token_id", "unk_token_id", "decoder_start_token_id"),
    }
)


def load_config(path: str | Path) -> dict[str, Any]:
    """Read config.json.

    path: the file, or the folder it lies in. Raises ConfigError when it is missing, is not JSON, or is not an object.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; a model folder holds config.json and safetensors files") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds {_kind_name(config)} where an object is expected")
    return config


class ConfigReader:
    """The values of one JSON object, each read once by the family that knows what it means.

    raw: the object. where: how error messages call it, a path as a rule. blockers: sentences for values that can be
    described but not run; the reader collects them.
    """

    def __init__(self, raw: Mapping[str, Any], where: str, blockers: list[str] | None = None) -> None:
        self.where = where
        self.blockers = [] if blockers is None else blockers
        self._raw = dict(raw)
        self._read: set[str] = set()
        self._ignored: set[str] = set()

    def require(
        self,
        keys: str | tuple[str, ...],
        kind: type[T],
        *,
        at_least: float | None = None,
        at_most: float | None = None,
    ) -> T:
        """The value of a key that must be there; `keys` may name the same thing in several spellings."""
        key, value = self._find(keys)
        if value is None:
            raise ConfigError(f"{self.where}: {key} is missing")
        return self._typed(key, value, kind, at_least, at_most)

    def default(
        self,
        keys: str | tuple[str, ...],
        kind: type[T],
        value: T,
        *,
        at_least: float | None = None,
        at_most: float | None = None,
    ) -> T:
        """The value of a key whose absence means `value` in the published format."""
        key, found = self._find(keys)
        return value if found is None else self._typed(key, found, kind, at_least, at_most)

    def optional(self, keys: str | tuple[str, ...], kind: type[T], *, at_least: float | None = None) -> T | None:
        """The value of a key that may be absent or null, which then means None."""
        key, value = self._find(keys)
        return None if value is None else self._typed(key, value, kind, at_least, None)

    def count(self, keys: str | tuple[str, ...]) -> int:
        """A size or number of things that must be there and be at least one."""
        return self.require(keys, int, at_least=1)

    def require_to_run(self, keys: str | tuple[str, ...], kind: type[T], stand_in: T, *, at_least: float) -> T:
        """The value of a key without which the model can still be described; when it is missing, a blocker says so."""
        key, value = self._find(keys)
        if value is None:
            self.blockers.append(f"{key} is missing from config.json, and no default is right for released models.")
            return stand_in
        return self._typed(key, value, kind, at_least, None)

    def expect(self, keys: str | tuple[str, ...], *allowed: object) -> None:
        """Refuse a value that is not implemented; an absent or null key is accepted."""
        key, value = self._find(keys)
        if value is not None and not any(
            value == a and isinstance(value, bool) == isinstance(a, bool) for a in allowed
        ):
            accepted = " or ".join(json.dumps(a) for a in allowed)
            raise ConfigError(f"{self.where}: {key}={_show(value)} is not supported; supported: {accepted}")

    def ignore(self, *keys: str) -> None:
        """Name keys that have no effect on inference for this family."""
        self._ignored.update(key for key in keys if self._raw.get(key) is not None)
        self._read.update(keys)

    def child(self, key: str) -> ConfigReader | None:
        """A reader of a nested object; None when the key is absent, null or empty. Blockers go to the same list."""
        raw = self.optional(key, dict)
        return ConfigReader(raw, f"{self.where}: {key}", self.blockers) if raw else None

    def raw(self, key: str) -> Any:
        """The value as it stands, for the few whose kind is not fixed."""
        self._read.add(key)
        return self._raw.get(key)

    def fail(self, key: str, accepted: str) -> ConfigError:
        """The error for a value that was read and turned out impossible."""
        return ConfigError(f"{self.where}: {key}={_show(self._raw.get(key))} cannot be; {accepted}")

    def finish(self, harmless: frozenset[str] = HARMLESS) -> tuple[str, ...]:
        """The keys without effect that were present; raises ConfigError when a key was left that nobody read."""
        left = [key for key, value in self._raw.items() if key not in self._read and value is not None]
        unknown = sorted(key for key in left if key not in harmless)
        if unknown:
            shown = ", ".join(f"{key}={_show(self._raw[key])}" for key in unknown)
            raise ConfigError(f"{self.where}: not understood: {shown}; an unknown option may change the model")
        return tuple(sorted(self._ignored | set(left)))

    def _find(self, keys: str | tuple[str, ...]) -> tuple[str, Any]:
        names = (keys,) if isinstance(keys, str) else keys
        self._read.update(names)
        found = [(name, self._raw[name]) for name in names if self._raw.get(name) is not None]
        for name, value in found[1:]:
            if value != found[0][1]:
                first = f"{found[0][0]}={_show(found[0][1])}"
                raise ConfigError(f"{self.where}: {first} and {name}={_show(value)} mean the same and differ")
        return found[0] if found else (names[0], None)

    def _typed(self, key: str, value: Any, kind: type[T], at_least: float | None, at_most: float | None) -> T:
        wanted = {
            int: "an integer",
            float: "a number",
            bool: "true or false",
            str: "a string",
            list: "a list",
            dict: "an object",
        }
        result: Any = _convert(value, kind)
        if result is None:
            raise ConfigError(f"{self.where}: {key}={_show(value)} must be {wanted[kind]}")
        if at_least is not None and result < at_least:
            raise ConfigError(f"{self.where}: {key}={_show(value)} must be at least {at_least:g}")
        if at_most is not None and result > at_most:
            raise ConfigError(f"{self.where}: {key}={_show(value)} must be at most {at_most:g}")
        typed: T = result
        return typed


def _convert(value: Any, kind: type[Any]) -> Any:
    """The value as `kind`, or None when it is not one. Integer-valued floats pass as integers, integers as floats."""
    if kind in (int, float):
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        if not -LARGEST_FLOAT <= value <= LARGEST_FLOAT:  # also false for NaN
            return None
        if kind is float:
            return float(value)
        return int(value) if abs(value) <= LARGEST_INT and math.floor(value) == value else None
    return value if isinstance(value, kind) else None


def _kind_name(value: Any) -> str:
    return {list: "a list", str: "a string", bool: "a boolean", type(None): "null"}.get(type(value), "a number")


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
