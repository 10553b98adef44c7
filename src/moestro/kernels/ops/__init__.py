"""One folder an op: `__init__` the typed entry and its checks, `reference` plain PyTorch, further modules the fast
ones."""

from moestro.kernels.ops import attention, combine, experts, gated_mlp, linear, norm, qkv_store, route, sort_by_expert

__all__ = [
    "attention",
    "combine",
    "experts",
    "gated_mlp",
    "linear",
    "norm",
    "qkv_store",
    "route",
    "sort_by_expert",
]
