"""Triton kernels run on the GPU where there is one, else on the CPU through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

import tests.interpreter  # noqa: F401


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
