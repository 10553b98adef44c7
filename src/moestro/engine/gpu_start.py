"""The last steps before a GPU serves: compile, measure, give the KV cache what is left, capture the decoding steps."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from moestro.engine.batch import BatchBuilder
from moestro.engine.config import EngineConfig
from moestro.engine.cuda_runner import CudaRunner
from moestro.engine.decode_graphs import SIZES
from moestro.engine.resolve import Resolved, free_memory, with_kv_cache
from moestro.kv.pool import KVPool
from moestro.logs import logger
from moestro.model.decoder import Decoder
from moestro.moe.events import ExpertCounters
from moestro.spec.fields import ModelSpec

# Prompt lengths that between them use every form of every kernel.
_PROMPTS = (2, 20, 50, 100, 300, 600, 1100)
_SAMPLER_BYTES = 32  # a logit, while rows are sorted: values, ids, sums
_SPARE = 256 * 2**20


def start_on_gpu(
    config: EngineConfig,
    spec: ModelSpec,
    resolved: Resolved,
    decoder: Decoder,
    counters: ExpertCounters | None,
    batches: BatchBuilder,
    say: Callable[[str], None] | None,
) -> tuple[CudaRunner, Resolved]:
    """A runner that is ready to serve, and the decisions with the KV cache's size.

    say: told what is going on. Raises CapacityError with the numbers when no useful KV cache fits.
    """
    began = time.perf_counter()
    if say is not None:
        say("compiling kernels (kept for the next start) and measuring memory")
    needed = _activation_bytes(config, spec, resolved, decoder, batches)
    seqs = resolved.max_num_seqs
    logits = (_SAMPLER_BYTES * seqs + 4 * sum(s for s in SIZES if s <= seqs)) * spec.vocab_size
    free = free_memory(resolved.device, config.gpu_memory_utilization) - needed - logits - _SPARE
    resolved = with_kv_cache(resolved, config, spec, free=free)
    kv = KVPool(spec, resolved.num_pages, config.block_size, resolved.dtype, resolved.device)
    runner = CudaRunner(decoder, kv, counters, batches, max_num_seqs=seqs)
    if not config.enforce_eager:
        if say is not None:
            say("capturing decoding steps")
        runner.capture(max_num_seqs=seqs, max_model_len=resolved.max_model_len)
    torch.cuda.synchronize()
    logger.info("GPU ready in %.1f s", time.perf_counter() - began)
    return runner, resolved


def _activation_bytes(
    config: EngineConfig, spec: ModelSpec, resolved: Resolved, decoder: Decoder, batches: BatchBuilder
) -> int:
    """Bytes that the largest step needs beside weights and KV cache. Compiles the kernels of prompts on the way."""
    longest = min(resolved.max_num_batched_tokens, resolved.max_model_len)
    room = -(-(longest + 1) // config.block_size)
    kv = KVPool(spec, room, config.block_size, resolved.dtype, resolved.device)
    runner = CudaRunner(decoder, kv, None, batches, max_num_seqs=resolved.max_num_seqs)
    for num_tokens in (*(n for n in _PROMPTS if n < longest), longest):
        runner.warm_up_prompt(num_tokens)
    for num_tokens in (n for n in (1, 3, 40, longest // 2) if 0 < n <= longest // 2):
        runner.warm_up_prompt(num_tokens, start=longest // 2)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    runner.warm_up_prompt(longest)
    torch.cuda.synchronize()
    needed = torch.cuda.max_memory_allocated() - before
    del runner, kv
    torch.cuda.empty_cache()
    return needed
