"""What the GPU benchmarks share: models of real shapes with random weights, and what a step of them must read."""

from __future__ import annotations

import json
import platform
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import triton

from moestro.engine.config import EngineConfig
from moestro.engine.loop import EngineLoop
from moestro.engine.request import Request, SamplingParams
from moestro.spec.fields import DenseSpec, ModelSpec, MoESpec
from moestro.spec.tensors import model_tensors

SHAPES = Path(__file__).parent / "shapes"
READ_BYTES_A_SECOND = 4.36e12  # measured on an H200: read only
MATRIX_FLOPS = 765e12  # measured on an H200: bf16, 8192 cubed


def load(shape: str, **options: Any) -> EngineLoop:
    """An engine of one of the files in shapes/, without its .json, with random weights in bfloat16."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(SHAPES / f"{shape}.json", Path(folder) / "config.json")
        config = EngineConfig(model=folder, load_format="dummy", dtype="bfloat16", device="cuda", **options)
        return EngineLoop(config, lambda what, done, total: None)


def prompts(count: int, length: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[list[int]] = torch.randint(0, vocab_size, (count, length), generator=generator).tolist()
    return ids


def add(loop: EngineLoop, name: str, ids: list[list[int]], max_tokens: int) -> None:
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    for i, prompt in enumerate(ids):
        loop.add(Request(f"{name}-{i}", prompt, params))


def generate_seconds(loop: EngineLoop, ids: list[list[int]], max_tokens: int) -> float:
    """Seconds from handing in the prompts to the last token."""
    began = time.perf_counter()
    add(loop, f"g{began}", ids, max_tokens)
    while loop.has_work:
        loop.step()
    return time.perf_counter() - began


def step_bytes(spec: ModelSpec, distinct: list[float], batch: int, context: int) -> float:
    """Bytes of bfloat16 weights and KV cache that a decoding step must read. distinct: experts touched, a MoE layer."""
    total = sum(t.size for n, t in model_tensors(spec).items() if t.role not in ("embedding", "expert")) * 2.0
    if spec.tied_head:
        total += spec.vocab_size * spec.width * 2
    for index, count in zip(spec.moe_layers, distinct, strict=True):
        mlp = spec.layers[index].mlp
        assert isinstance(mlp, MoESpec)
        total += count * 3 * spec.width * mlp.expert_width * 2
    for layer in spec.layers:
        attention = layer.attention
        seen = context if attention.window is None else min(context, attention.window)
        total += batch * seen * attention.kv_values_per_token * 2
    return total


def prompt_flops(spec: ModelSpec, tokens: int) -> float:
    """Multiplications and additions of a prompt: linear layers, chosen experts, causal attention, one row of logits."""
    total = 2.0 * spec.vocab_size * spec.width
    for name, tensor in model_tensors(spec).items():
        if tensor.role in ("attention", "dense", "router", "shared") and len(tensor.shape) == 2 and "norm" not in name:
            total += 2.0 * tokens * tensor.size
    for layer in spec.layers:
        a = layer.attention
        total += tokens**2 * a.num_heads * (a.head_dim + a.v_head_dim)
        if isinstance(layer.mlp, MoESpec):
            total += 2.0 * tokens * layer.mlp.router.top_k * 3 * spec.width * layer.mlp.width
        else:
            assert isinstance(layer.mlp, DenseSpec)
    return total


def about() -> dict[str, Any]:
    return {
        "date": time.strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


def write(path: str | None, result: dict[str, Any]) -> None:
    if path:
        Path(path).write_text(json.dumps(result, indent=1) + "\n")
