"""Prompts of a wanted number of tokens for a server whose tokenizer is not at hand: words, whose tokens the server
counts once."""

from __future__ import annotations

import random
from dataclasses import dataclass

from moestro.bench.arrivals import MOONCAKE_BLOCK_TOKENS, Arrival

# Short words that common tokenizers have as one token each, so that counts come out nearly right.
_WORD_LIST = """
    the of and to in is for on that with as was it by be at from are this or an have not but they we one all
    can had her when there use how each which their time will way about many then them write would like so
    these long make thing see him two has look more day could go come did number sound no most people my over
    know water than call first who may down side been now find any new work part take get place made live
    where after back little only round man year came show every good me give our under name very through just
    form great think say help low line
"""
_WORDS = _WORD_LIST.split()


@dataclass(frozen=True)
class PromptMaker:
    """tokens_a_word, extra_tokens: of the server's tokenizer, as `calibrated` found them. block_scale: how much shorter
    a trace's shared blocks are than in the trace.
    """

    seed: int
    tokens_a_word: float = 1.0
    extra_tokens: float = 0.0
    block_scale: float = 1.0

    def prompt(self, number: int, arrival: Arrival) -> str:
        """The text of request `number`: the same for the same seed, and its beginning shared where blocks are."""
        num_words = max(1, round((arrival.prompt_tokens - self.extra_tokens) / self.tokens_a_word))
        if arrival.blocks is None:
            return self._words(f"{self.seed}-{number}", num_words)
        block_words = max(1, round(MOONCAKE_BLOCK_TOKENS * self.block_scale / self.tokens_a_word))
        text: list[str] = []
        for block in arrival.blocks:
            text.append(
                self._words(f"{self.seed}-block-{block}", min(block_words, num_words - len(text) * block_words))
            )
            if len(text) * block_words >= num_words:
                break
        return " ".join(text)

    @staticmethod
    def _words(key: str, count: int) -> str:
        return " ".join(random.Random(key).choices(_WORDS, k=max(1, count)))


def calibrated(maker: PromptMaker, short: tuple[int, int], long: tuple[int, int]) -> PromptMaker:
    """The maker with the server's own counts: (words, tokens) of two prompts."""
    words, tokens = long[0] - short[0], long[1] - short[1]
    slope = max(tokens / words, 0.1) if words else 1.0
    return PromptMaker(maker.seed, slope, max(0.0, short[1] - short[0] * slope), maker.block_scale)
