from __future__ import annotations

from pathlib import Path

import pytest

from moestro.checkpoint.synth import TINY, write_checkpoint


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3-MoE without tokenizer."""
    return write_checkpoint(TINY["qwen3_moe"], tmp_path_factory.mktemp("tiny"), seed=5)


@pytest.fixture(scope="session")
def tiny_latent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random DeepSeek-V3 (latent attention, groups, a dense first layer)."""
    return write_checkpoint(TINY["deepseek_v3"], tmp_path_factory.mktemp("tiny-latent"), seed=6)
