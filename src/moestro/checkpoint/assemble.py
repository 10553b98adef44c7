"""From a checkpoint's tensors to the model's: first a plan, checked to the last name on headers alone, then reading.

Every tensor of the model is filled exactly once; every tensor of the checkpoint is used, skipped by rule, or an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from logging import WARNING

import torch

from moestro.checkpoint.index import CheckpointIndex, TensorEntry
from moestro.checkpoint.reader import TORCH_DTYPES, CheckpointReader
from moestro.errors import CheckpointError
from moestro.logs import log_once
from moestro.spec.fields import ModelSpec
from moestro.spec.names import NameMap, Skip, Source, row_axis, source_shape
from moestro.spec.tensors import TensorSpec, model_tensors

_MOST_SENTENCES = 20
_HEAD = "head.weight"


@dataclass(frozen=True)
class Part:
    """One tensor of the checkpoint and its place in the model."""

    name: str
    entry: TensorEntry
    source: Source


@dataclass(frozen=True)
class AssemblyPlan:
    """A checkpoint that fits its model, tensor by tensor.

    parts: for each of the model's tensors, the checkpoint tensors that fill it. skipped: how many checkpoint tensors
    are left out, by reason. spare_head: a head that the checkpoint holds although the model ties it to the embedding.
    """

    spec: ModelSpec
    tensors: Mapping[str, TensorSpec]
    parts: Mapping[str, tuple[Part, ...]]
    skipped: Mapping[str, int]
    spare_head: Part | None = None

    @property
    def read_bytes(self) -> int:
        """Bytes that loading reads."""
        parts = [part for parts in self.parts.values() for part in parts]
        return sum(part.entry.nbytes for part in parts + ([self.spare_head] if self.spare_head else []))


def plan_assembly(spec: ModelSpec, names: NameMap, index: CheckpointIndex) -> AssemblyPlan:
    """Match a checkpoint with its model, from headers alone.

    Raises CheckpointError with a sentence for each tensor that is missing, unknown, there twice, incomplete, or of the
    wrong shape or dtype, and for a model that can be described but not run.
    """
    if spec.blockers:
        raise CheckpointError(f"{index.folder} cannot be run: " + " ".join(spec.blockers))
    tensors = model_tensors(spec)
    problems: list[str] = []
    parts: dict[str, list[Part]] = {name: [] for name in tensors}
    skipped: dict[str, int] = {}
    unknown: list[str] = []
    spare_head = None
    for name, entry in index.tensors.items():
        match = names.match(name, spec)
        if isinstance(match, Skip):
            skipped[match.reason] = skipped.get(match.reason, 0) + 1
        elif match is not None and match.target == _HEAD and spec.tied_head:
            if spare_head is not None:
                problems.append(f"{name} and {spare_head.name} are the same tensor.")
            spare_head = Part(name, entry, match)
        elif match is None or not _fits(match, tensors):
            unknown.append(name)
        else:
            parts[match.target].append(Part(name, entry, match))
    started = {(_block(p.source), p.source.expert) for found in parts.values() for p in found}
    for target, found in parts.items():
        parts[target] = [_oriented(part, tensors, parts) for part in found]
        problems += _coverage(target, tensors[target], parts[target], names, started)
        problems += (p for part in parts[target] for p in _check(part, tensors[target]))
    if spare_head is not None:
        problems += _check(spare_head, tensors["embed.weight"])
    problems += (f"{name} is not a tensor of this {spec.family} model." for name in unknown)
    if problems:
        raise CheckpointError(_report(index, problems))
    return AssemblyPlan(spec, tensors, {t: tuple(p) for t, p in parts.items()}, skipped, spare_head)


def load_tensors(
    plan: AssemblyPlan,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, torch.Tensor]:
    """Read a planned checkpoint: the model's tensors by name, [out, in] and contiguous.

    dtype: of all tensors but those of precision "float32", which keep what the file holds in float32. progress: called
    with bytes done and bytes in all. Peak memory is the model and one checkpoint tensor.
    """
    loaded: dict[str, torch.Tensor] = {}
    done, total = 0, plan.read_bytes
    with CheckpointReader() as reader:
        for name, tensor in plan.tensors.items():
            target_dtype = torch.float32 if tensor.precision == "float32" else dtype
            target = torch.empty(tensor.shape, dtype=target_dtype, device=device)
            for part in plan.parts[name]:
                _read_part_(reader, part, tensor, target)
                done += part.entry.nbytes
                if progress is not None:
                    progress(done, total)
            loaded[name] = target
        if plan.spare_head is not None:
            head = reader.read(plan.spare_head.entry).to(device=device, dtype=dtype)
            name = f"{plan.spare_head.name} in {plan.spare_head.entry.file}"
            if torch.equal(head, loaded["embed.weight"]):
                log_once(f"{name} is not used: it equals the embedding, and the config ties the two")
            else:
                log_once(f"{name} is not used though it differs: the config ties the head to the embedding", WARNING)
            if progress is not None:
                progress(total, total)
    return loaded


def _read_part_(reader: CheckpointReader, part: Part, tensor: TensorSpec, target: torch.Tensor) -> None:
    """Fill one part's block of the target, without a copy in between when the bytes are the same."""
    block = target if part.source.expert is None else target[part.source.expert]
    if part.source.rows is not None:
        block = block.narrow(row_axis(tensor) - (part.source.expert is not None), *_rows(tensor, part.source.rows))
    direct = block.is_contiguous() and block.device.type == "cpu" and block.dtype == TORCH_DTYPES[part.entry.dtype]
    if direct and part.source.transform == "same":
        reader.read_into_(part.entry, block)
        return
    found = reader.read_for_now(part.entry)
    if part.source.transform in ("transpose", "interleaved_transpose"):
        found = found.transpose(-1, -2)
    if part.source.transform in ("interleaved", "interleaved_transpose"):
        axis = row_axis(tensor)
        for i, (_, size) in enumerate(tensor.rows):
            alternate = torch.arange(i, found.shape[axis], len(tensor.rows))
            block.narrow(axis, i * size, size).copy_(found.index_select(axis, alternate))
    else:
        block.copy_(found)


