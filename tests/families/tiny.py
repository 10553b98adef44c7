"""Small random checkpoints of every family, made by transformers: the usual shapes and the odd ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 263  # a prime: no tile size divides it


@dataclass(frozen=True)
class Case:
    """One checkpoint: family, a name that says what is odd about it, and what differs from the family's base."""

    family: str
    name: str
    changes: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.family}-{self.name}"


_GQA = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MLA = {
    "first_k_dense_replace": 1,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}

BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": (
        "Mixtral",
        _GQA | {"intermediate_size": 48, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        _GQA
        | {
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 80,
            "num_experts": 8,
            "num_experts_per_tok": 4,
            "norm_topk_prob": False,
        },
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        _GQA
        | {
            "head_dim": 24,
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
    ),
    "olmoe": (
        "Olmoe",
        _GQA | {"intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": False},
    ),
    "deepseek_v2": (
        "DeepseekV2",
        _GQA | _MLA | {"norm_topk_prob": False, "routed_scaling_factor": 1.0, "topk_method": "greedy"},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        _GQA | _MLA | {"norm_topk_prob": True, "routed_scaling_factor": 2.5},
    ),
    "gpt_oss": (
        "GptOss",
        _GQA
        | {
            "head_dim": 16,
            "intermediate_size": 48,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": 32,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 8.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        _GQA
        | {
            "head_dim": 32,
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
            "partial_rotary_factor": 0.5,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
    "granitemoe": (
        "GraniteMoe",
        _GQA
        | {
            "intermediate_size": 48,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.0625,
            "residual_multiplier": 0.22,
            "logits_scaling": 6.0,
        },
    ),
    "phimoe": (
        "Phimoe",
        _GQA
        | {
            "intermediate_size": 48,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "attention_bias": True,
            "lm_head_bias": True,
            "sliding_window": None,
        },
    ),
}

_EXPERTS = {
    "mixtral": "num_local_experts",
    "granitemoe": "num_local_experts",
    "phimoe": "num_local_experts",
    "gpt_oss": "num_local_experts",
    "qwen2_moe": "num_experts",
    "qwen3_moe": "num_experts",
    "olmoe": "num_experts",
    "deepseek_v2": "n_routed_experts",
    "deepseek_v3": "n_routed_experts",
    "glm4_moe": "n_routed_experts",
}


def _odd(family: str) -> list[Case]:
    """The shapes of which each has broken an engine somewhere."""
    mla = family.startswith("deepseek")
    top_k = 2 if family == "phimoe" else 3
    cases = [
        Case(family, "six-experts", {_EXPERTS[family]: 6, "num_experts_per_tok": top_k}),
        Case(family, "tied-head", {"tie_word_embeddings": True}),
        Case(family, "one-layer", {"num_hidden_layers": 1} | ({"first_k_dense_replace": 0} if mla else {})),
    ]
    if family == "glm4_moe":
        cases[-1] = Case(family, "one-layer", {"num_hidden_layers": 1, "first_k_dense_replace": 0})
    if mla:
        cases.append(
            Case(family, "odd-width", {"hidden_size": 72, "moe_intermediate_size": 20, "intermediate_size": 84})
        )
        return cases
    odd_width = {"hidden_size": 72, "num_attention_heads": 6, "num_key_value_heads": 6, "intermediate_size": 36}
    return [
        *cases,
        Case(family, "three-heads-a-kv-head", {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96}),
        Case(family, "one-kv-head", {"num_key_value_heads": 1}),
        Case(family, "odd-width", odd_width),
    ]


_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.0 + 0.9 * i for i in range(8)],
    "short_mscale": 1.1,
    "long_mscale": 1.3,
    "original_max_position_embeddings": 128,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}
_MSCALE = _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707, "beta_fast": 32, "beta_slow": 1}

