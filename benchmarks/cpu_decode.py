"""Decode and prefill speed on the CPU: moestro against transformers and llama.cpp, on the demo model, its dense
form (16 experts, all of them chosen) and a random Granite-3.0-1B.

    python benchmarks/cpu_decode.py [--model demo|demo-dense|granite|FOLDER ...] [--peers] [--rounds 3] [--json FILE]

Each engine runs in a process of its own, one after the other, several rounds over; the best of each is reported, since
on shared machines the second core comes and goes. Before anything is timed the engines must agree on greedy tokens
(llama.cpp on text).

limit: bytes of the weights that one token touches (all linear layers, the head, top-k experts of each layer) over the
read bandwidth measured in the same run. Peers need `pip install transformers gguf xllamacpp`.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import machine

PROMPT_TOKENS = 32
NEW_TOKENS = 32
PREFILL_TOKENS = 512
GRANITE = {
    "architectures": ["GraniteMoeForCausalLM"],
    "model_type": "granitemoe",
    "vocab_size": 49155,
    "hidden_size": 1024,
    "intermediate_size": 512,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "attention_multiplier": 0.015625,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 6.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    import random

    rng = random.Random(seed)
    return [rng.randrange(100, 40_000) for _ in range(num_tokens)]


@dataclass
class Engine:
    """generate(prompts, new_tokens) -> token ids a prompt."""

    generate: Callable[[list[list[int]], int], list[list[int]]]


def open_moestro(folder: Path, dtype: str) -> Engine:
    from moestro import LLM, SamplingParams

    llm = LLM(folder, dtype=dtype, max_model_len=1024, kv_memory="1GiB", enable_prefix_caching=False)

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        return [r.token_ids for r in llm.generate(prompts, params)]

    return Engine(generate)


def open_transformers(folder: Path, dtype: str) -> Engine:
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
            )
        return [row[ids.shape[1] :].tolist() for row in out]

    return Engine(generate)


OPENERS = {"moestro": open_moestro, "transformers": open_transformers}


def worker(engine_name: str, folder: Path, dtype: str, batches: list[int]) -> dict[str, Any]:
    """Measured inside a process of its own: seconds a step of decoding by batch, and of a prefill."""
    engine = OPENERS[engine_name](folder, dtype)
    tokens = engine.generate([prompt(PROMPT_TOKENS)], 16)[0]
    result: dict[str, Any] = {"greedy": tokens, "decode_s": {}}
    for batch in batches:
        prompts = [prompt(PROMPT_TOKENS, seed) for seed in range(batch)]
        one = best(lambda p=prompts: engine.generate(p, 1), 3)
        many = best(lambda p=prompts: engine.generate(p, 1 + NEW_TOKENS), 2)
        result["decode_s"][batch] = (many - one) / NEW_TOKENS
    long = prompt(PREFILL_TOKENS)
    result["prefill_s"] = best(lambda: engine.generate([long], 1), 2)
    return result


def best(work: Callable[[], object], times: int) -> float:
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def llama_cpp(folder: Path, scratch: Path) -> dict[str, Any]:
    """The same model as a bfloat16 GGUF through the xllamacpp wheel. Decode rate as llama.cpp itself reports it."""
    import xllamacpp

    from llama_gguf import write_gguf

    path = scratch / "model-bf16.gguf"
    if not path.exists():
        write_gguf(folder, path)
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx = 1024
    params.cpuparams.n_threads = machine.num_threads()
    server = xllamacpp.Server(params)
    best_ms, text, prefill_ms = float("inf"), "", float("inf")
    for _ in range(3):
        answer = server.handle_completions(
            {"prompt": "The capital of France is", "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
        )
        best_ms = min(best_ms, answer["timings"]["predicted_per_token_ms"])
        text = answer["choices"][0]["text"]
        answer = server.handle_completions({"prompt": prompt(PREFILL_TOKENS), "max_tokens": 1, "cache_prompt": False})
        prefill_ms = min(prefill_ms, answer["timings"]["prompt_ms"])
    return {"text": text, "decode_s": {1: best_ms / 1e3}, "prefill_s": prefill_ms / 1e3}


def touched_bytes(folder: Path, bytes_a_weight: int) -> tuple[int, int]:
    """(bytes one token reads, multiply-adds one token of a prompt needs) for the linear layers, experts and, once, the
    head.
    """
    from moestro.spec.fields import MoESpec
    from moestro.spec.registry import read_spec
    from moestro.spec.tensors import model_tensors

    spec = read_spec(folder)
    weights = body = 0
    for name, tensor in model_tensors(spec).items():
        if name == "embed.weight":
            weights += tensor.size if spec.tied_head else 0
            continue
        size = tensor.size
        if tensor.role == "expert":
            mlp = spec.layers[int(name.split(".")[1])].mlp
            assert isinstance(mlp, MoESpec)
            size = size * mlp.router.top_k // mlp.router.num_experts
        weights += size
        if len(tensor.shape) > 1 and tensor.role != "head":
            body += size
    return weights * bytes_a_weight, body


def find_model(name: str, scratch: Path) -> Path:
    from moestro.checkpoint.source import resolve_model
    from moestro.checkpoint.synth import write_checkpoint

    if name == "granite":
        folder = scratch / "granite-3.0-1b-a400m-random"
        return folder if folder.exists() else write_checkpoint(GRANITE, folder, seed=0, dtype="bfloat16")
    return resolve_model(name)


def run_worker(engine: str, folder: Path, dtype: str, batches: list[int]) -> dict[str, Any]:
    command = [sys.executable, __file__, "--worker", engine, "--model", str(folder), "--dtype", dtype]
    command += ["--batch", *map(str, batches)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def merge(old: dict[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
    """The faster of two rounds, figure by figure."""
    new["decode_s"] = {int(b): s for b, s in new["decode_s"].items()}
    if old is None:
        return new
    new["decode_s"] = {b: min(s, old["decode_s"][b]) for b, s in new["decode_s"].items()}
    new["prefill_s"] = min(new["prefill_s"], old["prefill_s"])
    return new


def measure(name: str, args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    folder = find_model(name, scratch)
    engines: dict[str, dict[str, Any]] = {}
    read_gbs = gemm_gflops = 0.0
    for number in range(args.rounds):
        print(f"{name}: round {number + 1} of {args.rounds}", file=sys.stderr)
        read_gbs = max(read_gbs, machine.read_bandwidth() / 1e9)
        gemm_gflops = max(gemm_gflops, machine.gemm_rate() / 1e9)
        engines["moestro"] = merge(engines.get("moestro"), run_worker("moestro", folder, args.dtype, args.batch))
        if args.peers:
            peer = run_worker("transformers", folder, args.dtype, args.batch)
            engines["transformers"] = merge(engines.get("transformers"), peer)
    if args.peers:
        ours, theirs = engines["moestro"]["greedy"], engines["transformers"]["greedy"]
        same = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))
        print(f"{name}: greedy tokens agree for {same} of {len(ours)} ({args.dtype})", file=sys.stderr)
        if same == 0:
            raise SystemExit("the engines do not agree on the first token; their speeds compare nothing")
        if name == "demo-dense":
            engines["llama.cpp"] = merge(None, llama_cpp(folder, scratch))
    size = {"bfloat16": 2, "float32": 4}[args.dtype]
    num_bytes, body = touched_bytes(folder, size)
    limit_s = num_bytes / (read_gbs * 1e9)
    return {
        "model": name,
        "dtype": args.dtype,
        "read_gbs": read_gbs,
        "gemm_gflops": gemm_gflops,
        "touched_mb": num_bytes / 1e6,
        "limit_ms": limit_s * 1e3,
        "engines": engines,
        "prefill_gflops": {e: 2 * body * PREFILL_TOKENS / r["prefill_s"] / 1e9 for e, r in engines.items()},
        "share_of_limit": limit_s / engines["moestro"]["decode_s"][1] if 1 in engines["moestro"]["decode_s"] else None,
    }


def table(report: dict[str, Any]) -> str:
    limit = f"at {report['read_gbs']:.1f} GB/s the limit is {report['limit_ms']:.1f} ms"
    lines = [
        f"{report['model']} ({report['dtype']}): a token reads {report['touched_mb']:.0f} MB; {limit}; "
        f"float32 GEMM {report['gemm_gflops']:.0f} GFLOP/s",
        f"{'engine':14}{'batch':>6}{'ms a step':>11}{'tokens/s':>10}{'of limit':>10}",
    ]
    for engine, result in report["engines"].items():
        for batch, seconds in result["decode_s"].items():
            share = f"{report['limit_ms'] / 1e3 / seconds:.0%}" if batch == 1 else ""
            lines.append(f"{engine:14}{batch:>6}{seconds * 1e3:>11.2f}{batch / seconds:>10.1f}{share:>10}")
        rate = report["prefill_gflops"][engine]
        lines.append(
            f"{engine:14} prefill of {PREFILL_TOKENS}: {result['prefill_s'] * 1e3:.0f} ms, {rate:.0f} GFLOP/s, "
            f"{rate / report['gemm_gflops']:.0%} of the GEMM rate"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["demo", "demo-dense", "granite"])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", action="store_true", help="also measure transformers, and llama.cpp on demo-dense")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()) / "moestro-bench")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(worker(args.worker, Path(args.model[0]), args.dtype, args.batch)))
        return
    args.scratch.mkdir(parents=True, exist_ok=True)
    reports = [measure(name, args, args.scratch) for name in args.model]
    for report in reports:
        print(table(report), end="\n\n")
    if args.json:
        facts = {
            "date": time.strftime("%Y-%m-%d"),
            "cpu": platform.processor(),
            "command": sys.argv,
            "reports": reports,
        }
        args.json.write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
