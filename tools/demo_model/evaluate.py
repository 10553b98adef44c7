"""Held-out perplexity by domain, and how far experts specialise: dense, as shipped, carved only, split at random.

The shipped model is read back with moestro's own code, so the figures are those of the files that users get.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from carve import load_carved
from common import DOMAINS, Corpora, Runner, Split, Weights, evaluate, read_dense
from safetensors.torch import load_file

from moestro.checkpoint.demo import GGUFSource
from moestro.checkpoint.demo_delta import read_delta, sparse_tensors
from moestro.checkpoint.gguf import GGUFFile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--corpora", type=Path, required=True)
    parser.add_argument(
        "--carved", type=Path, nargs="*", default=[], help="files of carve.py, before and after the refit"
    )
    parser.add_argument("--split", type=Split.parse, required=True)
    parser.add_argument("--trained", type=Path, nargs="*", default=[], help="folders of train.py")
    parser.add_argument("--shipped", type=Path, help="folder of export.py")
    parser.add_argument("--out", type=Path, required=True, help="JSON file; rows already in it are kept")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape, dense = read_dense(args.gguf)
    dense = {name: w.to(device) for name, w in dense.items()}
    held = Corpora(args.corpora, args.corpora / "tokenizer.json", "held", DOMAINS)
    rows = json.loads(args.out.read_text()) if args.out.is_file() else {}
    sparse = Runner(shape, args.split, device, dtype)

    def add(name: str, runner: Runner, weights: Weights) -> None:
        rows[name] = evaluate(runner, weights, held, DOMAINS) | {"split": vars(runner.split) if runner.split else None}
        args.out.write_text(json.dumps(rows, indent=1))
        show(name, rows[name], rows["dense"])

    add("dense", Runner(shape, None, device, dtype), dense)
    for path in args.carved:
        add(f"{path.stem}, as fitted", sparse, load_carved(path, dense, refit=False))
        add(f"{path.stem}, down refitted", sparse, load_carved(path, dense, refit=True))
    for folder in args.trained:
        trained = {n: w.to(device) for n, w in load_file(folder / "weights.safetensors").items()}
        add(f"{folder.name}, trained", sparse, trained | {"embed": dense["embed"]})
    if args.shipped:
        add(f"{args.shipped.name}, as shipped", sparse, shipped(args.gguf, args.shipped, args.split, device))


def shipped(gguf: Path, folder: Path, split: Split, device: torch.device) -> Weights:
    """The checkpoint that moestro writes, in this folder's layout."""
    t = sparse_tensors(GGUFSource(GGUFFile(gguf), gguf.name), read_delta(folder))
    weights = {"embed": t["model.embed_tokens.weight"], "norm": t["model.norm.weight"]}
    owners = ["shared_expert", *(f"experts.{e}" for e in range(split.num_experts))]
    factors = [2, *[split.num_experts] * split.num_experts]
    num_layers = sum(name.endswith("input_layernorm.weight") for name in t)
    for i in range(num_layers):
        layer = f"model.layers.{i}"
        weights[f"{i}.attn_norm"] = t[f"{layer}.input_layernorm.weight"]
        weights[f"{i}.mlp_norm"] = t[f"{layer}.post_attention_layernorm.weight"]
        weights |= {f"{i}.{p}": t[f"{layer}.self_attn.{p}_proj.weight"] for p in ("q", "k", "v", "o")}
        weights[f"{i}.router"] = t[f"{layer}.mlp.gate.weight"]
        weights[f"{i}.shared_gate"] = t[f"{layer}.mlp.shared_expert_gate.weight"][0]
        weights |= {
            f"{i}.{p}": torch.cat([t[f"{layer}.mlp.{o}.{p}_proj.weight"] for o in owners]) for p in ("gate", "up")
        }
        downs = [t[f"{layer}.mlp.{o}.down_proj.weight"].float() / f for o, f in zip(owners, factors, strict=True)]
        weights[f"{i}.down"] = torch.cat(downs, dim=1)
    return {name: w.float().to(device) for name, w in weights.items()}


def show(name: str, row: dict, dense: dict) -> None:
    ratios = {d: row["domains"][d]["perplexity"] / dense["domains"][d]["perplexity"] for d in row["domains"]}
    mean = math.exp(sum(math.log(r) for r in ratios.values()) / len(ratios))
    cells = "  ".join(f"{d} {row['domains'][d]['perplexity']:.2f} (x{r:.3f})" for d, r in ratios.items())
    special = row.get("specialisation")
    more = f"  layers at 2x {special['layers_at_2x']}, at 3x {special['layers_at_3x']}" if special else ""
    print(f"{name:<32} x{mean:.3f}  {cells}{more}", flush=True)


if __name__ == "__main__":
    main()
