"""A dense gated MLP as a mixture of experts: each expert gets a block of the hidden neurons.

With every expert chosen at equal weight 1/E and the down projections multiplied by E, the mixture's output is the dense
one; exactly so in bfloat16 and float32 where E is a power of two, since such a factor changes exponents only.

D width, F dense intermediate width, E experts.
"""

from __future__ import annotations

import torch

from moestro.errors import ConfigError

Expert = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def split_mlp(gate_FD: torch.Tensor, up_FD: torch.Tensor, down_DF: torch.Tensor, num_experts: int) -> list[Expert]:
    """(gate, up, down) of each expert: neurons in order, F / E of them each, down multiplied by E.

    Raises ConfigError when the neurons do not divide evenly.
    """
    width = gate_FD.shape[0]
    if width % num_experts:
        raise ConfigError(f"{width} neurons cannot be split evenly into {num_experts} experts")
    blocks = [m.chunk(num_experts) for m in (gate_FD, up_FD, down_DF.T)]
    return [(g, u, d.T.contiguous() * num_experts) for g, u, d in zip(*blocks, strict=True)]


def uniform_router(num_experts: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """A router [E, D] that gives every expert the same logit."""
    return torch.zeros(num_experts, width, dtype=dtype)