SPECIAL = [
    Case("mixtral", "window", {"sliding_window": 24}),
    Case("mixtral", "llama3-rope", {"rope_parameters": _LLAMA3}),
    Case("mixtral", "linear-rope", {"rope_parameters": _LINEAR}),
    Case("mixtral", "top-all", {"num_experts_per_tok": 8}),
    Case("qwen2_moe", "interleaved-dense", {"decoder_sparse_step": 2, "num_hidden_layers": 4}),
    Case("qwen2_moe", "mlp-only", {"mlp_only_layers": [1], "norm_topk_prob": True}),
    Case("qwen2_moe", "window-above", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    Case("qwen3_moe", "interleaved-dense", {"decoder_sparse_step": 2, "mlp_only_layers": [3], "num_hidden_layers": 5}),
    Case("qwen3_moe", "yarn", {"rope_parameters": _YARN}),
    Case("qwen3_moe", "bias-no-norm", {"attention_bias": True, "norm_topk_prob": False}),
    Case("olmoe", "clipped", {"clip_qkv": 0.3, "norm_topk_prob": True}),
    Case("deepseek_v2", "other-norm-eps", {"rms_norm_eps": 1e-2}),
    Case("deepseek_v2", "lite", {"q_lora_rank": None, "n_shared_experts": 2, "rope_parameters": _MSCALE}),
    Case(
        "deepseek_v2",
        "groups",
        {
            "n_routed_experts": 12,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 16.0,
        },
    ),
    Case("deepseek_v3", "groups", {"n_routed_experts": 12, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}),
    Case("deepseek_v3", "yarn-all-dim", {"rope_parameters": _MSCALE | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
    Case("deepseek_v3", "half-pairs", {"rope_interleave": False, "norm_topk_prob": False}),
    Case("gpt_oss", "all-global", {"layer_types": ["full_attention"] * 3}),
    Case("glm4_moe", "groups-no-norm", {"n_group": 2, "topk_group": 1, "use_qk_norm": False, "attention_bias": False}),
    Case("granitemoe", "biased", {"attention_bias": True}),
    Case("phimoe", "longrope-within", {"rope_parameters": _LONG | {"original_max_position_embeddings": 512}}),
    Case("phimoe", "longrope-beyond", {"rope_parameters": _LONG}),
    Case("phimoe", "window", {"sliding_window": 24, "attention_bias": False, "lm_head_bias": False}),
]

CASES = [
    case
    for family in BASES
    for case in (Case(family, "plain"), *_odd(family), *(c for c in SPECIAL if c.family == family))
]


def make_model(case: Case) -> torch.nn.Module:
    """A random transformers model in float32. Weights are large enough that routing and attention are far from
    uniform.
    """
    prefix, base = BASES[case.family]
    config = getattr(transformers, f"{prefix}Config")(**(base | case.changes))
    torch.manual_seed(1)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval().float()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point() and "inv_freq" not in name:
                spread = 0.3 if tensor.dim() == 1 else 0.12
                centre = 1.0 if name.endswith("norm.weight") else 0.0
                tensor.copy_(centre + spread * torch.randn(tensor.shape, generator=generator))
    if case.name == "longrope-beyond":
        _use_long_frequencies(model)
    return model


def _use_long_frequencies(model: torch.nn.Module) -> None:
    """transformers 5.24 passes no sequence length when it makes Phi-3.5-MoE's frequencies, so that long sequences get
    the short set beside the long mscale. The model's own code, and transformers 4, use the long set; so does this
    reference then.
    """
    rotary = model.model.rotary_emb
    make, length = rotary.rope_init_fn, {}
    rotary.register_forward_pre_hook(
        lambda _module, args, kwargs: length.update(seq=int(kwargs.get("position_ids", args[-1]).max()) + 1),
        with_kwargs=True,
    )
    rotary.rope_init_fn = lambda config: make(config, seq_len=length.get("seq"))


def save(case: Case, folder: Path) -> torch.nn.Module:
    model = make_model(case)
    model.save_pretrained(folder)
    return model
