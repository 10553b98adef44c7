"""Which family an architecture belongs to: the one table from config.json to a ModelSpec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from moestro.errors import ConfigError, UnsupportedModelError
from moestro.spec.families import (
    deepseek_v2,
    deepseek_v3,
    glm4_moe,
    gpt_oss,
    granitemoe,
    mixtral,
    olmoe,
    phimoe,
    qwen2_moe,
    qwen3_moe,
)
from moestro.spec.fields import ModelSpec
from moestro.spec.names import NameMap
from moestro.spec.parts import architecture
from moestro.spec.read import ConfigReader, load_config


@dataclass(frozen=True)
class Family:
    """A family: the names that config.json gives it, how its config is read, and how its checkpoints name tensors."""

    name: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    spec: Callable[[ConfigReader], ModelSpec]
    names: NameMap


def _family(module: ModuleType) -> Family:
    name = module.__name__.rpartition(".")[2]
    return Family(name, module.ARCHITECTURES, module.MODEL_TYPES, module.spec, module.NAMES)


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in map(
        _family,
        (
            mixtral,
            qwen2_moe,
            qwen3_moe,
            olmoe,
            deepseek_v2,
            deepseek_v3,
            gpt_oss,
            glm4_moe,
            granitemoe,
            phimoe,
        ),
    )
}
_BY_NAME = {name: family for family in FAMILIES.values() for name in (*family.architectures, *family.model_types)}


def read_spec(config: str | Path | Mapping[str, Any]) -> ModelSpec:
    """The model that a config describes.

    config: config.json, the folder it lies in, or its parsed object. Raises UnsupportedModelError for an architecture
    that is not in the table, and ConfigError for a value or key that cannot be read; what can be read but not run is in
    the spec's `blockers`.
    """
    if isinstance(config, Mapping):
        reader = ConfigReader(config, "config.json")
    else:
        reader = ConfigReader(load_config(config), str(config))
    name = architecture(reader)
    family = _BY_NAME.get(name)
    if family is None:
        supported = ", ".join(a for f in FAMILIES.values() for a in f.architectures)
        raise UnsupportedModelError(f"{reader.where}: architecture {name!r} is not supported; supported: {supported}")
    try:
        return family.spec(reader)
    except ValueError as error:  # the specs' own checks of values that only together are wrong
        raise ConfigError(f"{reader.where}: {error}") from None


def names_of(spec: ModelSpec) -> NameMap:
    """How checkpoints of this model name their tensors."""
    return FAMILIES[spec.family].names
