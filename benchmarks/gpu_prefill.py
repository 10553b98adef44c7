"""Prefill on one GPU: milliseconds from a prompt to its first token, and the share of the matrix rate.

    python benchmarks/gpu_prefill.py [--shape Qwen3-30B-A3B] [--tokens 512 2048 8192] [--json FILE]

One request, random weights in the real shape, best of three. share: operations of the model (causal attention counted
once) over 765 TFLOP/s, over the time.
"""

from __future__ import annotations

import argparse

import gpu_shapes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="Qwen3-30B-A3B")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--profile", action="store_true", help="print the kernels of the longest prompt")
    parser.add_argument("--json")
    options = parser.parse_args()
    most = max(options.tokens)
    loop = gpu_shapes.load(
        options.shape, max_model_len=most + 16, max_num_batched_tokens=most, max_num_seqs=1, enable_prefix_caching=False
    )
    spec, rows = loop._engine.spec, []
    print("tokens       ms  limit ms   share")
    for tokens in options.tokens:
        ids = gpu_shapes.prompts(1, tokens, spec.vocab_size)
        gpu_shapes.generate_seconds(loop, ids, 1)
        ms = min(gpu_shapes.generate_seconds(loop, ids, 1) for _ in range(3)) * 1e3
        limit = gpu_shapes.prompt_flops(spec, tokens) / gpu_shapes.MATRIX_FLOPS * 1e3
        rows.append({"tokens": tokens, "ms": ms, "limit_ms": limit, "share": limit / ms})
        print(f"{tokens:6d} {ms:8.1f} {limit:9.1f} {limit / ms:7.1%}", flush=True)
    if options.profile:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as found:
            gpu_shapes.generate_seconds(loop, ids, 1)
        print(found.key_averages().table(sort_by="cuda_time_total", row_limit=20, max_name_column_width=60))
    gpu_shapes.write(options.json, gpu_shapes.about() | {"shape": options.shape, "rows": rows})


if __name__ == "__main__":
    main()
