from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.empty gives NaN, or an absurd integer: what a kernel forgets to write then shows."""
    real, real_like = torch.empty, torch.empty_like

    def poison(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.fill_(float("nan") if tensor.is_floating_point() else -77)

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        return poison(real(*args, **kwargs))

    def empty_like(*args: Any, **kwargs: Any) -> torch.Tensor:
        return poison(real_like(*args, **kwargs))

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch, "empty_like", empty_like)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(42)
