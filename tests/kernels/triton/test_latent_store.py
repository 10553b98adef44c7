"""latent_store: Triton against the reference."""

from __future__ import annotations

import pytest
import torch

from moestro.kernels.ops.latent_store import reference
from tests.kernels.triton.test_attention import close, mixed
from tests.kernels.triton.test_qkv_store import make_batch


def compare(T: int, H: int, c: int, r: int, interleaved: bool, dtype: torch.dtype, device: torch.device) -> None:
    from moestro.kernels.ops.latent_store import triton

    torch.manual_seed(T)
    slots = torch.randperm(T + 8)[:T].tolist()
    slots[-1 if T > 1 else 1 :] = [-1] * (T > 1)
    batch = make_batch(slots, 4, device)
    q_rope = torch.randn(T, H, r + 12, device=device).to(dtype)[..., 12:]
    latent, norm = torch.randn(T, c + r, device=device).to(dtype), torch.rand(c, device=device).to(dtype)
    angles = torch.rand(T, r // 2, device=device) * 6
    mine, theirs = (torch.full((T // 4 + 3, 1, 4, c + r), 9.0, dtype=dtype, device=device) for _ in range(2))
    outs = [
        module.latent_store(q_rope, latent, angles.cos(), angles.sin(), interleaved, batch, pages, norm, 1e-6)
        for module, pages in ((triton, mine), (reference, theirs))
    ]
    close(*outs)
    close(mine, theirs)
    assert torch.equal(mine == 9, theirs == 9)
    assert outs[0].is_contiguous()


@pytest.mark.parametrize(("sizes", "T", "dtype"), mixed([(4, 32, 8, False), (19, 24, 6, True)], [1, 3, 33]))
def test_equals_reference(sizes: tuple[int, int, int, bool], T: int, dtype: torch.dtype, device: torch.device) -> None:
    """The second: no size a power of two."""
    compare(T, *sizes, dtype, device)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 32, 2048])
def test_real_shape(T: int, device: torch.device) -> None:
    compare(T, 128, 512, 64, True, torch.bfloat16, device)
