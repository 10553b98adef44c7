"""Writes the demo model as a bfloat16 GGUF file, so that llama.cpp can run the very same weights."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import torch
from safetensors import safe_open

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "block_sparse_moe.gate": "ffn_gate_inp",
}


def write_gguf(folder: Path, path: Path) -> None:
    """Mixtral layout: experts of a layer in one tensor, rows of q and k paired up, norms and router in float32."""
    config = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    num_layers, num_experts = config["num_hidden_layers"], config["num_local_experts"]
    heads = {"self_attn.q_proj": config["num_attention_heads"], "self_attn.k_proj": config["num_key_value_heads"]}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(num_layers)
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_expert_count(num_experts)
    writer.add_expert_used_count(config["num_experts_per_tok"])
    vocab = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])
    special = {t["id"] for t in tokenizer["added_tokens"] if t["special"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([token for token, _ in vocab])
    writer.add_token_types([3 if i in special else 1 for _, i in vocab])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)
    with safe_open(folder / "model.safetensors", framework="pt") as file:

        def add(name: str, tensor: torch.Tensor, exact: bool = False) -> None:
            if exact or tensor.dim() == 1:
                writer.add_tensor(name, tensor.float().numpy())
            else:
                bf16 = gguf.GGMLQuantizationType.BF16
                writer.add_tensor(name, gguf.quantize(tensor.float().numpy(), bf16), raw_dtype=bf16)

        add("token_embd.weight", file.get_tensor("model.embed_tokens.weight"))
        add("output_norm.weight", file.get_tensor("model.norm.weight"))
        for i in range(num_layers):
            for theirs, ours in _LAYER_NAMES.items():
                tensor = file.get_tensor(f"model.layers.{i}.{theirs}.weight")
                if theirs in heads:
                    shape = tensor.shape
                    tensor = tensor.view(heads[theirs], 2, -1, shape[1]).swapaxes(1, 2).reshape(shape)
                add(f"blk.{i}.{ours}.weight", tensor, exact=theirs.endswith(".gate"))
            for part, ours in (("w1", "ffn_gate_exps"), ("w3", "ffn_up_exps"), ("w2", "ffn_down_exps")):
                stem = f"model.layers.{i}.block_sparse_moe.experts"
                add(
                    f"blk.{i}.{ours}.weight",
                    torch.stack([file.get_tensor(f"{stem}.{e}.{part}.weight") for e in range(num_experts)]),
                )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
