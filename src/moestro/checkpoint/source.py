"""Where a model comes from: a folder, or a repository of the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils.tqdm import tqdm

from moestro.checkpoint.demo import DEMO, DEMO_DENSE, Say, demo_folder
from moestro.errors import CheckpointError

DEMOS = (DEMO, DEMO_DENSE)
# What a model is made of here; no pickles, no code.
FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")

Progress = Callable[[int, int], None]


def resolve_model(name_or_path: str | Path, progress: Progress | None = None, say: Say | None = None) -> Path:
    """The folder of a model: one that is here, a hub repository ("org/name") downloaded first, or "demo" or
    "demo-dense" made first.

    say: told what is going on while a demo model is made, in a line each.
    progress: called with bytes done and bytes known so far. Raises CheckpointError when there is neither such a folder
    nor such a repository, or the hub cannot be reached.
    """
    if name_or_path in DEMOS:
        return demo_folder(str(name_or_path), say)
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"{path} is a file; a model is a folder with config.json and safetensors files")
    name = str(name_or_path)
    bar = _bar(progress) if progress else None
    return _from_hub(name, lambda: snapshot_download(name, allow_patterns=FILES, tqdm_class=bar))


def resolve_config(name_or_path: str | Path) -> Path:
    """A model's config.json without its weights: the file itself, the one in a folder, or the hub's.

    Raises CheckpointError as `resolve_model` does.
    """
    path = Path(name_or_path).expanduser()
    if name_or_path in DEMOS:
        return demo_folder(str(name_or_path)) / "config.json"
    if path.exists():
        return path / "config.json" if path.is_dir() else path
    name = str(name_or_path)
    return _from_hub(name, lambda: hf_hub_download(name, "config.json"))


def _from_hub(name: str, download: Callable[[], str]) -> Path:
    if not _HUB_NAME.fullmatch(name):
        raise CheckpointError(
            f"{name} is neither a folder, nor a hub repository like Qwen/Qwen3-30B-A3B, nor {' or '.join(DEMOS)}"
        )
    try:
        return Path(download())
    except GatedRepoError:
        raise CheckpointError(f"{name} asks for an agreement on the hub first; accept it there and log in") from None
    except RepositoryNotFoundError:
        raise CheckpointError(f"{name} is not a folder here, and the hub has no such repository open to you") from None
    except (OSError, HFValidationError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(f"{name} is not a folder here, and it could not be downloaded: {reason}") from None


def _bar(progress: Progress) -> type[Any]:
    """A progress bar for the hub's library that calls back in place of drawing."""

    class CallbackBar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs["disable"] = False
            super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]

        def display(self, *args: Any, **kwargs: Any) -> None:
            # Bars over files are drawn too; only those over bytes are of use to the caller.
            if self.unit == "B":
                progress(int(self.n), int(self.total or 0))

    return CallbackBar
