"""Let the dense teacher write the chat corpus (and general text, domain "web") on a GPU.

Half of the chats answer prompts of corpora.py; for the other half the teacher writes the question too. General text
starts from an end-of-text token. Writes chat.train.npy, chat.held.npy and web.train.npy (uint16 tokens) to the corpora.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from common import END_OF_TEXT, SEED, Weights, read_dense, save_tokenizer
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
USER, ASSISTANT, END = "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>"
HELD_OUT_TOKENS = 30_000
CHAT_TEMPERATURE = 0.8
WEB_TEMPERATURE = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--corpora", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=2048, help="texts written at once")
    parser.add_argument("--chats", type=int, default=3, help="batches of answers, and again of whole chats")
    parser.add_argument("--web", type=int, default=3, help="batches of general text")
    parser.add_argument(
        "--seed", type=int, default=SEED, help="another seed adds chat.train.SEED.npy, no held-out part"
    )
    parser.add_argument("--first-prompt", type=int, default=0, help="skip prompts that an earlier run has answered")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no more batches of chats after this time")
    parser.add_argument("--tokens", type=int, default=256, help="longest text, in new tokens")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    save_tokenizer(args.gguf, args.corpora)
    tokenizer = Tokenizer.from_file(str(args.corpora / "tokenizer.json"))
    model = llama(args.gguf)
    end = tokenizer.token_to_id(END)
    if args.chats:
        write_chats(args, model, tokenizer, end)
    if args.web:
        write_web(args, model, tokenizer)


def write_chats(args, model, tokenizer: Tokenizer, end: int) -> None:
    prompts = (args.corpora / "prompts.txt").read_text().splitlines()[args.first_prompt :]
    start = time.time()
    chats: list[np.ndarray] = []
    for i in range(args.chats):
        asked = [SYSTEM + USER + p + END + "\n" + ASSISTANT for p in prompts[i * args.batch : (i + 1) * args.batch]]
        if asked:
            chats += _cut(write(model, tokenizer, asked, args.tokens, CHAT_TEMPERATURE, end), end, 3)
        whole = [SYSTEM + USER] * args.batch
        chats += _cut(write(model, tokenizer, whole, args.tokens, CHAT_TEMPERATURE, None), end, 3)
        print(f"{len(chats)} chats, {time.time() - start:.0f} s", flush=True)
        if time.time() - start > args.seconds:
            break
    rng = np.random.default_rng(args.seed)
    texts = [chats[i] for i in rng.permutation(len(chats))]
    sizes = np.cumsum([len(t) for t in texts])
    if args.seed != SEED:
        np.save(args.corpora / f"chat.train.{args.seed}.npy", np.concatenate(texts))
        print(f"{sizes[-1]} more tokens in {len(texts)} chats", flush=True)
        return
    first = int(np.searchsorted(sizes, HELD_OUT_TOKENS)) + 1
    np.save(args.corpora / "chat.held.npy", np.concatenate(texts[:first]))
    np.save(args.corpora / "chat.train.npy", np.concatenate(texts[first:]))
    held = [tokenizer.decode(t[1:].tolist(), skip_special_tokens=False) for t in texts[:first]]
    (args.corpora / "chat.held.txt").write_text("\0".join(held))
    print(f"chat: {sizes[-1]} tokens in {len(texts)} chats", *held[:6], sep="\n---\n", flush=True)


def write_web(args, model, tokenizer: Tokenizer) -> None:
    web: list[np.ndarray] = []
    for _ in range(args.web):
        web += _cut(write(model, tokenizer, ["<|endoftext|>"] * args.batch, args.tokens, WEB_TEMPERATURE, None), 0, 2)
    np.save(args.corpora / "web.train.npy", np.concatenate(web))
    shown = [tokenizer.decode(t[1:300].tolist()) for t in web[:2]]
    print(f"web: {sum(map(len, web))} tokens in {len(web)} texts", *shown, sep="\n---\n", flush=True)


def llama(gguf: Path) -> LlamaForCausalLM:
    shape, weights = read_dense(gguf)
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.width,
        intermediate_size=shape.neurons,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        rms_norm_eps=shape.eps,
        rope_theta=shape.theta,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    model.load_state_dict(_named(weights, shape.num_layers), strict=False)
    model.tie_weights()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return model.to(device, torch.bfloat16 if device == "cuda" else torch.float32).eval()


def _named(weights: Weights, num_layers: int) -> Weights:
    names = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    names |= {p: f"self_attn.{p}_proj" for p in ("q", "k", "v", "o")} | {
        p: f"mlp.{p}_proj" for p in ("gate", "up", "down")
    }
    out = {"model.embed_tokens.weight": weights["embed"], "model.norm.weight": weights["norm"]}
    for i in range(num_layers):
        out |= {f"model.layers.{i}.{theirs}.weight": weights[f"{i}.{ours}"] for ours, theirs in names.items()}
    return out


@torch.inference_mode()
def write(model, tokenizer: Tokenizer, starts: list[str], tokens: int, temperature: float, end: int | None):
    """Sampled continuations with their starts, as rows of token ids padded on both sides with END_OF_TEXT."""
    ids = [e.ids for e in tokenizer.encode_batch(starts, add_special_tokens=False)]
    longest = max(map(len, ids))
    padded = torch.full((len(ids), longest), END_OF_TEXT)
    mask = torch.zeros_like(padded)
    for row, m, one in zip(padded, mask, ids, strict=True):
        row[longest - len(one) :] = torch.tensor(one)
        m[longest - len(one) :] = 1
    out = model.generate(
        padded.to(model.device), attention_mask=mask.to(model.device), do_sample=True, temperature=temperature, top_k=0,
        top_p=1.0, max_new_tokens=tokens, eos_token_id=end, pad_token_id=END_OF_TEXT,
    )  # fmt: skip
    return [row[longest - len(one) :] for row, one in zip(out.cpu().numpy(), ids, strict=True)]


def _cut(rows, end: int, occurrence: int) -> list[np.ndarray]:
    """Rows up to the occurrence-th end token, that one included; rows too short to be of use are dropped."""
    kept = []
    for row in rows:
        places = np.flatnonzero(row == end)
        if len(places) >= occurrence:
            row = row[: places[occurrence - 1] + (end != END_OF_TEXT)]
        if len(places) >= occurrence - 1 and len(row) > 48:
            kept.append(np.concatenate(([END_OF_TEXT], row)).astype(np.uint16) if end else row.astype(np.uint16))
    return kept


if __name__ == "__main__":
    main()
