"""Small random checkpoints of every family, in the names and layouts of the released ones.

They serve tests, benchmarks and trials where no real weights are at hand. Writing holds one tensor in memory at a time.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch

from moestro.checkpoint.index import DTYPE_BITS, INDEX_NAME, SINGLE_NAME
from moestro.errors import SettingError
from moestro.spec.names import Source, source_shape
from moestro.spec.registry import names_of, read_spec
from moestro.spec.tensors import TensorSpec, model_tensors

Dtype = Literal["float32", "bfloat16", "float16"]
_CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


@dataclass(frozen=True)
class _Planned:
    name: str
    tensor: TensorSpec
    source: Source
    code: str

    @property
    def shape(self) -> tuple[int, ...]:
        return source_shape(self.source, self.tensor)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPE_BITS[self.code] // 8


def write_checkpoint(
    config: Mapping[str, Any],
    folder: str | Path,
    seed: int = 0,
    dtype: Dtype = "float32",
    shards: int = 1,
) -> Path:
    """Write config.json and safetensors of a random model of this config.

    dtype: of all tensors but the selection bias, which is float32 as in released checkpoints. shards: into how many
    files. The same seed gives the same values, whatever the shards. Returns the folder, made when it is not there.
    """
    if dtype not in _CODES:
        raise SettingError(f"dtype={dtype!r} is not one of {', '.join(_CODES)}")
    spec = read_spec(config)
    names = names_of(spec)
    planned = [
        _Planned(name, tensor, source, "F32" if target.endswith("selection_bias") else _CODES[dtype])
        for target, tensor in model_tensors(spec).items()
        for name, source in names.published(target, tensor)
    ]
    if not 1 <= shards <= len(planned):
        raise SettingError(f"shards={shards} must lie in 1..{len(planned)}, the number of tensors")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, "dtype": dtype}, indent=2) + "\n", encoding="utf-8")
    if shards == 1:
        _write_file(folder / SINGLE_NAME, planned, seed)
        return folder
    weight_map: dict[str, str] = {}
    for number, group in enumerate(_split(planned, shards), 1):
        file = f"model-{number:05}-of-{shards:05}.safetensors"
        _write_file(folder / file, group, seed)
        weight_map |= {item.name: file for item in group}
    index = {"metadata": {"total_size": sum(item.nbytes for item in planned)}, "weight_map": weight_map}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return folder


def _split(planned: list[_Planned], shards: int) -> Iterator[list[_Planned]]:
    """Runs of tensors of about the same number; borders fall where they fall, inside experts too (C23)."""
    for i in range(shards):
        yield planned[i * len(planned) // shards : (i + 1) * len(planned) // shards]


def _write_file(path: Path, planned: list[_Planned], seed: int) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for item in planned:
        header[item.name] = {
            "dtype": item.code,
            "shape": list(item.shape),
            "data_offsets": [offset, offset + item.nbytes],
        }
        offset += item.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for item in planned:
            file.write(_values(item, seed).reshape(-1).view(torch.uint8).numpy().data)


def _values(item: _Planned, seed: int) -> torch.Tensor:
    """Values under which every part of the model shows in the logits: norms near one, biases and sinks that count."""
    # torch's generator on the CPU uses 32 bits of a seed.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {item.name}".encode()))
    noise = torch.randn(item.shape, generator=generator)
    if item.tensor.role == "norm" and item.name.endswith("weight"):
        values = 1 + 0.2 * noise
    elif len(item.tensor.shape) == 1 or item.name.endswith("bias"):
        values = 0.3 * noise
    else:
        values = noise * item.tensor.shape[-1] ** -0.5
    return values.to(getattr(torch, {v: k for k, v in _CODES.items()}[item.code]))


_SMALL = {"vocab_size": 320, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
_GQA = {**_SMALL, "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-5}
_MLA = {
    **_SMALL,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "first_k_dense_replace": 1,
    "intermediate_size": 80,
    "moe_intermediate_size": 28,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_routed_experts": 12,
    "n_group": 4,
    "topk_group": 2,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32, "beta_slow": 1, "type": "yarn"}

# The sizes of a family all differ, so that a swapped dimension does not pass; each has its family's peculiarities.
TINY: dict[str, dict[str, Any]] = {
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        **_GQA,
        "intermediate_size": 56,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "rope_theta": 1e6,
        "sliding_window": 6,
        "tie_word_embeddings": False,
    },
    "qwen2_moe": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        **_GQA,
        "intermediate_size": 80,
        "moe_intermediate_size": 28,
        "shared_expert_intermediate_size": 36,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **_GQA,
        "head_dim": 16,
        "intermediate_size": 80,
        "moe_intermediate_size": 28,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [],
        "attention_bias": False,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    },
    "olmoe": {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        **_GQA,
        "intermediate_size": 28,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "norm_topk_prob": False,
        "attention_bias": False,
        "clip_qkv": 0.8,
        "rope_theta": 10000.0,
        "eos_token_id": 2,
        "pad_token_id": 1,
        "tie_word_embeddings": False,
    },
    "deepseek_v2": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        **_MLA,
        "q_lora_rank": None,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.5,
        "scoring_func": "softmax",
        "topk_method": "group_limited_greedy",
        "rope_theta": 10000,
        "rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        "tie_word_embeddings": False,
    },
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **_MLA,
        "q_lora_rank": 24,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "rope_theta": 10000,
        "rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        **_GQA,
        "head_dim": 16,
        "intermediate_size": 28,
        "num_local_experts": 7,
        "num_experts_per_tok": 3,
        "attention_bias": True,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 6,
        "swiglu_limit": 7.0,
        "rope_theta": 150000,
        "rope_scaling": {**_YARN, "truncate": False},
        "tie_word_embeddings": False,
    },
    "glm4_moe": {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        **_GQA,
        "head_dim": 16,
        "first_k_dense_replace": 1,
        "intermediate_size": 80,
        "moe_intermediate_size": 28,
        "n_routed_experts": 7,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "use_qk_norm": True,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "rope_theta": 1000000,
        "num_nextn_predict_layers": 0,
        "eos_token_id": [2, 3, 5],
        "tie_word_embeddings": False,
    },
    "granitemoe": {
        "architectures": ["GraniteMoeForCausalLM"],
        "model_type": "granitemoe",
        **_GQA,
        "intermediate_size": 28,
        "num_local_experts": 7,
        "num_experts_per_tok": 3,
        "attention_multiplier": 0.25,
        "embedding_multiplier": 12,
        "residual_multiplier": 0.22,
        "logits_scaling": 6.0,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    },
    "phimoe": {
        "architectures": ["PhimoeForCausalLM"],
        "model_type": "phimoe",
        **_GQA,
        "intermediate_size": 56,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "attention_bias": True,
        "lm_head_bias": True,
        "router_jitter_noise": 0.01,
        "sliding_window": 6,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 64,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.1, 1.2, 1.4, 1.7, 2.0],
            "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 8.0],
            "short_mscale": 1.05,
            "long_mscale": 1.2,
            "original_max_position_embeddings": 64,
        },
        "tie_word_embeddings": False,
    },
}
