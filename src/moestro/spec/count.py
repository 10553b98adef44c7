"""How many parameters a model has, how many of them a token uses, and what they and the KV cache take in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from moestro.spec.fields import LayerSpec, ModelSpec, MoESpec
from moestro.spec.tensors import TensorSpec, model_tensors

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "int8": 1}

# Vendors count differently: Qwen with both embeddings, gpt-oss and DeepSeek with the head only, MiniMax with neither.
ACTIVE_PARAMS_COUNTS = (
    "parameters read for one token: attention, norms, routers, the chosen and shared experts and the head; "
    "the input embedding, of which one row is read, is left out"
)


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of all weights; None when config.json does not say enough, an estimate where a format's rules are used."""

    value: int | None
    estimate: bool = False


def total_params(spec: ModelSpec) -> int:
    """All parameters of the main model; a tied head once, next-token-prediction layers not at all."""
    return sum(tensor.size for tensor in model_tensors(spec).values())


def active_params(spec: ModelSpec) -> int:
    """Parameters that one token uses; ACTIVE_PARAMS_COUNTS says in words what is among them."""
    active = 0
    for name, tensor in model_tensors(spec).items():
        if tensor.role == "embedding":
            # A tied embedding does the head's work.
            active += tensor.size if spec.tied_head else 0
        elif tensor.role == "expert":
            router = _moe(spec.layers[int(name.split(".")[1])]).router
            active += tensor.size // router.num_experts * router.top_k
        else:
            active += tensor.size
    return active


def weight_bytes(spec: ModelSpec, dtype: str | None = None) -> WeightBytes:
    """Bytes of the weights in memory.

    dtype: of a plain model; None takes config.json's, and estimates a quantised model by the rules of its format where
    they are known (fp8 in blocks, mxfp4).
    """
    tensors = model_tensors(spec).values()
    if spec.quantization is None or dtype is not None:
        size = DTYPE_BYTES.get(dtype or spec.dtype or "")
        if size is None:
            return WeightBytes(None)
        return WeightBytes(sum(t.size * (4 if t.precision == "float32" else size) for t in tensors))
    method, block = spec.quantization.get("quant_method"), spec.quantization.get("weight_block_size")
    if method == "mxfp4":
        # Half a byte a value and one byte a block of 32; attention stays in 16 bits in the one family that uses it.
        return WeightBytes(sum(_mxfp4_bytes(t) if _is_matrix(t, ("expert",)) else 2 * t.size for t in tensors), True)
    if method == "fp8" and isinstance(block, list) and len(block) == 2 and all(type(b) is int and b > 0 for b in block):
        roles = ("attention", "dense", "expert", "shared")
        return WeightBytes(
            sum(_fp8_bytes(t, block[0], block[1]) if _is_matrix(t, roles) else 2 * t.size for t in tensors), True
        )
    return WeightBytes(None)


def kv_bytes_per_token(spec: ModelSpec, dtype: str = "bfloat16") -> int:
    """Bytes that the KV cache keeps for one token over all layers."""
    return spec.kv_values_per_token * DTYPE_BYTES[dtype]


def _moe(layer: LayerSpec) -> MoESpec:
    assert isinstance(layer.mlp, MoESpec)
    return layer.mlp


def _is_matrix(tensor: TensorSpec, roles: tuple[str, ...]) -> bool:
    """A weight matrix, or a matrix an expert, of one of the roles; biases are not."""
    return tensor.role in roles and len(tensor.shape) == (3 if tensor.role == "expert" else 2) and min(tensor.shape) > 1


def _mxfp4_bytes(tensor: TensorSpec) -> int:
    return tensor.size // tensor.shape[-1] * ceil(tensor.shape[-1] / 32) * 17


def _fp8_bytes(tensor: TensorSpec, block_rows: int, block_columns: int) -> int:
    *experts, rows, columns = tensor.shape
    scales = ceil(rows / block_rows) * ceil(columns / block_columns) * (experts[0] if experts else 1)
    return tensor.size + 4 * scales
