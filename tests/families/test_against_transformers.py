"""Every family against transformers in float32: logits over 300 tokens, and 64 greedy tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moestro import LLM, SamplingParams
from moestro.spec.registry import FAMILIES
from tests.families.tiny import BASES, CASES, VOCAB, Case, save

NUM_TOKENS = 300  # several pages, windows and chunks, and beyond the 128 positions that the scaled ropes start from


def test_no_family_is_missing() -> None:
    assert set(BASES) == set(FAMILIES)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_transformers(case: Case, tmp_path: Path) -> None:
    model = save(case, tmp_path)
    llm = LLM(tmp_path, dtype="float32", max_num_batched_tokens=128, kv_memory="64MiB", max_model_len=512)
    ids = torch.randint(3, VOCAB, (NUM_TOKENS,), generator=torch.Generator().manual_seed(3)).tolist()

    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].float()
    logits = llm.logits(ids)
    assert logits.shape == (NUM_TOKENS, VOCAB)
    assert logits.dtype == torch.float32
    spread = expected.max() - expected.min()
    assert float((logits - expected).abs().max() / spread) < 1e-4

    prompt = ids[:40]
    with torch.no_grad():
        whole = model.generate(
            torch.tensor([prompt]), max_new_tokens=64, min_new_tokens=64, do_sample=False, eos_token_id=None
        )
    result = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))[0]
    assert result.token_ids == whole[0, len(prompt) :].tolist()
