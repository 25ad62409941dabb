"""Ragged paged attention: one call for decode rows, verify rows and prefill chunks."""

from forge_kernels.attention.api import (
    IMPLEMENTATIONS,
    Implementation,
    kv_storage_dtype,
    ragged_paged_attention,
    rotate_and_write,
    write_kv,
)

__all__ = [
    "IMPLEMENTATIONS",
    "Implementation",
    "kv_storage_dtype",
    "ragged_paged_attention",
    "rotate_and_write",
    "write_kv",
]
