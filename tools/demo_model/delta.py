"""Write the changes that moestro ships: what moestro.checkpoint.demo_delta reads."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from common import Split, Weights
from safetensors.torch import save_file

from moestro.checkpoint.demo_delta import CHANGED, FORMAT, GROUP

# Step of the uniform quantiser with the least squared error for a normal distribution of deviation 1 (Max, 1960).
STEP = {2: 0.9957, 3: 0.5860, 4: 0.3352}


def rounded_names(num_layers: int) -> list[str]:
    return [f"{i}.{part}" for i in range(num_layers) for part in CHANGED]


def codes_of(change: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes [rows, groups, GROUP] as float, scales [rows, groups] in bfloat16) of a change [rows, columns]."""
    groups = change.unflatten(1, (-1, GROUP))
    scales = (STEP[bits] * groups.pow(2).mean(dim=2).sqrt()).clamp(min=1e-9).bfloat16()
    top = 2**bits - 1
    codes = (groups / scales.float()[..., None] + top / 2).round().clamp(0, top)
    return codes, scales


def round_change(weight: torch.Tensor, base: torch.Tensor, bits: int) -> torch.Tensor:
    """base plus the rounded change; the gradient passes through as if nothing had been rounded."""
    with torch.no_grad():
        codes, scales = codes_of(weight - base, bits)
        value = (codes - (2**bits - 1) / 2) * scales.float()[..., None]
        correction = base + value.flatten(1) - weight
    return weight + correction


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [rows, groups, GROUP] -> uint8 [rows, columns * bits / 8]."""
    eights = codes.long().flatten(1).unflatten(1, (-1, 8))
    word = sum(eights[..., i] << (bits * i) for i in range(8))
    return torch.stack([(word >> (8 * j)) & 255 for j in range(bits)], dim=-1).byte().flatten(1)


def write_delta(folder: Path, weights: Weights, base: Weights, order_LF, split: Split, bits: int, facts: dict) -> int:
    """Write changes.safetensors and manifest.json; returns the bytes of the first. facts: more for the manifest."""
    num_layers = len(order_LF)
    tensors = {
        "order": order_LF.short(),
        "norm": weights["norm"].bfloat16(),
        **{
            name: torch.stack([weights[f"{i}.{name}"] for i in range(num_layers)]).bfloat16()
            for name in ("attn_norm", "mlp_norm", "router", "shared_gate")
        },
    }
    for part in CHANGED:
        made = [codes_of(weights[f"{i}.{part}"] - base[f"{i}.{part}"], bits) for i in range(num_layers)]
        tensors[f"{part}.codes"] = torch.stack([pack(codes, bits) for codes, _ in made])
        tensors[f"{part}.scales"] = torch.stack([scales for _, scales in made])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "changes.safetensors"
    save_file({k: v.contiguous().cpu() for k, v in tensors.items()}, path)
    manifest = {
        "format": FORMAT,
        "bits": bits,
        "split": {
            "shared": split.shared,
            "num_experts": split.num_experts,
            "expert_width": split.expert_width,
            "top_k": split.top_k,
        },
        "changes_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        **facts,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return path.stat().st_size


def shipped_weights(weights: Weights, base: Weights, num_layers: int, bits: int) -> Weights:
    """The weights as they come back from the shipped file, bfloat16 rounding included (factors of 2 aside)."""
    out = {name: w.bfloat16().float() for name, w in weights.items()}
    for name in rounded_names(num_layers):
        out[name] = round_change(weights[name], base[name], bits).bfloat16().float()
    return out
