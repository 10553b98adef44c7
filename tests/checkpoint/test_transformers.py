"""Checkpoints that transformers saved, and ours that transformers loads: the same tensors in both directions."""

import copy
from pathlib import Path

import pytest
import torch

from moestro.checkpoint.assemble import load_tensors, plan_assembly
from moestro.checkpoint.index import read_index
from moestro.checkpoint.synth import TINY, write_checkpoint
from moestro.spec.registry import names_of, read_spec

transformers = pytest.importorskip("transformers")

Tensors = dict[str, torch.Tensor]


def load(folder: Path) -> Tensors:
    spec = read_spec(folder)
    return load_tensors(plan_assembly(spec, names_of(spec), read_index(folder)), torch.float32)


def experts(state: Tensors, layer: int, family: str) -> tuple[torch.Tensor, torch.Tensor]:
    """gate_up [E, 2F, D] and down [E, D, F] out of transformers' own modules."""
    block = "block_sparse_moe" if family == "granitemoe" else "mlp"
    gate_up, down = (state[f"model.layers.{layer}.{block}.experts.{n}_proj"] for n in ("gate_up", "down"))
    if family != "gpt_oss":
        return gate_up, down
    return torch.cat([gate_up[..., 0::2], gate_up[..., 1::2]], -1).transpose(1, 2), down.transpose(1, 2)


def check(ours: Tensors, state: Tensors, family: str) -> None:
    layer = 2 if family != "qwen3_moe" else 1  # a mixture in every tiny config
    gate_up, down = experts(state, layer, family)
    assert torch.equal(ours[f"layers.{layer}.moe.experts.gate_up.weight"], gate_up)
    assert torch.equal(ours[f"layers.{layer}.moe.experts.down.weight"], down)
    assert torch.equal(ours["embed.weight"], state["model.embed_tokens.weight"])
    if "head.weight" in ours:
        assert torch.equal(ours["head.weight"], state["lm_head.weight"])
    attention = f"model.layers.{layer}.self_attn."
    if family.startswith("deepseek"):
        assert torch.equal(ours[f"layers.{layer}.attn.kv_b.weight"], state[f"{attention}kv_b_proj.weight"])
        shared = f"model.layers.{layer}.mlp.shared_experts."
        stacked = torch.cat([state[f"{shared}{p}_proj.weight"] for p in ("gate", "up")])
        assert torch.equal(ours[f"layers.{layer}.moe.shared.gate_up.weight"], stacked)
    else:
        qkv = torch.cat([state[f"{attention}{p}_proj.weight"] for p in "qkv"])
        assert torch.equal(ours[f"layers.{layer}.attn.qkv.weight"], qkv)
    router = next(
        t for n, t in state.items() if f"layers.{layer}." in n and n.endswith(("gate.weight", "router.weight"))
    )
    assert torch.equal(ours[f"layers.{layer}.moe.router.weight"], router)
    norm = state[f"model.layers.{layer}.post_attention_layernorm.weight"]
    assert torch.equal(ours[f"layers.{layer}.mlp_norm.weight"], norm)
    assert sum(t.numel() for t in ours.values()) == sum(
        t.numel() for n, t in state.items() if n != "lm_head.weight" or "head.weight" in ours
    )


@pytest.mark.parametrize("family", TINY)
def test_saved_by_transformers(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**copy.deepcopy(TINY[family]))
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms are constants at first and would hide a mix-up
            parameter.add_(torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    check(load(tmp_path), model.state_dict(), family)


@pytest.mark.parametrize("family", TINY)
def test_loaded_by_transformers(family: str, tmp_path: Path) -> None:
    write_checkpoint(TINY[family], tmp_path, seed=3, shards=2)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    check(load(tmp_path), model.state_dict(), family)


def test_config_that_transformers_saved_describes_the_same_model(tmp_path: Path) -> None:
    """transformers rewrites the config: rope in its new form, fields of its own, aliases."""
    for family, raw in TINY.items():
        config = transformers.AutoConfig.for_model(**copy.deepcopy(raw))
        config.architectures = raw["architectures"]
        config.save_pretrained(tmp_path / family)
        ours, saved = read_spec(raw), read_spec(tmp_path / family)
        assert (saved.layers, saved.vocab_size, saved.tied_head) == (ours.layers, ours.vocab_size, ours.tied_head), (
            family
        )
