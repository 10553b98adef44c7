"""docs/api.md and docs/openapi.json are what the schema says."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
HOW = "run: .venv/bin/python scripts/api_docs.py"


@pytest.fixture(scope="module")
def api_docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("api_docs", ROOT / "scripts" / "api_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_current(api_docs: ModuleType) -> None:
    assert (ROOT / "docs" / "api.md").read_text() == api_docs.api_page(), HOW


def test_the_openapi_document_is_current_and_complete(api_docs: ModuleType) -> None:
    """Compared without what differs between versions of pydantic and FastAPI: titles and the order of keys."""
    written = json.loads((ROOT / "docs" / "openapi.json").read_text())
    made = api_docs.openapi()
    assert set(written["paths"]) == set(made["paths"]), HOW
    for name in ("ChatBody", "CompletionBody"):
        assert set(written["components"]["schemas"][name]["properties"]) == set(
            made["components"]["schemas"][name]["properties"]
        ), HOW
    chat = made["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert {"200", "4XX", "5XX"} == set(chat)
    assert set(chat["200"]["content"]) == {"application/json", "text/event-stream"}


def test_notes_are_about_fields_that_exist(api_docs: ModuleType) -> None:
    known = {*api_docs.ChatBody.model_fields, *api_docs.CompletionBody.model_fields}
    assert set(api_docs.NOTES) <= known
