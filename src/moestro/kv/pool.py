"""The KV cache's memory: for each layer the pages of keys and values.

P pages, Hk kv heads, d key width, dv value width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moestro.errors import CapacityError
from moestro.spec.fields import ModelSpec


@dataclass(frozen=True, eq=False)
class LayerPages:
    """One layer's cache. k: [P, Hk, page_size, d]; v: [P, Hk, page_size, dv]. MLA: Hk = 1 and v is the latent part of
    k.
    """

    k: torch.Tensor
    v: torch.Tensor


class KVPool:
    """Pages of all layers, allocated once and not initialised: the system gives memory to a page when it is first
    written.

    dtype: float32, bfloat16 or float16. Raises CapacityError when the address space does not hold it.
    """

    def __init__(
        self, spec: ModelSpec, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.dtype = dtype
        self.layers: list[LayerPages] = []
        try:
            for layer in spec.layers:
                a = layer.attention
                if a.kind == "mla":
                    latent = torch.empty(num_pages, 1, page_size, a.kv_values_per_token, dtype=dtype, device=device)
                    self.layers.append(LayerPages(latent, latent[..., : a.kv_lora_rank]))
                else:
                    shape = (num_pages, a.num_kv_heads, page_size)
                    k = torch.empty(*shape, a.head_dim, dtype=dtype, device=device)
                    self.layers.append(LayerPages(k, torch.empty(*shape, a.v_head_dim, dtype=dtype, device=device)))
        except (RuntimeError, MemoryError) as error:
            need = num_pages * page_bytes(spec, page_size, dtype)
            raise CapacityError(
                f"the KV cache of {num_pages} pages needs {need / 2**30:.2f} GiB, which could not be allocated; "
                "lower --kv-memory"
            ) from error


def page_bytes(spec: ModelSpec, page_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page over all layers."""
    return spec.kv_values_per_token * page_size * dtype.itemsize