def _rows(tensor: TensorSpec, rows: str) -> tuple[int, int]:
    """Start and size of a row block."""
    start = 0
    for name, size in tensor.rows:
        if name == rows:
            return start, size
        start += size
    raise AssertionError(f"no row block {rows!r} in {tensor.rows}")


def _fits(source: Source, tensors: Mapping[str, TensorSpec]) -> bool:
    tensor = tensors.get(source.target)
    return tensor is not None and (source.expert is None or source.expert < tensor.shape[0])


def _oriented(part: Part, tensors: Mapping[str, TensorSpec], parts: Mapping[str, list[Part]]) -> Part:
    """A part whose orientation is known: fused experts lie as [E, out, in] or as [E, in, out].

    A square matrix does not show which; then the other projection of the layer does, since only one of them is square.
    """
    if part.source.transform != "fused":
        return part
    shape = part.entry.shape
    expected = tensors[part.source.target].shape
    transposed = (expected[0], expected[2], expected[1])
    is_transposed = shape == transposed
    if expected == transposed:
        here, there = ("gate_up", "down") if "gate_up" in part.source.target else ("down", "gate_up")
        other = part.source.target.replace(here, there)
        wanted = tensors[other].shape
        is_transposed = any(
            p.source.expert is None and p.entry.shape == (wanted[0], wanted[2], wanted[1]) for p in parts[other]
        )
    return replace(part, source=replace(part.source, transform="transpose" if is_transposed else "same"))


def _coverage(
    target: str,
    tensor: TensorSpec,
    parts: list[Part],
    names: NameMap,
    started: set[tuple[str, int | None]],
) -> Iterator[str]:
    """Sentences on what fills the target twice or not at all."""
    published = list(names.published(target, tensor))
    assert published, f"no rule of the family fills {target}"
    filled: dict[tuple[int | None, str | None], str] = {}
    for part in parts:
        for cell in _cells(part.source, tensor):
            if cell in filled:
                yield f"{part.name} and {filled[cell]} are the same tensor."
                break
            filled[cell] = part.name
    for name, source in published:
        if not all(cell in filled for cell in _cells(source, tensor)):
            incomplete = source.expert is not None and (_block(source), source.expert) in started
            yield f"{name} is missing" + (f"; expert {source.expert} is incomplete." if incomplete else ".")


def _cells(source: Source, tensor: TensorSpec) -> Iterator[tuple[int | None, str | None]]:
    """What a checkpoint tensor fills of its target, as (expert, row block)."""
    all_experts: list[int | None] = [*range(tensor.shape[0])] if tensor.role == "expert" else [None]
    all_rows: list[str | None] = [name for name, _ in tensor.rows] or [None]
    for expert in all_experts if source.expert is None else [source.expert]:
        for rows in all_rows if source.rows is None else [source.rows]:
            yield expert, rows


def _block(source: Source) -> str:
    """The module of a target, so that parts of one expert are seen to belong together."""
    return source.target.partition(".experts.")[0]


def _check(part: Part, tensor: TensorSpec) -> Iterator[str]:
    expected = source_shape(part.source, tensor)
    if part.entry.dtype not in TORCH_DTYPES:
        accepted = ", ".join(TORCH_DTYPES)
        yield f"{part.name} has dtype {part.entry.dtype}; {accepted} can be read, quantised weights cannot yet."
    elif part.entry.shape != expected:
        yield f"{part.name} has shape {list(part.entry.shape)}; the config asks for {list(expected)}."


def _report(index: CheckpointIndex, problems: list[str]) -> str:
    more = len(problems) - _MOST_SENTENCES
    lines = problems[:_MOST_SENTENCES] + ([f"{more} more of the kind."] if more > 0 else [])
    return "\n  ".join([f"{index.folder} does not fit its config.json:", *lines])
