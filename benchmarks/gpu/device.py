"""The device, and its two ceilings: copying memory and multiplying matrices."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu.clock import seconds
from benchmarks.gpu.parts import Case


def device(tiny: bool) -> Iterator[Case]:
    yield Case("description", _describe, 30.0)
    yield Case("copy", lambda: {"bytes_per_s": copy_bytes_per_s(tiny)}, 30.0)
    yield Case("bfloat16 product", lambda: {"flops": bf16_flops(tiny)}, 30.0)


def _describe() -> dict[str, Any]:
    first = jax.devices()[0]
    return {
        "platform": first.platform,
        "kind": first.device_kind,
        "compute_capability": getattr(first, "compute_capability", None),
        "memory_bytes": (first.memory_stats() or {}).get("bytes_limit"),
        "driver": _driver(),
    }


def copy_bytes_per_s(tiny: bool) -> float:
    """Return bytes read plus written per second by a copy of many gigabytes."""
    count = 1 << (20 if tiny else 31)
    x = jnp.zeros(count, jnp.bfloat16)
    copy = jax.jit(lambda x: x + jnp.bfloat16(1))  # XLA would remove a plain copy
    return 2 * x.nbytes / seconds(lambda: copy(x))


def bf16_flops(tiny: bool) -> float:
    """Return FLOP/s of a product of two large matrices of random bfloat16."""
    n = 256 if tiny else 8192
    a, b = jax.random.normal(jax.random.key(0), (2, n, n), jnp.bfloat16)
    product = jax.jit(lambda a, b: a @ b.T)
    return 2.0 * n**3 / seconds(lambda: product(a, b))


def _driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True)
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None
