"""The architecture page names files and functions; they must exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
NAMED = sorted(set(re.findall(r"`((?:\w+/)+\w+\.py)(?::\s+([\w.]+))?(?:\([^`]*\))?`", PAGE)))


def test_the_page_names_many() -> None:
    assert len(NAMED) > 30


@pytest.mark.parametrize(("file", "symbol"), NAMED, ids=lambda value: value or "-")
def test_named_code_exists(file: str, symbol: str) -> None:
    path = ROOT / file if file.startswith("tests/") else ROOT / "src" / "moestro" / file
    assert path.is_file()
    text = path.read_text()
    for part in symbol.split("."):
        if part:
            assert re.search(rf"\b(class|def) {part}\b|^{part}\b\s*[:=]|^\s+{part}: ", text, re.MULTILINE), part
