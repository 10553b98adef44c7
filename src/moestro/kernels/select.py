"""The one place where an implementation of an op is chosen: when the model is built, with a reason, kept in a report.

An implementation is a module `moestro.kernels.ops.<folder>.<name>` with a function of the op's name and, but for
the reference, which runs everywhere, `supports(facts) -> (ok, reason)`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from moestro import settings
from moestro.errors import KernelError
from moestro.kernels.facts import Facts
from moestro.kernels.ops.attend import Attend
from moestro.kernels.ops.attention import PagedAttention
from moestro.kernels.ops.combine import Combine
from moestro.kernels.ops.experts import ExpertsMLP
from moestro.kernels.ops.gated_mlp import GatedMLP
from moestro.kernels.ops.latent_store import LatentStore
from moestro.kernels.ops.linear import Linear, LinearParts
from moestro.kernels.ops.norm import AddRMSNorm, AddRMSNormLogits, RMSNorm
from moestro.kernels.ops.qkv_store import QKVStore
from moestro.kernels.ops.route import Route
from moestro.kernels.ops.routed_mlp import RoutedMLP
from moestro.kernels.ops.sort_by_expert import SortByExpert
from moestro.logs import log_once

_FOLDERS = {
    "linear": "linear",
    "linear_parts": "linear",
    "gated_mlp": "gated_mlp",
    "experts_mlp": "experts",
    "sort_by_expert": "sort_by_expert",
    "combine": "combine",
    "rms_norm": "norm",
    "add_rms_norm_": "norm",
    "add_rms_norm_logits_": "norm",
    "qkv_store": "qkv_store",
    "paged_attention": "attention",
    "attend": "attend",
    "latent_store": "latent_store",
    "routed_mlp": "routed_mlp",
    "route": "route",
}

# Best first. The reference closes each list: it runs everywhere.
_ORDER = {"cpu": ("numba", "reference"), "cuda": ("triton", "reference")}


@dataclass(frozen=True)
class Choice:
    """One line of the report: what was chosen for an op, why, and what was passed over with its reason."""

    op: str
    facts: Facts
    chosen: str
    reason: str
    rejected: tuple[tuple[str, str], ...]
    function: Callable[..., Any]


class KernelSelector:
    """Chooses implementations for one device and remembers the choices.

    device: "cpu" or "cuda". prefer: an implementation to use for every op that has it ("reference", "numba",
    "triton"); None takes the best one that can run. Raises KernelError when the device or the name is not known, and
    from `choose` when the preferred one cannot run.
    """

    def __init__(self, device: str, prefer: str | None = None) -> None:
        if device not in _ORDER:
            raise KernelError(f"no kernels for device {device!r}; known are {', '.join(_ORDER)}")
        self.device = device
        self.prefer = prefer if prefer is not None else settings.preferred_kernels()
        if self.prefer is not None and self.prefer not in _ORDER[device]:
            raise KernelError(f"no kernels named {self.prefer!r} for {device}; known are {', '.join(_ORDER[device])}")
        self._choices: dict[tuple[str, Facts], Choice] = {}

    def choose(self, op: str, facts: Facts) -> Callable[..., Any]:
        """The function to call for `op` under these facts; see the op's package for its signature."""
        key = (op, facts)
        if key not in self._choices:
            self._choices[key] = self._decide(op, facts)
        return self._choices[key].function

    def report(self) -> list[dict[str, Any]]:
        """The choices made so far, in order: op, facts, chosen, reason, rejected."""
        return [
            {
                "op": c.op,
                "facts": {
                    "device": c.facts.device,
                    "format": c.facts.format,
                    "dtype": str(c.facts.dtype).removeprefix("torch."),
                },
                "chosen": c.chosen,
                "reason": c.reason,
                "rejected": [{"name": name, "reason": reason} for name, reason in c.rejected],
            }
            for c in self._choices.values()
        ]

    def _decide(self, op: str, facts: Facts) -> Choice:
        if op not in _FOLDERS:
            raise KernelError(f"no op named {op!r}; known are {', '.join(_FOLDERS)}")
        if facts.device != self.device:
            raise KernelError(f"{op}: asked for device {facts.device!r} from the selector of {self.device!r}")
        rejected: list[tuple[str, str]] = []
        names = _ORDER[self.device] if self.prefer is None else (self.prefer,)
        for name in names:
            module, reason = _load(op, name, facts)
            if module is not None:
                if rejected:
                    passed = "; ".join(f"{other} cannot run: {why}" for other, why in rejected)
                    log_once(f"{op} ({facts.format or 'no weight'}) uses {name}: {passed}")
                return Choice(op, facts, name, reason, tuple(rejected), getattr(module, op))
            rejected.append((name, reason))
        reasons = "; ".join(f"{name}: {reason}" for name, reason in rejected)
        raise KernelError(f"{op} has no implementation that can run for {facts}: {reasons}")

    def linear(self, weight_format: str, dtype: torch.dtype = torch.float32) -> Linear:
        return self.choose("linear", Facts(self.device, weight_format, dtype))

    def linear_parts(self, weight_format: str, dtype: torch.dtype = torch.float32) -> LinearParts:
        return self.choose("linear_parts", Facts(self.device, weight_format, dtype))

    def gated_mlp(self, weight_format: str, dtype: torch.dtype = torch.float32) -> GatedMLP:
        return self.choose("gated_mlp", Facts(self.device, weight_format, dtype))

    def experts_mlp(self, weight_format: str, dtype: torch.dtype = torch.float32) -> ExpertsMLP:
        return self.choose("experts_mlp", Facts(self.device, weight_format, dtype))

    def routed_mlp(self, weight_format: str, dtype: torch.dtype = torch.float32) -> RoutedMLP:
        return self.choose("routed_mlp", Facts(self.device, weight_format, dtype))

    def sort_by_expert(self) -> SortByExpert:
        return self.choose("sort_by_expert", Facts(self.device, "", torch.int32))

    def combine(self, dtype: torch.dtype = torch.float32) -> Combine:
        return self.choose("combine", Facts(self.device, "", dtype))

    def rms_norm(self, dtype: torch.dtype = torch.float32) -> RMSNorm:
        return self.choose("rms_norm", Facts(self.device, "", dtype))

    def add_rms_norm_(self, dtype: torch.dtype = torch.float32) -> AddRMSNorm:
        return self.choose("add_rms_norm_", Facts(self.device, "", dtype))

    def add_rms_norm_logits_(self, dtype: torch.dtype = torch.float32) -> AddRMSNormLogits:
        return self.choose("add_rms_norm_logits_", Facts(self.device, "", dtype))

    def attend(self, kv_format: str, dtype: torch.dtype = torch.float32) -> Attend:
        return self.choose("attend", Facts(self.device, kv_format, dtype))

    def latent_store(self, kv_format: str, dtype: torch.dtype = torch.float32) -> LatentStore:
        return self.choose("latent_store", Facts(self.device, kv_format, dtype))

    def qkv_store(self, kv_format: str, dtype: torch.dtype = torch.float32) -> QKVStore:
        return self.choose("qkv_store", Facts(self.device, kv_format, dtype))

    def paged_attention(self, kv_format: str, dtype: torch.dtype = torch.float32) -> PagedAttention:
        return self.choose("paged_attention", Facts(self.device, kv_format, dtype))

    def route(self) -> Route:
        return self.choose("route", Facts(self.device, "", torch.float32))


def _load(op: str, name: str, facts: Facts) -> tuple[ModuleType | None, str]:
    """The module of an implementation, or None when it cannot run; and why, either way."""
    path = f"moestro.kernels.ops.{_FOLDERS[op]}.{name}"
    try:
        module = importlib.import_module(path)
    except ImportError as error:
        return None, f"import of {path} failed: {error}"
    if name == "reference":
        return module, "plain PyTorch runs everywhere"
    runs, reason = module.supports(facts)
    return (module if runs else None), reason
