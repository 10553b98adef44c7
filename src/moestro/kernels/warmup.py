"""Loading, and at the very first start compiling, the kernels before the first request needs them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

import torch

from moestro.kernels.ops.attention import PagedBatch
from moestro.kernels.ops.experts import ExpertWeights
from moestro.kernels.ops.qkv_store import QKVPlan
from moestro.kernels.select import KernelSelector
from moestro.logs import logger
from moestro.quant.formats import Weight
from moestro.spec.fields import RouterSpec

_FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def warm_up(kernels: KernelSelector, weight_formats: Iterable[str], kv_format: str) -> float:
    """Call every op once on tiny inputs, for these weight formats and dtype of the pages; returns the seconds it took.

    Compiled kernels are kept between processes in settings.cache_dir() / "numba": the first start on a machine takes
    20-40 s, the next under 1 s.
    """
    began = time.perf_counter()
    x_TD = torch.zeros(1, 8)
    for name in weight_formats:
        dtype = _FORMATS[name]
        kernels.linear(name)(x_TD, Weight(torch.zeros(8, 8, dtype=dtype)), None)
        gate_up, down = torch.zeros(1, 16, 8, dtype=dtype), torch.zeros(1, 8, 8, dtype=dtype)
        kernels.gated_mlp(name)(x_TD, Weight(gate_up[0]), Weight(down[0]), "swiglu", None)
        offsets_E1 = torch.tensor([0, 1], dtype=torch.int32)
        kernels.experts_mlp(name)(x_TD, offsets_E1, ExpertWeights(Weight(gate_up), Weight(down)), "swiglu", None)
    ids_TK, weights_TK = kernels.route()(x_TD, RouterSpec(8, 1), None)
    _, order_R = kernels.sort_by_expert()(ids_TK, 8)
    kernels.combine()(x_TD, order_R, weights_TK, 1)
    kernels.rms_norm()(x_TD, x_TD[0], 1e-6)
    kernels.add_rms_norm_()(x_TD.clone(), x_TD, 1.0, x_TD[0], 1e-6)
    _warm_attention(kernels, kv_format)
    seconds = time.perf_counter() - began
    logger.log(logging.INFO if seconds > 2 else logging.DEBUG, "kernels ready in %.1f s", seconds)
    return seconds


def _warm_attention(kernels: KernelSelector, kv_format: str) -> None:
    one = torch.ones(1, dtype=torch.int32)
    batch = PagedBatch(
        page_size=4,
        q_starts_S1=torch.tensor([0, 1], dtype=torch.int32),
        context_lens_S=one,
        page_tables_SP=torch.zeros(1, 1, dtype=torch.int32),
        slots_T=torch.zeros(1, dtype=torch.int64),
        num_seqs=1,
        num_tokens=1,
        max_query_len=1,
        max_context_len=1,
    )
    plan = QKVPlan(num_heads=2, num_kv_heads=1, head_dim=8, v_head_dim=8, rotary_dim=8)
    k_pages = torch.zeros(1, 1, 4, 8, dtype=_FORMATS[kv_format])
    v_pages = torch.zeros_like(k_pages)
    turn = torch.ones(1, 4)
    qkv_TN = torch.zeros(1, plan.total)
    q_THd = kernels.qkv_store(kv_format)(qkv_TN, plan, turn, turn, batch, k_pages, v_pages, None, None, 1e-6)
    kernels.paged_attention(kv_format)(q_THd, k_pages, v_pages, batch, 1.0, None, None)
