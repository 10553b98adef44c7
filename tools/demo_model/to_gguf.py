"""Write a Qwen2-MoE checkpoint, such as moestro's demo model, as a GGUF file that llama.cpp runs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import gguf
import torch
from safetensors import safe_open

LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
FLOAT32 = ("mlp.gate", "mlp.shared_expert_gate")
TYPES = {"f32": gguf.GGMLQuantizationType.F32, "bf16": gguf.GGMLQuantizationType.BF16}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder with config.json and model.safetensors")
    parser.add_argument("out", type=Path)
    parser.add_argument("--type", choices=TYPES, default="bf16", help="of matrices; norms and routers are float32")
    args = parser.parse_args()
    write(args.folder, args.out, TYPES[args.type])


def write(folder: Path, path: Path, kind: gguf.GGMLQuantizationType) -> None:
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "qwen2moe")
    add_sizes(writer, config)
    add_tokenizer(writer, config, json.loads((folder / "tokenizer.json").read_text()), folder)
    with safe_open(folder / "model.safetensors", framework="pt") as file:

        def add(name: str, tensor: torch.Tensor, exact: bool = False) -> None:
            values = tensor.float().contiguous().numpy()
            if exact or tensor.dim() == 1 or kind == gguf.GGMLQuantizationType.F32:
                writer.add_tensor(f"{name}.weight", values)
            else:
                writer.add_tensor(f"{name}.weight", gguf.quantize(values, kind), raw_dtype=kind)

        add("token_embd", file.get_tensor("model.embed_tokens.weight"))
        # llama.cpp asks this family for a head of its own, and for biases of q, k and v, which the model does not have.
        add("output", file.get_tensor("model.embed_tokens.weight"))
        add("output_norm", file.get_tensor("model.norm.weight"))
        for i in range(config["num_hidden_layers"]):
            layer = f"model.layers.{i}"
            for theirs, ours in LAYER.items():
                tensor = file.get_tensor(f"{layer}.{theirs}.weight")
                add(f"blk.{i}.{ours}", tensor[0] if theirs.endswith("expert_gate") else tensor, theirs in FLOAT32)
            for part in ("gate", "up", "down"):
                names = [f"{layer}.mlp.experts.{e}.{part}_proj.weight" for e in range(config["num_experts"])]
                add(f"blk.{i}.ffn_{part}_exps", torch.stack([file.get_tensor(n) for n in names]))
            for part, heads in (
                ("q", "num_attention_heads"),
                ("k", "num_key_value_heads"),
                ("v", "num_key_value_heads"),
            ):
                width = config[heads] * config["hidden_size"] // config["num_attention_heads"]
                writer.add_tensor(f"blk.{i}.attn_{part}.bias", torch.zeros(width).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_sizes(writer: gguf.GGUFWriter, config: dict) -> None:
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def add_tokenizer(writer: gguf.GGUFWriter, config: dict, tokenizer: dict, folder: Path) -> None:
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    special = {t["id"] for t in tokenizer["added_tokens"] if t["special"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i in special else 1 for i in range(len(tokens))])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(json.loads((folder / "tokenizer_config.json").read_text())["chat_template"])


if __name__ == "__main__":
    main()
