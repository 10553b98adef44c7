"""Decoding on one GPU, whole steps: milliseconds, share of the memory limit, host overhead.

    python benchmarks/gpu_decode.py [--shape Qwen3-30B-A3B] [--batch 1 4 8 ...] [--tokens 129] [--json FILE]

Random weights in the real shape, prompts of 512 random tokens. A step is timed as a user sees it: (time of generating
129 tokens - time of generating 1) / 128, prompts included in both, the best of two. limit: bytes of the weights that
steps in that run must have read, experts really touched, and of the KV cache, over 4.36 TB/s. device: the same step's
graph replayed back to back, without the host. overhead: what the user's step takes beyond that.
"""

from __future__ import annotations

import argparse
import time

import torch

import gpu_shapes
from moestro.engine.cuda_runner import CudaRunner
from moestro.engine.loop import EngineLoop

PROMPT = 512


def measure(loop: EngineLoop, batch: int, tokens: int) -> dict[str, float]:
    engine = loop._engine
    runner = engine.runner
    assert isinstance(runner, CudaRunner)
    assert runner.counters is not None
    ids = gpu_shapes.prompts(batch, PROMPT, engine.spec.vocab_size)
    gpu_shapes.generate_seconds(loop, ids, 2)
    first = min(gpu_shapes.generate_seconds(loop, ids, 1) for _ in range(2))
    whole = min(gpu_shapes.generate_seconds(loop, ids, tokens) for _ in range(2))
    step = (whole - first) / (tokens - 1)
    distinct = _distinct(loop, ids)
    device = _replay_seconds(runner, batch)
    need = gpu_shapes.step_bytes(engine.spec, distinct, batch, PROMPT + tokens // 2)
    limit = need / gpu_shapes.READ_BYTES_A_SECOND
    return {
        "batch": batch,
        "step_ms": step * 1e3,
        "device_ms": device * 1e3,
        "limit_ms": limit * 1e3,
        "share_of_limit": limit / step,
        "device_share_of_limit": limit / device,
        "host_overhead": step / device - 1,
        "distinct_experts": sum(distinct) / len(distinct),
        "first_token_ms": first * 1e3,
    }


def _distinct(loop: EngineLoop, ids: list[list[int]], steps: int = 4) -> list[float]:
    """Experts touched a MoE layer by one decoding step, mean of a few steps in the middle of a generation."""
    runner = loop._engine.runner
    gpu_shapes.add(loop, f"d{time.perf_counter()}", ids, 64 + 2 * steps)
    for _ in range(48):
        loop.step()
    while len(loop._scheduler.waiting) or any(s.num_to_compute > 1 for s in loop._scheduler.running):
        loop.step()
    counts: list[list[int]] = []
    for _ in range(steps):
        torch.cuda.synchronize()
        runner.counters.reset()
        loop.step()
        torch.cuda.synchronize()
        counts.append([sum(c > 0 for c in layer) for layer in runner.counters.tokens()])
    while loop.has_work:
        loop.step()
    return [sum(column) / len(column) for column in zip(*counts, strict=True)]


def _replay_seconds(runner: CudaRunner, batch: int) -> float:
    """Seconds of one replay with the inputs of the last step, back to back."""
    assert runner.graphs is not None
    size = next(s for s in runner.graphs.sizes if s >= batch)
    graph = runner.graphs._graphs[size].graph
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(20):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 20 / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="Qwen3-30B-A3B")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--tokens", type=int, default=129)
    parser.add_argument("--json")
    options = parser.parse_args()
    began = time.perf_counter()
    most = max(options.batch)
    loop = gpu_shapes.load(
        options.shape, max_model_len=PROMPT + options.tokens + 64, max_num_seqs=most, enable_prefix_caching=False
    )
    print(f"{options.shape}: ready after {time.perf_counter() - began:.0f} s", flush=True)
    rows = []
    print("batch  step ms  device ms  limit ms   share  device share  overhead  distinct  first token ms")
    for batch in options.batch:
        r = measure(loop, batch, options.tokens)
        rows.append(r)
        print(
            f"{batch:5d} {r['step_ms']:8.2f} {r['device_ms']:10.2f} {r['limit_ms']:9.2f} {r['share_of_limit']:7.1%} "
            f"{r['device_share_of_limit']:13.1%} {r['host_overhead']:9.1%} {r['distinct_experts']:9.1f} "
            f"{r['first_token_ms']:15.1f}",
            flush=True,
        )
    gpu_shapes.write(options.json, gpu_shapes.about() | {"shape": options.shape, "prompt": PROMPT, "rows": rows})


if __name__ == "__main__":
    main()
