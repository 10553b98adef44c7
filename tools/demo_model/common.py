"""What the scripts of the demo model share: the model in PyTorch, the text, the held-out loss.

One model serves as dense teacher and sparse student. A sparse FFN keeps the dense one's neurons in the order of the
split (shared expert first, then the experts one after another) and multiplies each hidden value by its expert's
weight, which is 0 where the expert was not chosen: Qwen2-MoE's function at the cost of the dense FFN. The exported
weights carry the constant factors (2 for the shared expert's sigmoid at 0, E for the softmax over all experts).

T tokens, B rows, D width, F neurons, E experts, N neurons an expert, S neurons of the shared expert, L layers, V words.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as nn

from moestro.checkpoint.demo import GGUFSource
from moestro.checkpoint.gguf import GGUFFile

DOMAINS = ("prose", "manuals", "code", "dictionary", "chinese", "arithmetic", "chat")
SEED = 7
ROW_TOKENS = 1024
END_OF_TEXT = 0
ATTENTION = ("q", "k", "v", "o")
FFN = ("gate", "up", "down")


@dataclass(frozen=True)
class Shape:
    """Sizes of the dense model."""

    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    neurons: int
    vocab_size: int
    eps: float
    theta: float

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads


@dataclass(frozen=True)
class Split:
    """How a layer's neurons are split: shared + num_experts * expert_width of them, top_k experts a token."""

    shared: int
    num_experts: int
    expert_width: int
    top_k: int

    @property
    def neurons(self) -> int:
        return self.shared + self.num_experts * self.expert_width

    @property
    def active_share(self) -> float:
        return (self.shared + self.top_k * self.expert_width) / self.neurons

    @staticmethod
    def parse(text: str) -> Split:
        """From "S,E,N,K"."""
        return Split(*(int(x) for x in text.split(",")))


Weights = dict[str, torch.Tensor]


def read_dense(gguf: Path) -> tuple[Shape, Weights]:
    """The dense model, rounded to bfloat16 as `demo-dense` is, in float32."""
    source = GGUFSource(GGUFFile(gguf), gguf.name)
    c = source.config()
    shape = Shape(
        c["num_hidden_layers"],
        c["hidden_size"],
        c["num_attention_heads"],
        c["num_key_value_heads"],
        c["intermediate_size"],
        c["vocab_size"],
        c["rms_norm_eps"],
        c["rope_theta"],
    )

    def get(name: str) -> torch.Tensor:
        return source.tensor(name).bfloat16().float()

    weights = {"embed": get("model.embed_tokens.weight"), "norm": get("model.norm.weight")}
    for i in range(shape.num_layers):
        layer = f"model.layers.{i}"
        weights[f"{i}.attn_norm"] = get(f"{layer}.input_layernorm.weight")
        weights[f"{i}.mlp_norm"] = get(f"{layer}.post_attention_layernorm.weight")
        for part in ATTENTION:
            weights[f"{i}.{part}"] = get(f"{layer}.self_attn.{part}_proj.weight")
        for part in FFN:
            weights[f"{i}.{part}"] = get(f"{layer}.mlp.{part}_proj.weight")
    return shape, weights


def save_tokenizer(gguf: Path, folder: Path) -> None:
    GGUFSource(GGUFFile(gguf), gguf.name).write_tokenizer(folder)


def tiny_dense(shape: Shape, seed: int = SEED) -> Weights:
    """Random weights, for rehearsals."""
    g = torch.Generator().manual_seed(seed)

    def rand(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=g) * 0.05

    D, F, kv = shape.width, shape.neurons, shape.num_kv_heads * shape.head_dim
    weights = {"embed": rand(shape.vocab_size, D), "norm": torch.ones(D)}
    for i in range(shape.num_layers):
        sizes = {"q": (D, D), "k": (kv, D), "v": (kv, D), "o": (D, D), "gate": (F, D), "up": (F, D), "down": (D, F)}
        weights |= {f"{i}.{name}": rand(*size) for name, size in sizes.items()}
        weights |= {f"{i}.attn_norm": torch.ones(D), f"{i}.mlp_norm": torch.ones(D)}
    return weights


def permute_neurons(weights: Weights, order_LF: torch.Tensor) -> Weights:
    """The same dense function with each layer's neurons in another order."""
    out = dict(weights)
    for i, order in enumerate(order_LF):
        order = order.to(weights[f"{i}.gate"].device)
        out[f"{i}.gate"] = weights[f"{i}.gate"][order]
        out[f"{i}.up"] = weights[f"{i}.up"][order]
        out[f"{i}.down"] = weights[f"{i}.down"][:, order]
    return out


