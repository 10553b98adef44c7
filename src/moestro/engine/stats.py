"""What the engine says about itself: facts fixed at start, and counters that only rise beside the present state."""

from __future__ import annotations

import msgspec


class ModelInfo(msgspec.Struct, frozen=True):
    """Fixed once the engine is built.

    name: the served name. created: seconds since the epoch. top_k, num_experts: 0 for a model without experts.
    moe_layers: indices of the MoE layers. decisions: (option, value, why) of everything the engine decided by itself.
    kernels: (op, implementation, reason) a choice. max_num_seqs: most sequences computed at the same time.
    """

    name: str
    folder: str
    family: str
    max_model_len: int
    vocab_size: int
    num_experts: int
    top_k: int
    moe_layers: list[int]
    created: int
    decisions: list[tuple[str, str, str]]
    kernels: list[tuple[str, str, str]]
    max_num_seqs: int = 64


class EngineStats(msgspec.Struct, frozen=True):
    """Present state, then counters since start.

    kv_usage: share of pages held, 0..1. kv_waste: share of the held pages' room that holds no token.
    prefix_queries, prefix_hits: prompt tokens looked up and found; resumed_prefix_hits: found again after a preemption.
    prompt_tokens, generation_tokens: admitted and made. finished: completions by finish reason.
    """

    num_running: int
    num_waiting: int
    kv_pages_total: int
    kv_pages_used: int
    kv_usage: float
    kv_waste: float
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    resumed_prefix_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    finished: dict[str, int] = {}
