"""What `moestro inspect` says of a model, as plain data."""

from __future__ import annotations

from typing import Any

from moestro.spec.count import (
    ACTIVE_PARAMS_COUNTS,
    DTYPE_BYTES,
    active_params,
    kv_bytes_per_token,
    total_params,
    weight_bytes,
)
from moestro.spec.fields import ModelSpec, MoESpec


def describe(spec: ModelSpec) -> dict[str, Any]:
    """Sizes and options of a model, ready for JSON.

    weight_bytes is None when config.json does not say enough, and weight_bytes_estimated when the rules of a quantised
    format were assumed. kv_bytes_per_token is for a cache of kv_dtype: the model's dtype, bfloat16 when it has none.
    quantization names the format, quantization_config is what config.json says of it.
    """
    moe = next(layer.mlp for layer in spec.layers if isinstance(layer.mlp, MoESpec)) if spec.moe_layers else None
    weights = weight_bytes(spec)
    kv_dtype = spec.dtype if spec.dtype in DTYPE_BYTES else "bfloat16"
    return {
        "architecture": spec.architecture,
        "family": spec.family,
        "num_layers": spec.num_layers,
        "num_moe_layers": len(spec.moe_layers),
        "num_experts": moe.router.num_experts if moe else 0,
        "top_k": moe.router.top_k if moe else 0,
        "max_position": spec.max_position or None,
        "dtype": spec.dtype,
        "total_params": total_params(spec),
        "active_params": active_params(spec),
        "active_params_counts": ACTIVE_PARAMS_COUNTS,
        "weight_bytes": weights.value,
        "weight_bytes_estimated": weights.estimate,
        "kv_bytes_per_token": kv_bytes_per_token(spec, kv_dtype),
        "kv_dtype": kv_dtype,
        "quantization": str(spec.quantization.get("quant_method")) if spec.quantization else None,
        "quantization_config": spec.quantization,
        "blockers": list(spec.blockers),
        "ignored": list(spec.ignored),
    }
