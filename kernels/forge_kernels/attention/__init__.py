"""Ragged paged attention: one call for decode rows, draft rows and prefill chunks."""

from forge_kernels.attention.api import (
    IMPLEMENTATIONS,
    Implementation,
    kv_shape_dtype,
    kv_storage_dtype,
    ragged_paged_attention,
    refuse_gradient,
    rotate_and_write,
    write_kv,
    write_vectors,
)
from forge_kernels.attention.chunks import chunked_batch
from forge_kernels.attention.patterns import pattern_attention
from forge_kernels.attention.quantized import QuantizedKV
from forge_kernels.attention.written import rotate_write_attend, write_then_attend

__all__ = [
    "IMPLEMENTATIONS",
    "Implementation",
    "QuantizedKV",
    "chunked_batch",
    "kv_shape_dtype",
    "kv_storage_dtype",
    "pattern_attention",
    "ragged_paged_attention",
    "refuse_gradient",
    "rotate_and_write",
    "rotate_write_attend",
    "write_kv",
    "write_then_attend",
    "write_vectors",
]
