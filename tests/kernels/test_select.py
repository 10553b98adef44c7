"""The one place where implementations are chosen."""

from __future__ import annotations

import importlib
import logging
import sys
from pathlib import Path

import pytest
import torch

from moestro import logs
from moestro.errors import KernelError
from moestro.kernels import ops, select
from moestro.kernels.facts import Facts
from moestro.kernels.select import KernelSelector

CPU = Facts("cpu", "bfloat16", torch.float32)


@pytest.fixture(autouse=True)
def no_preference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOESTRO_KERNELS", raising=False)
    logs.log_once.cache_clear()


def test_cpu_takes_numba_and_says_why() -> None:
    kernels = KernelSelector("cpu")
    assert kernels.linear("bfloat16").__module__ == "moestro.kernels.ops.linear.numba"
    (line,) = kernels.report()
    assert line["op"] == "linear"
    assert line["chosen"] == "numba"
    assert "compiled for this CPU" in line["reason"]
    assert line["facts"] == {"device": "cpu", "format": "bfloat16", "dtype": "float32"}
    assert line["rejected"] == []


def test_falls_back_with_a_reason_said_once(caplog: pytest.LogCaptureFixture) -> None:
    kernels = KernelSelector("cpu")
    with caplog.at_level(logging.INFO, logger="moestro"):
        function = kernels.linear("bfloat16", torch.bfloat16)
        KernelSelector("cpu").linear("bfloat16", torch.bfloat16)
    assert function.__module__ == "moestro.kernels.ops.linear.reference"
    reason = "takes float32 activations, not bfloat16"
    assert kernels.report()[0]["rejected"] == [{"name": "numba", "reason": reason}]
    assert sum(reason in record.message for record in caplog.records) == 1


def test_without_numba_the_reference_runs(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "moestro.kernels.ops.linear.numba", None)
    kernels = KernelSelector("cpu")
    with caplog.at_level(logging.INFO, logger="moestro"):
        function = kernels.linear("bfloat16")
    assert function.__module__ == "moestro.kernels.ops.linear.reference"
    assert "import of moestro.kernels.ops.linear.numba failed" in caplog.text


def test_preference_by_argument_and_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = "moestro.kernels.ops.linear.reference"
    assert KernelSelector("cpu", "reference").linear("float32").__module__ == reference
    monkeypatch.setenv("MOESTRO_KERNELS", "reference")
    assert KernelSelector("cpu").linear("float32").__module__ == reference
    assert KernelSelector("cpu", "numba").linear("float32").__module__ != reference


def test_asking_for_what_cannot_run_is_an_error() -> None:
    with pytest.raises(KernelError, match=r"linear has no implementation .* numba: takes float32 activations"):
        KernelSelector("cpu", "numba").linear("float32", torch.bfloat16)
    with pytest.raises(KernelError, match="numba: has no code for the format 'nf4'"):
        KernelSelector("cpu", "numba").choose("linear", Facts("cpu", "nf4", torch.float32))
    with pytest.raises(KernelError, match="no kernels named 'cutlass' for cpu; known are numba, reference"):
        KernelSelector("cpu", "cutlass")
    with pytest.raises(KernelError, match="no kernels for device 'tpu'"):
        KernelSelector("tpu")
    with pytest.raises(KernelError, match="no op named 'conv'"):
        KernelSelector("cpu").choose("conv", CPU)
    with pytest.raises(KernelError, match="asked for device 'cuda' from the selector of 'cpu'"):
        KernelSelector("cpu").choose("linear", Facts("cuda", "bfloat16", torch.bfloat16))


def test_every_op_has_a_reference_and_every_folder_is_listed() -> None:
    folders = {p.parent.name for p in Path(ops.__file__).parent.glob("*/__init__.py")}
    assert folders == set(select._FOLDERS.values())
    for op, folder in select._FOLDERS.items():
        assert callable(getattr(importlib.import_module(f"moestro.kernels.ops.{folder}.reference"), op))


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_every_op_of_a_model_on_the_cpu_has_a_compiled_implementation(weights: str) -> None:
    kernels = KernelSelector("cpu", "numba")
    for op in set(select._FOLDERS) - {"routed_mlp"}:  # the CPU sorts rows by expert instead
        takes_weights = op in ("linear", "linear_parts", "gated_mlp", "experts_mlp")
        takes_pages = op in ("qkv_store", "paged_attention", "attend", "latent_store")
        assert callable(
            kernels.choose(op, Facts("cpu", weights if takes_weights or takes_pages else "", torch.float32))
        )
