"""Random weights in place of a checkpoint's, for measuring a shape that need not say anything sensible."""

from __future__ import annotations

import torch

from moestro.spec.fields import ModelSpec
from moestro.spec.tensors import model_tensors

SD = 0.02


def dummy_tensors(spec: ModelSpec, dtype: torch.dtype, device: torch.device, seed: int = 0) -> dict[str, torch.Tensor]:
    """The model's tensors by name, as `assemble.load_tensors` gives them: normal with deviation 0.02, norms around 1.

    The same for the same seed, device type and dtype.
    """
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {}
    for name, tensor in model_tensors(spec).items():
        chosen = torch.float32 if tensor.precision == "float32" else dtype
        values = torch.empty(tensor.shape, dtype=chosen, device=device)
        for part in values if values.dim() == 3 else [values]:  # expert by expert: float32 numbers need room too
            part.normal_(0, SD, generator=generator)
        if tensor.role == "norm" or "norm." in name:
            values += 1
        tensors[name] = values
    return tensors
