"""Where logical experts live: for each MoE layer, which expert each physical slot holds. Pure Python.

A checkpoint's experts are logical. Weights, dispatch and kernels work on physical slots; this is the one function
between the two.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from moestro.errors import SettingError


@dataclass(frozen=True)
class Placement:
    """physical_to_logical: for each MoE layer the logical expert of each physical slot; every expert has at least one
    slot.
    """

    num_experts: int
    physical_to_logical: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        for layer, slots in enumerate(self.physical_to_logical):
            if set(slots) != set(range(self.num_experts)):
                missing = sorted(set(range(self.num_experts)) - set(slots))
                wrong = sorted(set(slots) - set(range(self.num_experts)))
                raise SettingError(
                    f"placement of MoE layer {layer}: experts without a slot {missing}, "
                    f"ids beyond the {self.num_experts} experts {wrong}"
                )

    @classmethod
    def identity(cls, num_layers: int, num_experts: int) -> Placement:
        """Every expert in the slot of its own number."""
        return cls(num_experts, (tuple(range(num_experts)),) * num_layers)

    @property
    def is_identity(self) -> bool:
        return all(slots == tuple(range(self.num_experts)) for slots in self.physical_to_logical)

    def first_slots(self, layer: int) -> list[int]:
        """For each logical expert its first physical slot."""
        slots = self.physical_to_logical[layer]
        return [slots.index(expert) for expert in range(self.num_experts)]

    def save(self, path: Path) -> None:
        """Write as JSON, the key named as in SGLang's --init-expert-location."""
        path.write_text(json.dumps({"physical_to_logical_map": [list(s) for s in self.physical_to_logical]}))

    @classmethod
    def load(cls, path: Path, num_layers: int, num_experts: int) -> Placement:
        """Read a file of `save`; SettingError when it is not one, or not for this model."""
        try:
            rows = json.loads(path.read_text())["physical_to_logical_map"]
            placement = cls(num_experts, tuple(tuple(int(i) for i in row) for row in rows))
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, SettingError):
                raise
            raise SettingError(f"{path} is not a placement file: {error}") from None
        if len(placement.physical_to_logical) != num_layers:
            raise SettingError(f"{path} places {len(rows)} MoE layers; the model has {num_layers}")
        return placement
