"""Measure the C++ kernels on this CPU against plain XLA and the memory bandwidth.

    python -m benchmarks.cpu_kernels [--shapes M S] [--parts linear attention] [--gguf Q8_0 ...]
        [--rounds 5] [--output FILE.json]

Linear layers: all matrices of some decoder layers, chained as in the decoder, with norms, SwiGLU
and residuals. The shapes are TinyLlama-1.1B's (M) and SmolLM2-135M's (S). The weights are random
and exceed every cache. GB/s are bytes of weights over time. At one row, the upper bound is the
memory bandwidth, which is measured in each round.

Attention: decode rows and prompt chunks, in all layers. GB/s are bytes of the contexts' keys and
values.

`--gguf` replaces the linear layers with matrices in blocks of these types. Activations rounded to
int8 (`--gguf-weights packed`) and unrounded ones (`packed-exact`) take turns.

Takes about six minutes on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from benchmarks import report as reports
from benchmarks.interleaved import median_seconds
from benchmarks.k_quants import rounded_rows
from benchmarks.peers.proc import read_bandwidth_bytes_per_s
from benchmarks.random_model import SHAPES, Shape
from forge_jax.weights.ggml import BY_NAME
from forge_jax.weights.ggml_types import TYPES
from forge_kernels import cpu
from forge_kernels.attention import QuantizedKV, kv_storage_dtype, ragged_paged_attention
from forge_kernels.attention.quantized import quantize_rows
from forge_kernels.blocks import BlockValues
from forge_kernels.cpu.library import num_threads
from forge_kernels.linear import (
    FORMATS,
    BlockPacking,
    PackedWeight,
    Packing,
    PlainWeight,
    Weight,
    linear,
    pack,
    pack_blocks,
)

ROWS = (1, 8, 16, 32, 512)
PARTS = ("linear", "attention")
BLOCK = 16
EPS = 1e-5
LAYER_BYTES = 350_000_000  # bfloat16 weights; this sets the number of layers
KV_BYTES = 500_000_000
Leaf = dict[str, Weight]


def main() -> int:
    parser = reports.parser("cpu_kernels", "Measure the C++ kernels on this CPU.", rounds=5)
    parser.add_argument("--shapes", nargs="+", choices=("M", "S"), default=("M", "S"))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--gguf", nargs="+", default=[], metavar="TYPE", choices=TYPES)
    args = parser.parse_args()
    return reports.publish("cpu_kernels", args, lambda: measure(args), tables)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {
        "isa": cpu.load(), "threads": num_threads(), "linear": [], "attention": []
    }  # fmt: skip
    rates = [_memory()]
    for name in args.shapes:
        if "linear" in args.parts and args.gguf:
            found["linear"] += measure_blocks(name, SHAPES[name], args.gguf, args.rounds)
        elif "linear" in args.parts:
            found["linear"] += measure_linear(name, SHAPES[name], args.rounds)
        rates.append(_memory())
        if "attention" in args.parts:
            found["attention"] += measure_attention(name, SHAPES[name], args.rounds)
            rates.append(_memory())
    return found | {"memory_gb_per_s": {"median": statistics.median(rates), "best": max(rates)}}


def _memory() -> float:
    return read_bandwidth_bytes_per_s(num_threads(), 3) / 1e9


# ---- linear layers ------------------------------------------------------------------------------


def measure_linear(name: str, shape: Shape, rounds: int) -> list[dict[str, Any]]:
    """Return the seconds of the layers by format and rows; the formats take turns."""
    forms = ("xla", *FORMATS)
    plain = _layers(shape)
    weights = {form: [_packed(layer, form) for layer in plain] for form in forms}
    return _timed(name, plain, weights, "xla", "speedup_over_xla", rounds)


def _timed(
    name: str,
    plain: list[dict[str, np.ndarray]],
    weights: dict[str, list[Leaf]],
    base: str,
    speedup: str,
    rounds: int,
) -> list[dict[str, Any]]:
    """Time the layers in each format; column `speedup` is the ratio to the format `base`."""
    count = sum(w.size for layer in plain for w in layer.values())
    results = []
    for rows in ROWS:
        x = jnp.asarray(
            np.random.default_rng(0).standard_normal((rows, plain[0]["qkv"].shape[1])), jnp.bfloat16
        )
        run = jax.jit(_run_layers)
        times = median_seconds({f: _call(run, x, w) for f, w in weights.items()}, rounds)
        for form, seconds in times.items():
            size = sum(leaf.nbytes for leaf in jax.tree.leaves(weights[form]))
            results.append(
                {
                    "shape": name,
                    "format": form,
                    "rows": rows,
                    "layers": len(plain),
                    "ms_per_layer": 1e3 * seconds / len(plain),
                    "gb_per_s": size / seconds / 1e9,
                    "gflop_per_s": 2 * rows * count / seconds / 1e9,
                    speedup: times[base] / seconds,
                }
            )
    return results


def _layers(shape: Shape) -> list[dict[str, np.ndarray]]:
    """Return bf16 matrices [N, K] of as many layers as `LAYER_BYTES` allows."""
    d, inner = shape.hidden_size, shape.intermediate_size
    head_dim = d // shape.num_attention_heads
    qkv = d + 2 * shape.num_key_value_heads * head_dim
    sizes = {"qkv": (qkv, d), "out": (d, d), "gate_up": (2 * inner, d), "down": (d, inner)}
    per_layer = 2 * sum(n * k for n, k in sizes.values())
    rng = np.random.default_rng(0)
    return [
        {
            name: (rng.standard_normal(size, np.float32) * 0.02).astype(ml_dtypes.bfloat16)
            for name, size in sizes.items()
        }
        for _ in range(min(shape.num_hidden_layers, max(1, LAYER_BYTES // per_layer)))
    ]


def _packed(layer: dict[str, np.ndarray], form: str) -> Leaf:
    def packed(name: str, w: np.ndarray) -> Weight:
        return (
            PlainWeight(jnp.asarray(w))
            if form == "xla"
            else _pack(w, form, paired=name == "gate_up")
        )

    return {name: packed(name, w) for name, w in layer.items()}


def _pack(w: np.ndarray, form: Any, *, paired: bool) -> PackedWeight:
    outputs, inputs = w.shape
    packing = Packing(form, outputs, inputs, paired)
    weight, scale = pack(w, packing)
    return PackedWeight(jnp.asarray(weight), None if scale is None else jnp.asarray(scale), packing)


def _run_layers(x: jax.Array, layers: list[Leaf]) -> jax.Array:
    norm = jnp.ones(x.shape[1], x.dtype), EPS
    for layer in layers:
        mixed = linear(x, layer["qkv"], norm=norm)[:, : x.shape[1]]
        x = linear(mixed, layer["out"], residual=x)
        x = linear(linear(x, layer["gate_up"], norm=norm, swiglu=True), layer["down"], residual=x)
    return x


def _call(run: Callable[..., jax.Array], *arrays: Any) -> Callable[[], jax.Array]:
    return lambda: run(*arrays)


# ---- matrices in blocks -------------------------------------------------------------------------


def measure_blocks(
    name: str, shape: Shape, types: Sequence[str], rounds: int
) -> list[dict[str, Any]]:
    """Return the seconds of the layers by type and rows; both ways to multiply take turns."""
    plain = _layers(shape)
    results = []
    for kind in types:
        layer = {key: _in_blocks(w, kind, paired=key == "gate_up") for key, w in plain[0].items()}
        # Each layer gets its own memory.
        exact = [jax.tree.map(jnp.array, layer) for _ in plain]
        sides = {f"{kind}, packed-exact": exact, f"{kind}, packed": _rounding(exact)}
        base = f"{kind}, packed-exact"
        results += _timed(name, plain, sides, base, "speedup_over_exact", rounds)
    return results


def _in_blocks(w: np.ndarray, kind: str, *, paired: bool) -> PackedWeight:
    form, (outputs, inputs) = BY_NAME[kind], w.shape
    assert form.blocks is not None

    def read(rows: np.ndarray) -> BlockValues:
        data = rounded_rows(w[rows].astype(np.float32), kind)
        return form.unpacked(data.reshape(len(rows), -1, form.block_bytes))

    packing = BlockPacking(form.blocks, outputs, inputs, paired)
    return PackedWeight(jnp.asarray(pack_blocks(read, packing)), None, packing)


def _rounding(layers: list[Leaf]) -> list[Leaf]:
    """Return weights in the same memory that multiply rows rounded to int8."""

    def one(w: Weight) -> Weight:
        assert isinstance(w, PackedWeight) and isinstance(w.packing, BlockPacking)
        return replace(w, packing=replace(w.packing, activations="int8"))

    return [{name: one(w) for name, w in layer.items()} for layer in layers]


# ---- attention ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attended:
    """Attention of one step: `seqs` sequences with `rows` queries each, which end at `context`."""

    seqs: int
    rows: int
    context: int
    kv_dtype: str = "bfloat16"
    window: int | None = None

    def __str__(self) -> str:
        parts = [f"{self.seqs} x {self.rows} rows", f"context {self.context}"]
        parts += [self.kv_dtype] if self.kv_dtype != "bfloat16" else []
        parts += [f"window {self.window}"] if self.window else []
        return ", ".join(parts)


ATTENDED = (
    *(Attended(16, 1, context) for context in (128, 1024, 4096)),
    Attended(1, 1, 8192),
    Attended(1, 512, 512),
    Attended(1, 512, 8192),
    Attended(16, 1, 4096, "int8"),
    Attended(16, 1, 4096, "float8_e4m3fn"),
    Attended(16, 1, 4096, window=1024),
)


def measure_attention(name: str, shape: Shape, rounds: int) -> list[dict[str, Any]]:
    """Return the seconds per layer; each call reads another layer's cache."""
    heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads
    head_dim = shape.hidden_size // heads
    results = []
    for case in ATTENDED:
        blocks = case.seqs * case.context // BLOCK
        form = (blocks, 2, kv_heads, BLOCK, head_dim)
        layer_bytes = math.prod(form) * jnp.dtype(case.kv_dtype).itemsize
        layers = max(1, min(shape.num_hidden_layers, KV_BYTES // layer_bytes))
        rng = np.random.default_rng(0)
        floats = rng.standard_normal(form, np.float32)
        caches = [_cache(floats, case.kv_dtype) for _ in range(layers)]
        tokens = case.seqs * case.rows
        q = jnp.asarray(rng.standard_normal((tokens, heads, head_dim)), jnp.bfloat16)
        tables = jnp.asarray(rng.permutation(blocks).reshape(case.seqs, -1), jnp.int32)
        sides = {
            kind: _call(
                jax.jit(functools.partial(_attend, case=case, implementation=kind)),
                *(q, caches, tables),
            )
            for kind in ("xla", "cpu")
        }
        times = median_seconds(sides, rounds)
        for kind, seconds in times.items():
            results.append(
                {
                    "shape": name,
                    "case": str(case),
                    "implementation": kind,
                    "layers": layers,
                    "us_per_layer": 1e6 * seconds / layers,
                    "gb_per_s": layers * layer_bytes / seconds / 1e9,
                    "speedup_over_xla": times["xla"] / seconds,
                }
            )
    return results


def _cache(floats: np.ndarray, kv_dtype: str) -> jax.Array | QuantizedKV:
    if kv_dtype == "bfloat16":
        return jnp.asarray(floats.astype(ml_dtypes.bfloat16).view(np.uint16))
    data, scale = quantize_rows(jnp.asarray(floats), kv_dtype)
    storage = kv_storage_dtype(kv_dtype, "cpu")
    return QuantizedKV(jax.lax.bitcast_convert_type(data, storage), scale)


def _attend(
    q: jax.Array,
    caches: list[jax.Array | QuantizedKV],
    tables: jax.Array,
    *,
    case: Attended,
    implementation: Any,
) -> jax.Array:
    stored = caches[0].dtype
    for kv in caches:
        q = ragged_paged_attention(
            q,
            kv,
            tables,
            jnp.full(case.seqs, case.context, jnp.int32),
            case.rows * jnp.arange(case.seqs + 1, dtype=jnp.int32),
            jnp.int32(case.seqs),
            sm_scale=q.shape[-1] ** -0.5,
            kv_dtype=None if stored == jnp.int8 else case.kv_dtype,
            max_q_len=case.rows,
            implementation=implementation,
            window=case.window,
        )
    return q


# ---- the report ---------------------------------------------------------------------------------


def tables(report: dict[str, Any]) -> str:
    memory = report["memory_gb_per_s"]
    parts = [
        f"{report['date']}, {reports.cpu(report)}, {report['threads']} threads, {report['isa']}, "
        f"jax {report['versions']['jax']}; memory {memory['median']:.1f} GB/s "
        f"(best {memory['best']:.1f})",
        "Linear layers: GB/s of weights (GFLOP/s; speedup over XLA in bfloat16, or packed-exact)",
        reports.table(
            ("shape", "format", *(f"{rows} rows" for rows in ROWS)),
            _grid(
                report["linear"],
                ("shape", "format"),
                lambda r: f"{r['gb_per_s']:.1f} ({r['gflop_per_s']:,.0f}; {_speedup(r):.2f}x)",
            ),
        ),
    ]
    if report["attention"]:
        cells = _grid(
            report["attention"],
            ("shape", "case"),
            lambda r: f"{r['us_per_layer']:,.0f} ({r['gb_per_s']:.1f}; {_speedup(r):.1f}x)",
        )
        parts += [
            "Attention: us per layer (GB/s of keys and values; speedup over plain XLA)",
            reports.table(("shape", "case", "plain XLA", "C++ kernels"), cells),
        ]
    return "\n\n".join(parts)


def _speedup(result: dict[str, Any]) -> float:
    return result.get("speedup_over_xla") or result["speedup_over_exact"]


def _grid(
    results: list[dict[str, Any]], keys: tuple[str, str], cell: Callable[[dict[str, Any]], str]
) -> list[tuple[str, ...]]:
    lines: dict[tuple, list[str]] = {}
    for result in results:
        lines.setdefault(tuple(result[key] for key in keys), []).append(cell(result))
    return [(*key, *cells) for key, cells in lines.items()]


if __name__ == "__main__":
    sys.exit(main())
