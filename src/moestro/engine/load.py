"""From options to a runner: find the model, decide, load, build. The one place where all parts of the engine meet."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moestro.checkpoint.assemble import load_tensors, plan_assembly
from moestro.checkpoint.dummy import dummy_tensors
from moestro.checkpoint.index import read_index
from moestro.checkpoint.source import resolve_model
from moestro.dist.layout import Layout
from moestro.engine.batch import BatchBuilder
from moestro.engine.config import EngineConfig
from moestro.engine.gpu_start import start_on_gpu
from moestro.engine.resolve import Resolved, available_memory, dtype_name, resolve, with_kv_cache
from moestro.engine.runner import Runner
from moestro.engine.stats import ModelInfo
from moestro.errors import ConfigError, SettingError
from moestro.kernels import threads
from moestro.kernels.select import KernelSelector
from moestro.kv.pool import KVPool
from moestro.layers.rope import long_from
from moestro.model.build import Builder
from moestro.moe.events import ExpertCounters
from moestro.moe.placement import Placement
from moestro.spec.fields import ModelSpec, MoESpec
from moestro.spec.registry import names_of, read_spec
from moestro.spec.tensors import model_tensors
from moestro.text.special import stop_ids
from moestro.text.tokenizer import Tokenizer

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Engine:
    """Everything `load_engine` made.

    end_ids: tokens that end a text. long_from: longest sequence that uses longrope's short frequencies; None without
    longrope.
    """

    config: EngineConfig
    spec: ModelSpec
    resolved: Resolved
    runner: Runner
    tokenizer: Tokenizer | None
    end_ids: frozenset[int]
    long_from: int | None
    info: ModelInfo


def load_engine(config: EngineConfig, progress: Progress | None = None) -> Engine:
    """Load a model and get it ready to run.

    progress: called with (what, done, total) in bytes; total is 0 where there is only a line to tell. Raises
    ConfigError, CheckpointError, SettingError, CapacityError or KernelError, each before anything large has been read
    where that is possible.
    """
    folder = resolve_model(config.model, _about(progress, "downloading"), _saying(progress))
    spec = read_spec(folder)
    if spec.blockers:
        raise ConfigError(f"{folder} cannot be run: {'; '.join(spec.blockers)}")
    tokenizer_folder = Path(config.tokenizer) if config.tokenizer else folder
    tokenizer = Tokenizer.load(tokenizer_folder)
    if config.tokenizer and tokenizer is None:
        raise SettingError(f"tokenizer={config.tokenizer!r} is not a folder with a tokenizer.json")
    plan = plan_assembly(spec, names_of(spec), read_index(folder)) if config.load_format == "auto" else None
    num_params = sum(t.size for t in model_tensors(spec).values())
    resolved = resolve(config, spec, num_params=num_params)
    on_gpu = resolved.device.type == "cuda"
    if not on_gpu:
        free = available_memory() - num_params * resolved.dtype.itemsize
        resolved = with_kv_cache(resolved, config, spec, free=free)
    threads.setup(resolved.num_threads)
    kernels = KernelSelector(resolved.device.type, config.kernels)
    placement = _placement(config, spec)
    if plan is None:
        tensors = dummy_tensors(spec, resolved.dtype, resolved.device)
    else:
        tensors = load_tensors(plan, resolved.dtype, resolved.device, _about(progress, "loading"))
    decoder = Builder(
        spec,
        tensors,
        kernels,
        dtype=resolved.activation_dtype,
        kv_format=dtype_name(resolved.dtype),
        placement=placement,
        layout=Layout(),
        max_position=resolved.max_model_len,
    ).build()
    counters = ExpertCounters(placement, resolved.device) if spec.moe_layers else None
    batches = BatchBuilder(config.block_size, resolved.device, max_position=resolved.max_model_len)
    runner: Runner
    if on_gpu:
        runner, resolved = start_on_gpu(config, spec, resolved, decoder, counters, batches, _saying(progress))
    else:
        kv = KVPool(spec, resolved.num_pages, config.block_size, resolved.dtype, resolved.device)
        runner = Runner(decoder, kv, counters, batches)
        runner.warm_up(resolved.max_num_batched_tokens)
    info = _info(config, folder, spec, resolved, kernels)
    limits = {long_from(layer.attention.rope) for layer in spec.layers} - {None}
    end_ids = frozenset(spec.eos_ids) | frozenset(stop_ids(folder, tokenizer))
    return Engine(config, spec, resolved, runner, tokenizer, end_ids, min(limits, default=None), info)  # type: ignore[type-var]


def _about(progress: Progress | None, what: str) -> Callable[[int, int], None] | None:
    return None if progress is None else lambda done, total: progress(what, done, total)


def _saying(progress: Progress | None) -> Callable[[str], None] | None:
    return None if progress is None else lambda text: progress(text, 0, 0)


def _placement(config: EngineConfig, spec: ModelSpec) -> Placement:
    num_layers, num_experts = len(spec.moe_layers), _moe(spec).router.num_experts if spec.moe_layers else 0
    if config.placement is None:
        return Placement.identity(num_layers, num_experts)
    return Placement.load(Path(config.placement), num_layers, num_experts)


def _moe(spec: ModelSpec) -> MoESpec:
    mlp = spec.layers[spec.moe_layers[0]].mlp
    assert isinstance(mlp, MoESpec)
    return mlp


def _info(
    config: EngineConfig, folder: Path, spec: ModelSpec, resolved: Resolved, kernels: KernelSelector
) -> ModelInfo:
    router = _moe(spec).router if spec.moe_layers else None
    return ModelInfo(
        name=config.served_model_name or config.model,
        folder=str(folder),
        family=spec.family,
        max_model_len=resolved.max_model_len,
        vocab_size=spec.vocab_size,
        num_experts=router.num_experts if router else 0,
        top_k=router.top_k if router else 0,
        moe_layers=list(spec.moe_layers),
        created=int(time.time()),
        decisions=[(d.field, str(d.value), d.why) for d in resolved.decisions],
        kernels=[(c["op"], c["chosen"], c["reason"]) for c in kernels.report()],
        max_num_seqs=resolved.max_num_seqs,
    )
