"""Folders and hub names; the hub itself is not asked."""

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

from moestro.checkpoint import source
from moestro.checkpoint.source import resolve_model
from moestro.errors import CheckpointError


def test_folder(tmp_path: Path) -> None:
    assert resolve_model(tmp_path) == tmp_path
    assert resolve_model(str(tmp_path)) == tmp_path


def test_neither_folder_nor_hub_name(tmp_path: Path) -> None:
    for name in (tmp_path / "nowhere", "./nowhere", "nowhere", "a/b/c", "https://example.com/a"):
        with pytest.raises(CheckpointError, match="is neither a folder"):
            resolve_model(name)
    file = tmp_path / "config.json"
    file.write_text("{}")
    with pytest.raises(CheckpointError, match="is a file; a model is a folder"):
        resolve_model(file)


@pytest.mark.parametrize(
    "error", [LocalEntryNotFoundError("no connection"), OfflineModeIsEnabled("offline"), OSError("disk")]
)
def test_offline_is_one_sentence(error: OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> str:
        raise error

    monkeypatch.setattr(source, "snapshot_download", fail)
    with pytest.raises(
        CheckpointError, match="org/name is not a folder here, and it could not be downloaded: "
    ) as caught:
        resolve_model("org/name")
    assert "\n" not in str(caught.value)


def test_only_model_files_are_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def fetch(name: str, **kwargs: Any) -> str:
        asked.update(kwargs)
        if kwargs["tqdm_class"] is not None:
            with kwargs["tqdm_class"](total=10, unit="B") as bar:
                bar.update(10)
                bar.refresh()
            kwargs["tqdm_class"](range(3), unit="it").refresh()
        return str(tmp_path)

    monkeypatch.setattr(source, "snapshot_download", fetch)
    calls: list[tuple[int, int]] = []
    assert resolve_model("org/name", lambda done, total: calls.append((done, total))) == tmp_path
    assert (10, 10) in calls
    assert all(total == 10 for _, total in calls)
    assert "*.safetensors" in asked["allow_patterns"]
    assert not any(p in asked["allow_patterns"] for p in ("*.bin", "*.py", "*.pt"))
