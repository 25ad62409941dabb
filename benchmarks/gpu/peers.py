"""Kernels of other projects, where they are installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.gpu.parts import Case, Missing

BATCHES, CONTEXTS, PAGE = (1, 8, 64, 256), (1024, 4096), 64
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128  # Llama-3.1-8B


def flashinfer(tiny: bool) -> Iterator[Case]:
    """Yield times of FlashInfer's batch decode over pages: bytes/s of keys and values."""
    for context in CONTEXTS[:1] if tiny else CONTEXTS:
        for batch in BATCHES[:1] if tiny else BATCHES:
            yield Case(f"{batch} x {context}", partial(_decode, batch, context), 30.0)


def _decode(batch: int, context: int) -> dict[str, Any]:
    for package in ("torch", "flashinfer"):
        if importlib.util.find_spec(package) is None:
            raise Missing(f"{package} is not installed")
    import torch  # pyright: ignore[reportMissingImports]

    if not torch.cuda.is_available():
        raise Missing("torch finds no CUDA device")
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper  # pyright: ignore[reportMissingImports]

    pages = batch * context // PAGE
    options: dict[str, Any] = {"device": "cuda"}
    workspace = torch.empty(256 << 20, dtype=torch.uint8, **options)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "HND")
    indptr = torch.arange(batch + 1, dtype=torch.int32, **options) * (context // PAGE)
    indices = torch.randperm(pages, **options).to(torch.int32)
    last = torch.full((batch,), PAGE, dtype=torch.int32, **options)
    wrapper.plan(
        indptr, indices, last, HEADS, KV_HEADS, HEAD_DIM, PAGE,
        data_type=torch.bfloat16, q_data_type=torch.bfloat16,
    )  # fmt: skip
    q = torch.randn(batch, HEADS, HEAD_DIM, dtype=torch.bfloat16, **options)
    kv = torch.randn(pages, 2, KV_HEADS, PAGE, HEAD_DIM, dtype=torch.bfloat16, **options)
    for _ in range(3):
        wrapper.run(q, kv)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(50):
        wrapper.run(q, kv)
    end.record()
    torch.cuda.synchronize()
    seconds = begin.elapsed_time(end) / 50e3
    read = 2 * 2 * KV_HEADS * HEAD_DIM * context * batch
    return {"us": 1e6 * seconds, "bytes_per_s": read / seconds}
