"""What the engine tells about itself: the model it serves, and counters of what it has done. No torch."""

from __future__ import annotations

import msgspec


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The model that is loaded.

    folder: where its config.json lies. tokenizer_folder: where its tokenizer and chat template lie. max_model_len: prompt and
    answer together, in tokens. num_layers, num_experts, top_k: as in the spec; num_experts is that of the largest MoE layer.
    """

    model: str
    folder: str
    tokenizer_folder: str
    architecture: str
    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    num_layers: int
    num_experts: int
    top_k: int


class EngineStats(msgspec.Struct, kw_only=True):
    """State now (num_running, num_waiting: sequences; kv_usage, kv_waste: 0..1) and totals since the engine started.

    kv_waste: share of the used pages' token slots that hold nothing. prefix_queries, prefix_hits: prompt tokens looked up and
    found in the prefix cache. finished: completions by finish reason. expert_tokens_sum, expert_tokens_max: a MoE layer each,
    tokens routed to all its experts and to its busiest one; layers names those layers.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    kv_pages_total: int = 0
    kv_pages_used: int = 0
    kv_waste: float = 0.0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    finished: dict[str, int] = {}
    layers: list[int] = []
    expert_tokens_sum: list[int] = []
    expert_tokens_max: list[int] = []
