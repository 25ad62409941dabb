"""Predicted times next to measured ones, on the GPUs that they are for.

Steps and products come from the committed predictions, so no compiler is needed. Every function
returns the columns of a row, and no columns on a device without predictions.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import jax

from benchmarks.aot.attention import decode_attention
from benchmarks.aot.costs import Device, attention_s, device_named
from forge_jax.models.kv import element_dtype
from forge_kernels.attention.shapes import AttentionShape
from forge_kernels.devices import current_gpu

REPORT = Path(__file__).parents[1] / "results/2026-11-27-gpu-predictions.json"
MODEL = "llama-3.1-8b"  # that `benchmarks.gpu.step` measures


def _device() -> Device | None:
    return device_named(jax.devices()[0].device_kind)


@cache
def _report() -> dict[str, Any]:
    return json.loads(REPORT.read_text())


def _found(table: str, figure: str, **wanted: Any) -> dict[str, float]:
    """Return a figure of the only row of a table of this device that has these values."""
    device = _device()
    if device is None:
        return {}
    wanted["device"] = device.key
    rows = [row for row in _report()[table] if all(row[name] == wanted[name] for name in wanted)]
    return {figure: rows[0][figure]} if rows else {}


def step(batch: int, kv_dtype: str, context: int) -> dict[str, float]:
    """Return `predicted_ms` of a decode step of the 8B model in bfloat16 on one GPU."""
    shape = {"batch": batch, "kv_dtype": kv_dtype, "context": context}
    return _found("rows", "predicted_ms", model=MODEL, quantization="none", gpus=1, **shape)


def linear(name: str, tokens: int) -> dict[str, float]:
    """Return `predicted_us` of a product with a matrix in a format of `benchmarks.gpu.linears`."""
    return _found("linears", "predicted_us", matrix=name, tokens=tokens)


def attention(shape: AttentionShape, batch: int, context: int, kv_dtype: str) -> dict[str, float]:
    """Return `predicted_us` of the attention kernels in one layer."""
    device, gpu = _device(), current_gpu()
    if device is None or gpu is None:
        return {}
    kind = element_dtype("auto" if kv_dtype == "bfloat16" else kv_dtype, "bfloat16")
    work = decode_attention(shape, gpu, batch=batch, context=context, kv_dtype=kind)
    return {"predicted_us": 1e6 * attention_s(device, work)}
