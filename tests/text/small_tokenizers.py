"""Small tokenizers of the three kinds in use, built in memory."""

from __future__ import annotations

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from moestro.text.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "naïve café 中文 한국어 😀🎉 text",
    "  two  spaces\n\nlines\t",
]
SPECIAL = ["<s>", "</s>", "<|user|>"]


def byte_level() -> Tokenizer:
    """As GPT-2, Qwen, DeepSeek-V3 and gpt-oss have it: 256 byte tokens and merges."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("中文 added", special=False)])
    return Tokenizer(backend, {"eos_token": {"content": "</s>"}, "bos_token": "<s>"})


def byte_fallback() -> Tokenizer:
    """As Llama-2, Mixtral and Phi-3 have it: ▁ for spaces, <0x..> tokens for what the vocabulary lacks."""
    pieces = [
        *SPECIAL,
        *(f"<0x{b:02X}>" for b in range(256)),
        "▁",
        "▁a",
        "a",
        "b",
        "The",
        "▁fox",
        "own",
        "▁br",
        "é",
        "中",
        "🎉",
        "  x",
        "�",
    ]
    backend = Backend(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True, fuse_unk=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(SPECIAL)
    return Tokenizer(backend)


def metaspace() -> Tokenizer:
    """As T5 has it: ▁ for spaces, no bytes."""
    pieces = [*SPECIAL, "▁", "▁▁", "▁a", "a", "b", "▁fox", "own", "é", "中", "🎉", "x▁y"]
    backend = Backend(models.Unigram([(p, -1.0) for p in pieces], unk_id=0))
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    backend.add_special_tokens(SPECIAL)
    return Tokenizer(backend)


def word_piece() -> Tokenizer:
    pieces = ["[UNK]", "fox", "##es", "##es2", ".", "n", "'", "t", "中"]
    backend = Backend(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    return Tokenizer(backend)


TOKENIZERS = {
    "byte_level": byte_level(),
    "byte_fallback": byte_fallback(),
    "metaspace": metaspace(),
    "word_piece": word_piece(),
}