def rope_tables(shape: Shape, num_tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    half = shape.head_dim // 2
    frequency = shape.theta ** (-torch.arange(half, device=device, dtype=torch.float32) / half)
    angle = torch.arange(num_tokens, device=device, dtype=torch.float32)[:, None] * frequency
    return angle.cos(), angle.sin()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def attention(x: torch.Tensor, w: list[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor, shape: Shape):
    """Causal grouped-query attention of normed x [B, T, D]."""
    q, k, v, o = (m.to(x.dtype) for m in w)
    B, T, _ = x.shape
    q, k, v = ((x @ m.T).view(B, T, -1, shape.head_dim).transpose(1, 2) for m in (q, k, v))
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    y = nn.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return y.transpose(1, 2).reshape(B, T, -1) @ o.T


def route(x: torch.Tensor, router_ED: torch.Tensor, split: Split) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax probabilities [.., E] and the same with 0 for experts outside the top k; float32."""
    probs = torch.softmax(x.float() @ router_ED.float().T, dim=-1)
    top, ids = probs.topk(split.top_k, dim=-1)
    return probs, torch.zeros_like(probs).scatter(-1, ids, top)


def neuron_mask(x: torch.Tensor, chosen: torch.Tensor, shared_gate_D: torch.Tensor, split: Split) -> torch.Tensor:
    """What each hidden neuron is multiplied by, [.., F]; about 1 where it is active."""
    shared = 2 * torch.sigmoid(x.float() @ shared_gate_D.float()[:, None])
    routed = (chosen * split.num_experts).repeat_interleave(split.expert_width, dim=-1)
    return torch.cat((shared.expand(*shared.shape[:-1], split.shared), routed), dim=-1)


def sparse_ffn(x: torch.Tensor, w: list[torch.Tensor], split: Split) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(output, probabilities, chosen weights) of normed x."""
    gate, up, down, router, shared_gate = w
    probs, chosen = route(x, router, split)
    hidden = nn.silu(x @ gate.to(x.dtype).T) * (x @ up.to(x.dtype).T)
    hidden = hidden * neuron_mask(x, chosen, shared_gate, split).to(x.dtype)
    return hidden @ down.to(x.dtype).T, probs, chosen


def dense_ffn(x: torch.Tensor, w: list[torch.Tensor]) -> torch.Tensor:
    gate, up, down = (m.to(x.dtype) for m in w)
    return (nn.silu(x @ gate.T) * (x @ up.T)) @ down.T


def dense_layer(x, norms, attn, ffn, cos, sin, shape: Shape, dtype: torch.dtype):
    x = x + attention(rms_norm(x, norms[0], shape.eps).to(dtype), attn, cos, sin, shape).float()
    return x + dense_ffn(rms_norm(x, norms[1], shape.eps).to(dtype), ffn).float()


def sparse_layer(x, norms, attn, ffn, cos, sin, shape: Shape, split: Split, dtype: torch.dtype):
    """(x, load-balance loss, chosen weights [B, T, E]). The loss is 1 when the load is even (Switch Transformers)."""
    x = x + attention(rms_norm(x, norms[0], shape.eps).to(dtype), attn, cos, sin, shape).float()
    y, probs, chosen = sparse_ffn(rms_norm(x, norms[1], shape.eps).to(dtype), ffn, split)
    share = (chosen > 0).float().mean(dim=(0, 1)) / split.top_k
    balance = split.num_experts * (share * probs.mean(dim=(0, 1))).sum()
    return x + y.float(), balance, chosen


def layer_parts(weights: Weights, i: int, sparse: bool) -> tuple[list[torch.Tensor], ...]:
    norms = [weights[f"{i}.attn_norm"], weights[f"{i}.mlp_norm"]]
    attn = [weights[f"{i}.{p}"] for p in ATTENTION]
    ffn = [weights[f"{i}.{p}"] for p in (*FFN, *(("router", "shared_gate") if sparse else ()))]
    return norms, attn, ffn


class Runner:
    """Runs a model's weights over rows of tokens. compiled: one compiled layer serves all layers."""

    def __init__(self, shape: Shape, split: Split | None, device: torch.device, dtype: torch.dtype, compiled=False):
        self.shape, self.split, self.device, self.dtype = shape, split, device, dtype
        self.layer = sparse_layer if split else dense_layer
        if compiled:
            self.layer = torch.compile(self.layer, dynamic=False)
        self._tables: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def hidden(self, weights: Weights, ids_BT: torch.Tensor, seen=None) -> tuple[torch.Tensor, torch.Tensor]:
        """(final normed hidden states [B, T, D], mean balance loss). seen(layer, chosen): told what was chosen."""
        T = ids_BT.shape[1]
        if T not in self._tables:
            self._tables[T] = rope_tables(self.shape, T, self.device)
        cos, sin = self._tables[T]
        x = nn.embedding(ids_BT, weights["embed"]).float()
        balance = torch.zeros((), device=self.device)
        for i in range(self.shape.num_layers):
            parts = layer_parts(weights, i, self.split is not None)
            if self.split:
                x, one, chosen = self.layer(x, *parts, cos, sin, self.shape, self.split, self.dtype)
                balance = balance + one / self.shape.num_layers
                if seen is not None:
                    seen(i, chosen)
            else:
                x = self.layer(x, *parts, cos, sin, self.shape, self.dtype)
        return rms_norm(x, weights["norm"], self.shape.eps).to(self.dtype), balance


class Corpora:
    """Token streams by domain, from the files of corpora.py and chat.py.

    Tokenised once a file, kept beside it as .npy.
    """

    def __init__(self, folder: Path, tokenizer: Path, part: str, domains: tuple[str, ...]) -> None:
        self.streams = {d: self._stream(folder / f"{d}.{part}", tokenizer) for d in domains}

    @staticmethod
    def _stream(stem: Path, tokenizer: Path) -> np.ndarray:
        ready = stem.with_name(stem.name + ".npy")
        if not ready.is_file():
            np.save(ready, tokenise(stem.with_name(stem.name + ".txt").read_text(), tokenizer))
        # chat.py run again with other seeds adds files
        return np.concatenate([np.load(ready), *(np.load(p) for p in sorted(stem.parent.glob(stem.name + ".*.npy")))])

    def rows(self, rng: np.random.Generator, domain: str, num_rows: int, num_tokens: int) -> np.ndarray:
        stream = self.streams[domain]
        starts = rng.integers(0, len(stream) - num_tokens, num_rows)
        return np.stack([stream[s : s + num_tokens] for s in starts]).astype(np.int64)

    def windows(self, domain: str, num_tokens: int, most: int) -> np.ndarray:
        """Consecutive windows from the start of a stream, [windows, num_tokens]."""
        stream = self.streams[domain]
        count = min(most, len(stream)) // num_tokens
        return stream[: count * num_tokens].reshape(count, num_tokens).astype(np.int64)


def tokenise(text: str, tokenizer_file: Path) -> np.ndarray:
    """Documents separated by NUL as one stream, each with an end-of-text token in front."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    docs = text.split("\0")
    parts = []
    for start in range(0, len(docs), 512):
        for encoded in tokenizer.encode_batch_fast(docs[start : start + 512], add_special_tokens=False):
            parts += [np.array([END_OF_TEXT], np.uint16), np.array(encoded.ids, np.uint16)]
    return np.concatenate(parts)


@torch.no_grad()
def losses(runner: Runner, weights: Weights, ids_BT: torch.Tensor, seen=None, batch: int = 16) -> torch.Tensor:
    """Negative log-likelihood of every token but each row's first, [B, T - 1], float32."""
    out = []
    head = weights["embed"].to(runner.dtype)
    for rows in ids_BT.split(batch):
        hidden, _ = runner.hidden(weights, rows, seen)
        for h, row in zip(hidden, rows, strict=True):
            logits = (h[:-1] @ head.T).float()
            out.append(nn.cross_entropy(logits, row[1:], reduction="none"))
    return torch.stack(out)


def perplexities(runner: Runner, weights: Weights, held: Corpora, domains, most: int = 1 << 30, seen_by=None) -> dict:
    """Perplexity and tokens by domain. seen_by(domain) gives the observer of that domain's routing."""
    result = {}
    for domain in domains:
        rows = torch.from_numpy(held.windows(domain, ROW_TOKENS, most)).to(runner.device)
        nll = losses(runner, weights, rows, seen_by(domain) if seen_by else None)
        result[domain] = {"perplexity": math.exp(float(nll.mean())), "tokens": nll.numel()}
    return result


def specialisation(counts_LED: torch.Tensor, tokens_D: torch.Tensor) -> dict:
    """Of expert loads by domain [L, E, domains] and tokens by domain: each expert's share in its best domain over its
    share overall (every domain counting the same), and the layers with a ratio of 2 and of 3.
    """
    share_LED = counts_LED.double() / tokens_D.double()
    ratio_LE = share_LED.amax(dim=2) / share_LED.mean(dim=2).clamp(min=1e-9)
    best_L = ratio_LE.amax(dim=1)
    return {
        "best_ratio_by_layer": [round(float(r), 3) for r in best_L],
        "layers_at_2x": int((best_L >= 2).sum()),
        "layers_at_3x": int((best_L >= 3).sum()),
        "experts_at_2x": int((ratio_LE >= 2).sum()),
        "experts_at_3x": int((ratio_LE >= 3).sum()),
        "experts_unused": int((share_LED.mean(dim=2) < 1e-4).sum()),
    }


def evaluate(runner: Runner, weights: Weights, held: Corpora, domains, most: int = 1 << 30) -> dict:
    """Perplexities; for a sparse model the loads by domain and what they say of specialisation."""
    split = runner.split
    if split is None:
        return {"domains": perplexities(runner, weights, held, domains, most)}
    counts = torch.zeros(runner.shape.num_layers, split.num_experts, len(domains), device=runner.device)

    def observer(domain: str):
        column = domains.index(domain)

        def seen(layer: int, chosen: torch.Tensor) -> None:
            counts[layer, :, column] += (chosen > 0).float().sum(dim=(0, 1))

        return seen

    found = perplexities(runner, weights, held, domains, most, observer)
    tokens = torch.tensor([held.windows(d, ROW_TOKENS, most).size for d in domains], device=runner.device)
    share = (counts / tokens).cpu()
    return {
        "domains": found,
        "specialisation": specialisation(counts, tokens),
        "share": [[[round(float(x), 4) for x in e] for e in layer] for layer in share],
    }


def describe(shape: Shape, split: Split | None) -> str:
    return json.dumps({**asdict(shape), **(asdict(split) if split else {})})
