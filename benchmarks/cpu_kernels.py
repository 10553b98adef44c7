"""Each CPU kernel at the shapes of real models, against what this machine's memory and arithmetic allow.

    python benchmarks/cpu_kernels.py [--only WORD ...] [--json FILE]

Every case first has to equal the PyTorch reference. Weights and pages rotate through copies larger than the caches,
so that they come from memory. The time is the best of many, since on shared machines the second core comes and goes.

limit: the larger of bytes / read bandwidth and operations / float32 GEMM rate, both measured in the same run; "of
limit" is limit / time, 100 % being the most there is (more shows that caches helped, or that MKL is not at its best).

T tokens.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

import machine
from moestro.kernels import threads
from moestro.kernels.ops.attention import PagedBatch
from moestro.kernels.ops.experts import ExpertWeights
from moestro.kernels.ops.qkv_store import QKVPlan
from moestro.kernels.select import KernelSelector
from moestro.quant.formats import Weight
from moestro.spec.fields import RouterSpec

COPIES_BYTES = 256 << 20
FAST, REFERENCE = KernelSelector("cpu", "numba"), KernelSelector("cpu", "reference")


@dataclass(frozen=True)
class Case:
    """One line of the table. run(i) works on copy i; num_bytes, flops of a run; tolerance relative to the largest."""

    op: str
    shape: str
    run: Callable[[int], Any]
    reference: Callable[[int], Any]
    copies: int
    num_bytes: float
    flops: float
    tolerance: float = 2e-5


def copies_of(num_bytes: int) -> int:
    return max(1, min(64, -(-COPIES_BYTES // num_bytes)))


def linear_cases() -> Iterator[Case]:
    shapes = {
        "OLMoE qkv": (6144, 2048),
        "Mixtral gate_up": (28672, 4096),
        "Granite head": (49155, 1024),
        "router": (64, 2048),
    }
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        for label, (N, K) in shapes.items():
            if label == "router" and dtype is torch.bfloat16:
                continue
            one = torch.randn(N, K).to(dtype)
            weights = [Weight(one.clone()) for _ in range(copies_of(one.nbytes))]
            for T in (1, 2, 4, 8, 16, 32, 512):
                x = torch.randn(T, K)

                def run(
                    kernels: KernelSelector, i: int, x: torch.Tensor = x, ws: list[Weight] = weights
                ) -> torch.Tensor:
                    return kernels.linear(ws[0].format)(x, ws[i], None)

                yield Case(
                    "linear", f"{label} {N}x{K} {name} T={T}",
                    lambda i, r=run: r(FAST, i), lambda i, r=run: r(REFERENCE, i),
                    len(weights), one.nbytes, 2 * T * N * K,
                )  # fmt: skip


def experts_cases() -> Iterator[Case]:
    models = {"Granite-1B": (32, 512, 1024, 8), "OLMoE": (64, 1024, 2048, 8), "Qwen3-30B": (128, 768, 2048, 8)}
    for label, (E, F, D, K) in models.items():
        one = ExpertWeights(Weight(torch.randn(E, 2 * F, D).bfloat16()), Weight(torch.randn(E, D, F).bfloat16()))
        size = 6 * F * D
        layers = [one]
        for _ in range(copies_of(K * size) - 1 if E * size < COPIES_BYTES else 0):
            layers.append(ExpertWeights(Weight(one.gate_up.data.clone()), Weight(one.down.data.clone())))
            if len(layers) * E * size > COPIES_BYTES:
                break
        for T in (1, 2, 8, 32, 128, 512):
            ids = torch.stack([torch.randperm(E)[:K] for _ in range(T)]).int()
            offsets, order = FAST.sort_by_expert()(ids, E)
            x = torch.randn(len(order), D)
            touched = int((offsets.diff() > 0).sum())

            def run(
                kernels: KernelSelector, i: int, x: torch.Tensor = x, o: torch.Tensor = offsets, ls: Any = layers
            ) -> torch.Tensor:
                return kernels.experts_mlp("bfloat16")(x, o, ls[i], "swiglu", None)

            yield Case(
                "experts_mlp", f"{label} {K} of {E}, {F}x{D} bfloat16 T={T}, {touched} touched",
                lambda i, r=run: r(FAST, i), lambda i, r=run: r(REFERENCE, i),
                len(layers), touched * size, 6 * T * K * F * D,
            )  # fmt: skip


def attention_cases() -> Iterator[Case]:
    heads = {"Granite-1B": (16, 8, 64, 64), "Qwen3-30B": (32, 4, 128, 128), "DeepSeek latent": (16, 1, 576, 512)}
    steps = {
        "decode 1x512": ([512], [1]),
        "decode 1x8192": ([8192], [1]),
        "decode 8x1024": ([1024] * 8, [1] * 8),
        "prompt 512": ([512], [512]),
        "prompt 2048": ([2048], [2048]),
        "chunk 256 at 4096": ([4096], [256]),
    }
    for label, (H, Hk, d, dv) in heads.items():
        for step, (lengths, queries) in steps.items():
            batch, P = paged_batch(lengths, queries)
            size = 2 * sum(lengths) * Hk * (d + (dv if Hk > 1 else 0))
            pages = []
            for _ in range(copies_of(size)):
                k = torch.randn(P, Hk, batch.page_size, d, dtype=torch.bfloat16)
                pages.append((k, torch.randn_like(k) if Hk > 1 else k[..., :dv]))
            q = torch.randn(batch.num_tokens, H, d)

            def run(
                kernels: KernelSelector, i: int, q: torch.Tensor = q, ps: Any = pages, b: PagedBatch = batch
            ) -> torch.Tensor:
                return kernels.paged_attention("bfloat16")(q, *ps[i], b, q.shape[-1] ** -0.5, None, None)

            pairs = sum(n * length - n * (n - 1) // 2 for n, length in zip(queries, lengths, strict=True))
            yield Case(
                "paged_attention", f"{label} {H}/{Hk}x{d} bfloat16 {step}",
                lambda i, r=run: r(FAST, i), lambda i, r=run: r(REFERENCE, i),
                len(pages), size, 2 * pairs * H * (d + dv),
            )  # fmt: skip


def paged_batch(lengths: list[int], queries: list[int], page_size: int = 16) -> tuple[PagedBatch, int]:
    counts = [-(-length // page_size) for length in lengths]
    ids = torch.randperm(sum(counts)).int()
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    for s, part in enumerate(ids.split(counts)):
        tables[s, : len(part)] = part
    T = sum(queries)
    batch = PagedBatch(
        page_size=page_size,
        q_starts_S1=torch.tensor([0, *queries]).cumsum(0).int(),
        context_lens_S=torch.tensor(lengths, dtype=torch.int32),
        page_tables_SP=tables,
        slots_T=torch.arange(T),
        num_seqs=len(lengths),
        num_tokens=T,
        max_query_len=max(queries),
        max_context_len=max(lengths),
    )
    return batch, len(ids)


def small_cases() -> Iterator[Case]:
    """Ops without weights; their limit is the float32 they read and write."""
    D, E, K = 2048, 64, 8
    for T in (1, 8, 512):
        x, weight, logits = torch.randn(T, D), torch.rand(D), torch.randn(T, E)
        spec = RouterSpec(E, K)
        ids, mix = FAST.route()(logits, spec, None)
        _, order = FAST.sort_by_expert()(ids, E)
        y = torch.randn(T * K, D)
        batch, P = paged_batch([T], [T])
        plan = QKVPlan(16, 16, 128, 128, 128, qk_norm="full")
        qkv, turn = torch.randn(T, plan.total), torch.rand(T, 64)
        norms = [torch.rand(size) for size in plan.norm_sizes]
        pages = [torch.zeros(P, 16, 16, 128, dtype=torch.bfloat16) for _ in range(2)]
        calls: dict[str, tuple[Callable[[KernelSelector], Any], float]] = {
            "rms_norm": (lambda k, x=x, w=weight: k.rms_norm()(x, w, 1e-6), 8 * T * D),
            "add_rms_norm_": (lambda k, x=x, w=weight: k.add_rms_norm_()(x * 1, x, 1.0, w, 1e-6), 24 * T * D),
            "route": (lambda k, a=logits, s=spec: k.route()(a, s, None)[1], 4 * T * E),
            "sort_by_expert": (lambda k, i=ids: k.sort_by_expert()(i, E)[1], 8 * T * K),
            "combine": (lambda k, y=y, o=order, m=mix, T=T: k.combine()(y, o, m, T), 4 * T * D * (K + 1)),
            "qkv_store": (
                lambda k, q=qkv, p=plan, t=turn, b=batch, g=pages, n=norms: k.qkv_store("bfloat16")(
                    q, p, t, t, b, *g, *n, 1e-6
                ),
                4 * T * plan.total * 2,
            ),
        }
        for op, (call, num_bytes) in calls.items():
            yield Case(
                op, f"OLMoE T={T}", lambda i, c=call: c(FAST), lambda i, c=call: c(REFERENCE), 1, num_bytes, 0, 1e-5
            )  # fmt: skip


def check(case: Case) -> None:
    got, expected = case.run(0), case.reference(0)
    if not torch.allclose(got, expected, rtol=case.tolerance, atol=case.tolerance * float(expected.abs().max())):
        sys.exit(f"{case.op} {case.shape} differs from the reference by {float((got - expected).abs().max()):.2e}")


def best_seconds(case: Case, budget_s: float = 0.4) -> float:
    best, began, i = float("inf"), time.perf_counter(), 0
    while i < 5 or time.perf_counter() - began < budget_s:
        start = time.perf_counter()
        case.run(i % case.copies)
        best = min(best, time.perf_counter() - start)
        i += 1
    return best


@dataclass(frozen=True)
class Result:
    op: str
    shape: str
    us: float
    gb_s: float
    gflop_s: float
    of_limit: float
    bound: str


def measure(case: Case, read: float, gemm: float) -> Result:
    check(case)
    seconds = best_seconds(case)
    memory, arithmetic = case.num_bytes / read, case.flops / gemm
    return Result(
        case.op,
        case.shape,
        seconds * 1e6,
        case.num_bytes / seconds / 1e9,
        case.flops / seconds / 1e9,
        max(memory, arithmetic) / seconds,
        "memory" if memory > arithmetic else "arithmetic",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="ops to run, by name")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    read, gemm = machine.read_bandwidth(), machine.gemm_rate()
    threads.setup()
    print(f"{machine.num_threads()} threads; read {read / 1e9:.1f} GB/s; float32 GEMM {gemm / 1e9:.0f} GFLOP/s")
    print(f"{'op':16} {'shape':62} {'us':>9} {'GB/s':>7} {'GFLOP/s':>8} {'of limit':>9}  bound")
    results = []
    for cases in (small_cases, linear_cases, experts_cases, attention_cases):
        for case in cases():
            if arguments.only and case.op not in arguments.only:
                continue
            r = measure(case, read, gemm)
            results.append(r)
            print(
                f"{r.op:16} {r.shape:62} {r.us:9.1f} {r.gb_s:7.1f} {r.gflop_s:8.1f} {r.of_limit:9.0%}  {r.bound}",
                flush=True,
            )
    if arguments.json:
        figures = {
            "machine": {"cpu": platform.processor() or platform.machine(), "threads": machine.num_threads()},
            "read_bytes_s": read,
            "gemm_flop_s": gemm,
            "results": [asdict(r) for r in results],
        }
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
