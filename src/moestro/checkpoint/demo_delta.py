"""The changes that turn the demo's dense base into a sparse Qwen2-MoE checkpoint, as the package carries them.

Beside each other lie changes.safetensors and manifest.json (base checksum, split, seed, commands, figures; written by
tools/demo_model). A layer's FFN neurons are put in a new order: those of the shared expert first, then the experts one
after another. Every matrix then gets a change of a few bits a value, in groups of GROUP values along a row that share a
bfloat16 scale: value = scale * (code - (2**bits - 1) / 2). Eight codes lie in `bits` bytes, lowest bits first. Routers,
shared gates and norms are stored as they are.

L layers, D width, F neurons, E experts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from moestro.errors import CheckpointError

GROUP = 64
ATTENTION = ("q", "k", "v", "o")
FFN = ("gate", "up", "down")
CHANGED = (*ATTENTION, *FFN)
FORMAT = 1
FOLDER = Path(__file__).parent.parent / "data" / "demo"
_DTYPE = torch.bfloat16


class Dense(Protocol):
    """The base, by the names of Hugging Face's Llama checkpoints."""

    def tensor(self, name: str) -> torch.Tensor: ...


@dataclass(frozen=True)
class Delta:
    """A read file of changes with its manifest."""

    manifest: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    @property
    def split(self) -> dict[str, int]:
        split: dict[str, int] = self.manifest["split"]
        return split

    def change(self, part: str, layer: int) -> torch.Tensor:
        """What is added to a matrix of one layer, in float32, its neurons in the new order."""
        bits = self.manifest["bits"]
        return unpack_change(self.tensors[f"{part}.codes"][layer], self.tensors[f"{part}.scales"][layer], bits)


def read_delta(folder: Path = FOLDER) -> Delta:
    """The changes in a folder, by default the package's own. Raises CheckpointError when they are absent or damaged."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        tensors = load_file(folder / "changes.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"the demo model's changes in {folder} cannot be read: {error}") from None
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{folder / 'manifest.json'} has format {manifest.get('format')}; {FORMAT} is read")
    return Delta(manifest, tensors)


def check_base(delta: Delta, sha256: str, name: str) -> None:
    """Raises CheckpointError when the changes were made for a base of another checksum."""
    expected = delta.manifest["base"]["sha256"]
    if sha256 != expected:
        raise CheckpointError(
            f"the demo model's changes fit {delta.manifest['base']['name']} with SHA-256 {expected}, and {name} has "
            f"{sha256}; unset MOESTRO_DEMO_GGUF to download the right one, or use demo-dense, which takes any base"
        )


def unpack_change(codes: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor:
    """codes uint8 [rows, columns * bits / 8] and scales [rows, columns / GROUP] -> float32 [rows, columns]."""
    rows = codes.shape[0]
    parts = codes.view(rows, -1, bits)
    word = torch.zeros(parts.shape[:2], dtype=torch.int32 if bits < 4 else torch.int64)
    for j in range(bits):
        word |= parts[..., j].to(word.dtype) << (8 * j)
    level = torch.empty(*word.shape, 8)
    for i in range(8):
        level[..., i] = (word >> (bits * i)) & (2**bits - 1)
    centred: torch.Tensor = level.view(rows, -1, GROUP) - (2**bits - 1) / 2
    return centred.mul_(scales.float()[..., None]).view(rows, -1)


def sparse_tensors(base: Dense, delta: Delta) -> dict[str, torch.Tensor]:
    """All weights of the sparse model by Qwen2-MoE's names, bfloat16.

    The shared expert's down projection carries a factor 2 (its gate is a sigmoid that starts at a half), the experts' a
    factor E (the router's softmax runs over all experts).
    """
    t = delta.tensors
    tensors = {
        "model.embed_tokens.weight": base.tensor("model.embed_tokens.weight").to(_DTYPE),
        "model.norm.weight": t["norm"].to(_DTYPE),
    }
    for i in range(t["order"].shape[0]):
        layer = f"model.layers.{i}"
        tensors[f"{layer}.input_layernorm.weight"] = t["attn_norm"][i].to(_DTYPE)
        tensors[f"{layer}.post_attention_layernorm.weight"] = t["mlp_norm"][i].to(_DTYPE)
        for part in ATTENTION:
            name = f"{layer}.self_attn.{part}_proj.weight"
            tensors[name] = (_rounded(base, name) + delta.change(part, i)).to(_DTYPE)
        tensors |= _block(base, delta, i)
    return tensors


def _rounded(base: Dense, name: str) -> torch.Tensor:
    return base.tensor(name).to(_DTYPE).float()


def _block(base: Dense, delta: Delta, i: int) -> dict[str, torch.Tensor]:
    t, split = delta.tensors, delta.split
    order = t["order"][i].long()
    shared, count, size = split["shared"], split["num_experts"], split["expert_width"]
    name = f"model.layers.{i}.mlp"
    gate, up = (_rounded(base, f"{name}.{p}_proj.weight")[order] + delta.change(p, i) for p in ("gate", "up"))
    down = _rounded(base, f"{name}.down_proj.weight")[:, order] + delta.change("down", i)
    out = {
        f"{name}.gate.weight": t["router"][i].to(_DTYPE),
        f"{name}.shared_expert_gate.weight": t["shared_gate"][i][None].to(_DTYPE),
    }
    ranges = [("shared_expert", 0, shared, 2)]
    ranges += [(f"experts.{e}", shared + e * size, shared + (e + 1) * size, count) for e in range(count)]
    for owner, start, end, factor in ranges:
        out[f"{name}.{owner}.gate_proj.weight"] = gate[start:end].to(_DTYPE)
        out[f"{name}.{owner}.up_proj.weight"] = up[start:end].to(_DTYPE)
        out[f"{name}.{owner}.down_proj.weight"] = (down[:, start:end] * factor).to(_DTYPE).contiguous()
    return out


def sparse_config(dense: dict[str, Any], delta: Delta, origin: str) -> dict[str, Any]:
    """config.json of the sparse model, from the fields of the dense one."""
    split = delta.split
    same = (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_theta",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    )
    return {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        **{key: dense[key] for key in same},
        "intermediate_size": dense["intermediate_size"],
        "num_experts": split["num_experts"],
        "num_experts_per_tok": split["top_k"],
        "moe_intermediate_size": split["expert_width"],
        "shared_expert_intermediate_size": split["shared"],
        "norm_topk_prob": False,
        "qkv_bias": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "_name_or_path": origin,
    }
