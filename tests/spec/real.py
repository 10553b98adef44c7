"""The released configs of the ten families, and the sizes that are known of them."""

import json
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "data"
SIZES: dict[str, dict[str, Any]] = json.loads((DATA / "expected_sizes.json").read_text())


def config(name: str) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads((DATA / "configs" / f"{name}.json").read_text())
    return raw
