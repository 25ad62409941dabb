"""GPU attention in Pallas' interpreter, in a separate process; prints failures as JSON.

    NPROC=32 python mosaic_child.py wgmma|mma GROUP

The groups are `bits`, `cases`, `quantized` and `faults`. `some cases` and `some quantized` are one
half for each kernel, and `some faults` is a quarter.

The interpreter runs each warpgroup's steps in XLA's thread pool, where they wait for each other. On
a machine with few CPUs all threads of the pool would wait. `NPROC` sets the number of threads.
"""

import importlib
import inspect
import io
import json
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks import reset_gpu_interpret_mode_state
from test_attention import BF16_ROUNDOFF, Arrays, Batch, inputs, make, sinks_of, softmax

from forge_jax.testing import random_leaves, tiny_model
from forge_kernels.attention import mosaic_calls, rotate_write_attend
from forge_kernels.attention.mosaic_gpu import jitted_attention
from forge_kernels.attention.quantized import QuantizedKV, dequantize_rows, quantize_rows
from forge_kernels.devices import HOPPER, Gpu, current_gpu, described

DEVICES = {"wgmma": HOPPER, "mma": Gpu((8, 0), 108)}
# In the order in which they import each other.
MODULES = ["mosaic_kernel", "mosaic_wgmma", "mosaic_mma", "mosaic_gpu"]

SMALL = Batch(
    seqs=((1, 1), (1, 64), (1, 130), (1, 17)),
    heads=8,
    kv_heads=2,
    head_dim=64,
    block_size=16,
    rows=6,
    max_seqs=6,
    pool_tokens=512,
    max_context=192,
    dtype="bfloat16",
)
RAGGED = replace(SMALL, seqs=((1, 100), (4, 70), (0, 9), (40, 90), (1, 1)), rows=48)

CASES = {
    "decode, cut between thread blocks": (
        replace(SMALL, seqs=((1, 190), (1, 150)), rows=3),
        {"max_q_len": 1, "multiprocessors": 5},
    ),
    "decode, 16 query heads to one": (
        replace(SMALL, heads=16, kv_heads=1, seqs=((1, 70), (1, 20)), rows=3),
        {"max_q_len": 1},
    ),
    "decode, a query head to each kv head": (
        replace(SMALL, heads=2, seqs=((1, 70), (1, 20)), rows=3),
        {"max_q_len": 1},
    ),
    "nothing at all": (replace(SMALL, seqs=()), {"max_q_len": 1}),
    "decode, verify rows and a chunk": (RAGGED, {}),
    "decode, verify rows and a chunk, uniform": (RAGGED, {"uniform": True}),
    "verify rows": (replace(SMALL, seqs=((5, 70), (3, 3), (5, 64)), rows=14), {"max_q_len": 5}),
    "7 query heads to one, head dim 128, blocks of 64": (
        replace(
            SMALL,
            heads=7,
            kv_heads=1,
            head_dim=128,
            block_size=64,
            seqs=((9, 70), (1, 65)),
            rows=12,
        ),
        {},
    ),
    "8 query heads to one, blocks of 128": (
        replace(
            SMALL, heads=8, kv_heads=1, block_size=128, seqs=((1, 150), (2, 66)), max_context=256
        ),
        {},
    ),
    "a query head to each kv head, float16, head dim 128": (
        replace(SMALL, heads=2, head_dim=128, dtype="float16", seqs=((70, 90), (1, 30)), rows=71),
        {},
    ),
    "blocks of 24": (replace(SMALL, block_size=24, pool_tokens=480), {}),
    "head dim 80": (replace(SMALL, head_dim=80, seqs=((1, 70),), rows=2), {}),
    "head dim 256, blocks of 64": (
        replace(SMALL, heads=2, head_dim=256, block_size=64, seqs=((1, 70), (20, 20)), rows=21),
        {},
    ),
    "window": (replace(SMALL, seqs=((1, 190), (12, 140), (1, 5)), rows=14), {"window": 70}),
    "window, uniform": (
        replace(SMALL, seqs=((1, 190), (12, 140)), rows=14),
        {"window": 70, "uniform": True},
    ),
    "soft cap": (SMALL, {"soft_cap": 2.0}),
    "several splits, uniform": (
        replace(
            SMALL, seqs=((1, 700),), heads=2, kv_heads=1, rows=1, pool_tokens=1024, max_context=1024
        ),
        {"uniform": True, "max_q_len": 1},
    ),
    "sinks, cut between thread blocks": (
        replace(SMALL, seqs=((1, 190), (1, 150)), rows=3),
        {"sinks": True, "max_q_len": 1, "multiprocessors": 5},
    ),
    "sinks, 7 query heads to one, a chunk": (
        replace(SMALL, heads=7, kv_heads=1, seqs=((30, 70), (1, 65)), rows=32),
        {"sinks": True},
    ),
    "sinks, window and soft cap, several splits, uniform": (
        replace(
            SMALL,
            seqs=((1, 700), (3, 690)),
            heads=2,
            kv_heads=1,
            rows=5,
            pool_tokens=2048,
            max_context=1024,
        ),
        {"sinks": True, "window": 600, "soft_cap": 2.0, "uniform": True},
    ),
}


E4M3 = "float8_e4m3fn"

# The 8-bit cache: its type, the batch, options.
QUANTIZED = {
    # Head dim 128 and few thread blocks: more KV tiles than fit into shared memory at once.
    "decode, cut between thread blocks, head dim 128": (
        E4M3,
        replace(SMALL, head_dim=128, seqs=((1, 190), (1, 150), (1, 20)), rows=5),
        {"max_q_len": 1, "multiprocessors": 2},
    ),
    "decode, verify rows and a chunk, uniform": ("int8", RAGGED, {"uniform": True}),
    "7 query heads to one, float16, head dim 128, blocks of 8": (
        "int8",
        replace(
            SMALL,
            heads=7,
            kv_heads=1,
            head_dim=128,
            block_size=8,
            dtype="float16",
            seqs=((9, 190), (1, 65)),
            rows=12,
        ),
        {"multiprocessors": 1},
    ),
    "head dim 80, blocks of 24": (
        "int8",
        replace(SMALL, head_dim=80, block_size=24, pool_tokens=480, seqs=((1, 130),), rows=2),
        {},
    ),
    "head dim 256, blocks of 64": (
        E4M3,
        replace(SMALL, heads=2, head_dim=256, block_size=64, seqs=((1, 190), (20, 20)), rows=21),
        {"multiprocessors": 2},
    ),
    "window and soft cap, uniform": (
        E4M3,
        replace(SMALL, seqs=((1, 190), (12, 140), (1, 5)), rows=14),
        {"window": 70, "soft_cap": 2.0, "uniform": True},
    ),
    "sinks and window, cut between thread blocks": (
        E4M3,
        replace(SMALL, seqs=((1, 190), (12, 140), (1, 5)), rows=14),
        {"sinks": True, "window": 150, "multiprocessors": 5},
    ),
}


def attend(arrays: tuple[Any, ...], attention: Callable = jitted_attention, **options):
    options = {"max_q_len": arrays[0].shape[0]} | options
    device = current_gpu()._replace(cores=options.pop("multiprocessors", 3))
    options |= {"sm_scale": arrays[0].shape[-1] ** -0.5, "device": device}
    if options.pop("sinks", False):
        options["sinks"] = jnp.asarray(sinks_of(arrays[0].shape[1]))
    printed = io.StringIO()  # the race detector prints
    with redirect_stdout(printed):
        out = attention(*arrays, interpret=mosaic_calls.interpreter(), **options)
        out = np.asarray(out, np.float32)
    assert "RACE" not in printed.getvalue(), printed.getvalue()
    return out


def rounded(batch: Batch, arrays: Arrays) -> tuple[jax.Array, ...]:
    q, kv, *rest = inputs(arrays)
    return (q.astype(batch.dtype), kv.astype(batch.dtype), *rest)


def check(batch: Batch, attention: Callable = jitted_attention, **options) -> None:
    """Check like `check_cpu`: half a unit of the type per value's weight, and of the result."""
    kind = {name: options[name] for name in ("window", "soft_cap", "sinks") if name in options}
    arrays = make(batch, **kind)
    out = attend(rounded(batch, arrays), attention, **options)
    rows = arrays.cu_q_lens[arrays.num_seqs]
    assert not out[rows:].any(), "rows of no sequence are not zero"
    out, expected, spread = out[:rows], arrays.expected[:rows], arrays.spread[:rows]
    tolerance = BF16_ROUNDOFF * (spread + np.abs(expected)) + 1e-5
    worst = (np.abs(out - expected) / tolerance).max(initial=0.0)
    assert worst <= 1, f"off by {worst:.3g} times the tolerance"


def quantized(batch: Batch, arrays: Arrays, kv_dtype: str, *, seed: int = 0) -> tuple[Any, ...]:
    """Return the 8-bit cache, with keys and values of different magnitudes.

    Scales are NaN and data is arbitrary where no sequence has a token.
    """
    q, kv, *rest = rounded(batch, arrays)
    rng = np.random.default_rng(seed)
    places = (kv.shape[0], *kv.shape[2:4])
    size = np.stack([10 ** rng.uniform(-6, high, places) for high in (0.5, 3)], axis=1)
    data, scale = quantize_rows(kv.astype(jnp.float32) * size[..., None], kv_dtype)
    return (q, QuantizedKV(data, scale), *rest)


def dense(
    batch: Batch, arrays: Arrays, q, kv: QuantizedKV, window=None, soft_cap=None, sinks=False
):
    """Return the reference attention and the sum of its terms' magnitudes: f64[T, H, D] each."""
    q = np.asarray(q, np.float64)
    cache = np.asarray(
        dequantize_rows(*kv), np.float64
    )  # exact: the product of few bits and a float32
    expected, spread = np.zeros_like(q), np.zeros_like(q)
    for s, (rows, context) in enumerate(batch.seqs):
        positions = np.arange(context)
        blocks = arrays.block_tables[s, positions // batch.block_size]
        mine = cache[blocks, :, :, positions % batch.block_size]  # [context, 2, K, D]
        keys, values = np.repeat(mine, batch.heads // batch.kv_heads, axis=2).swapaxes(0, 1)
        for j in range(rows):
            row, position = arrays.cu_q_lens[s] + j, context - rows + j
            seen = positions <= position
            if window is not None:
                seen &= positions > position - window
            scores = batch.head_dim**-0.5 * np.einsum("hd,phd->hp", q[row], keys[seen])
            if soft_cap is not None:
                scores = soft_cap * np.tanh(scores / soft_cap)
            weights = softmax(scores, sinks=sinks)
            expected[row] = np.einsum("hp,phd->hd", weights, values[seen])
            spread[row] = np.einsum("hp,phd->hd", weights, np.abs(values[seen]))
    return expected, spread


def check_quantized(
    kv_dtype: str, batch: Batch, attention: Callable = jitted_attention, **options
) -> None:
    arrays = make(batch)
    inputs = quantized(batch, arrays, kv_dtype)
    kind = {name: options[name] for name in ("window", "soft_cap", "sinks") if name in options}
    expected, spread = dense(batch, arrays, inputs[0], inputs[1], **kind)
    out = attend(inputs, attention, **options)
    rows = arrays.cu_q_lens[arrays.num_seqs]
    assert not out[rows:].any(), "rows of no sequence are not zero"
    tolerance = BF16_ROUNDOFF * (spread + np.abs(expected))[:rows] + 1e-30
    worst = (np.abs(out - expected)[:rows] / tolerance).max(initial=0.0)
    assert worst <= 1, f"off by {worst:.3g} times the tolerance"


def check_nan_stays() -> None:
    """Check that a NaN among the scales of a sequence's head makes only that head NaN."""
    batch = replace(SMALL, seqs=((1, 70), (2, 90), (1, 17)), rows=5)
    arrays = make(batch)
    q, kv, *rest = quantized(batch, arrays, E4M3)
    clean = attend((q, kv, *rest))
    blocks = arrays.block_tables[:, 3]
    # A key's scale of sequence 0 and head 0, and a value's of sequence 1 and head 1.
    scale = kv.scale.at[blocks[0], 0, 0, 5].set(jnp.nan).at[blocks[1], 1, 1, 5].set(jnp.nan)
    out = attend((q, QuantizedKV(kv.data, scale), *rest))
    hit = np.zeros(out.shape[:2], bool)
    hit[0, :4] = hit[1:3, 4:] = True
    assert np.isnan(out[hit]).all(), "the NaN is lost"
    assert np.array_equal(out[~hit], clean[~hit]), "others are not the same"


def check_same_bits_in_any_company(kv_dtype: str | None = None) -> None:
    """Check that uniform rows have the same bits alone, chunked differently, and in a batch."""
    context = 150
    seqs = ((context, context), (1, 150), (3, 20))
    batch = replace(SMALL, heads=4, seqs=seqs, rows=context + 8)
    arrays = make(batch)

    def last_rows(rows: int, beside: int, **options) -> np.ndarray:
        index = [*range(1, beside + 1), 0]
        counts = [batch.seqs[s][0] for s in index[:-1]] + [rows]
        first = [arrays.cu_q_lens[s] for s in index[:-1]] + [context - rows]
        a = replace(arrays)
        a.block_tables, a.kv_lens = arrays.block_tables.copy(), arrays.kv_lens.copy()
        a.block_tables[: len(index)] = arrays.block_tables[index]
        a.kv_lens[: len(index)] = arrays.kv_lens[index]
        a.cu_q_lens = np.full_like(arrays.cu_q_lens, sum(counts))
        a.cu_q_lens[: len(index) + 1] = np.cumsum([0, *counts])
        a.num_seqs = np.int32(len(index))
        a.q = np.full_like(arrays.q, np.nan)
        for start, count, place in zip(first, counts, a.cu_q_lens, strict=False):
            a.q[place : place + count] = arrays.q[start : start + count]
        mine = a.cu_q_lens[len(index) - 1]
        arguments = rounded(batch, a) if kv_dtype is None else quantized(batch, a, kv_dtype)
        return attend(arguments, **options)[mine : mine + rows]

    @cache
    def whole(**options) -> np.ndarray:
        return last_rows(context, 0, **options)

    def same(rows: int, beside: int, **options) -> bool:
        return np.array_equal(last_rows(rows, beside, **options), whole(**options)[-rows:])

    assert same(1, 2, uniform=True)
    if kv_dtype is not None:
        return
    assert same(1, 0, uniform=True)
    assert same(33, 2, uniform=True)
    assert not same(1, 0, multiprocessors=5), "the balanced form too: this shows nothing"


def check_gradient() -> None:
    """Check that a gradient leaves the kernel's bits, and is the one that plain XLA has."""
    batch = replace(SMALL, seqs=((1, 25), (5, 9)), rows=7)
    q, kv, *of_batch = inputs(make(batch))
    qkv = jnp.concatenate([q, q[:, : 2 * batch.kv_heads]], axis=1)
    qkv, kv = (jnp.where(jnp.isnan(x), 0, x).astype(jnp.bfloat16) for x in (qkv, kv))
    cos, sin = (f(jnp.arange(7 * 32).reshape(7, 32) / 100) for f in (jnp.cos, jnp.sin))
    tables = of_batch[0]
    at = [(0, 24), *((1, position) for position in range(4, 9))]  # sequences and positions
    slots = [int(tables[s, p // 16]) * 16 + p % 16 for s, p in at] + [kv.shape[0] * 16]

    def attend(qkv, implementation):
        options = {"sm_scale": 0.1, "implementation": implementation}
        rest = cos, sin, jnp.asarray(slots, jnp.int32), *of_batch
        return rotate_write_attend(qkv, kv, *rest, **options)[1][:6]

    def loss(qkv, implementation):
        out = attend(qkv, implementation)
        return jnp.sum(
            out.astype(jnp.float32) * jnp.sin(jnp.arange(out.size)).reshape(out.shape)
        ), out

    of_qkv = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)
    ours, out = of_qkv(qkv, "mosaic")
    served = jax.jit(attend, static_argnums=1)(qkv, "mosaic")
    np.testing.assert_array_equal(out.view(jnp.uint16), served.view(jnp.uint16))
    theirs, _ = of_qkv(qkv, "xla")
    assert float(jnp.abs(theirs.astype(jnp.float32)).max()) > 0.1
    np.testing.assert_array_equal(ours, theirs)


def check_forward() -> None:
    """Check a whole model with `implementation="mosaic"` against the reference."""
    model = tiny_model(head_dim=64, dtype="bfloat16")
    spec, block_size, context = model.spec, 16, (70, 40, 5)
    rng = np.random.default_rng(0)
    tables = rng.permutation(32).reshape(4, 8).astype(np.int32)
    rows = [(0, 69), *((1, position) for position in range(36, 40)), *((2, i) for i in range(5))]
    positions = np.array([position for _, position in rows], np.int32)
    slots = [tables[s, p // block_size] * block_size + p % block_size for s, p in rows]
    layer = (32, 2, spec.num_key_value_heads, block_size, spec.head_dim)
    args = (
        random_leaves(model),
        tuple(
            jnp.asarray(rng.standard_normal(layer), jnp.bfloat16)
            for _ in range(spec.num_hidden_layers)
        ),
        jnp.asarray(rng.integers(0, spec.vocab_size, len(rows)), jnp.int32),
        jnp.asarray(positions),
        jnp.asarray(slots, jnp.int32),
        jnp.asarray(tables),
        jnp.asarray([*context, 9], jnp.int32),
        jnp.asarray([0, 1, 5, 10, 10], jnp.int32),
        jnp.int32(3),
    )
    found, wanted = (
        np.asarray(jax.jit(partial(model.forward, implementation=name))(*args)[1], np.float32)
        for name in ("mosaic", "reference")
    )
    assert np.abs(wanted).max() > 0.1
    assert np.abs(found - wanted).max() < 0.03 * np.abs(wanted).max()


FAULTS = {  # in both kernels
    "sees one key too many": ("(query - first_key, scores", "(query + 1 - first_key, scores"),
    "takes the last tile for unmasked": ("item.position + 1, jnp", "item.position + 64, jnp"),
    "forgets to rescale": ("part * gpu.columns(decay, part.shape[1])", "part"),
    "reads the wrong head": ("(2 * g.kv_heads) + item.head)", "(2 * g.kv_heads))"),
    "adds parts up without their sums": ("acc * decay + part(i) * factor", "acc + part(i)"),
    "adds the sinks to every part": ("sink + jnp.where(item.has_sink, 0.0, NO_SCORE)", "sink"),
    "takes the sinks of another head": ("sinks.at[item.head, row_group]", "sinks.at[0, row_group]"),
    "leaves decodes of no sequence undefined": ("pl.when(count == 0)", "pl.when(count < 0)"),
    "stores a decode in the place of another": (
        "(token * g.kv_heads + head)",
        "(head * g.tokens + token)",
    ),
}
FAULTS_OF = {
    "wgmma": {
        "leaves NaN among the values": (
            "jnp.where(exists, part[...], jnp.zeros((), self.value_dtype))",
            "part[...]",
        ),
        "writes results that are still being copied": (
            "gpu.wait_copied_out(read_only=True)\n            out[...]",
            "out[...]",
        ),
        "copies results before they are written": (
            "gpu.commit()\n\n            def copy_slice",
            "pass\n\n            def copy_slice",
        ),
        "does not wait for a free slot": ("gpu.wait(shared.k_free.at[slot])\n", "pass\n"),
        "does not wait for keys": (
            "gpu.wait(shared.k_full.at[slot])\n        scores",
            "scores",
        ),
    },
    "mma": {
        "leaves NaN among the values": (
            "right = jnp.where(index < exists - row, right, jnp.zeros((), right.dtype))",
            "pass",
        ),
        "copies to a slot that is being read": (
            "self._synchronize()  # all have read the slot that is filled next",
            "pass",
        ),
        "does not wait for keys and values": ("gpu.wait(shared.full.at[slot])", "pass"),
        "stores slices of other tiles": (
            "gpu.loop(0, item.slices, store_slice)",
            "gpu.loop(0, 8, store_slice)",
        ),
        "copies the tile after the next": ("copy(i + ahead)", "copy(i + ahead + 1)"),
    },
}
FAULTS_OF_8_BITS = {
    "wgmma": {
        "takes the scales of another head": (
            "copy(j, at, scale,",
            "copy(j, at - item.head, scale,",
        ),
        "forgets the values' scales": (
            "v_scale = self._value_scale(extra.v_scale.at[slot], exists)",
            "v_scale = self._value_scale(extra.v_scale.at[slot], 0) + 1",
        ),
        "leaves NaN among the scales": (
            "jnp.where(gpu.column_index(scale.shape[0]) < exists, scale, 0.0)",
            "scale",
        ),
        "leaves NaN among the values": ("self._clean(values, exists)", "pass"),
        "adds the other warpgroup's up without its sum": (
            "exp2(their_top - new_top)",
            "exp2(their_top - their_top)",
        ),
        "hands over while the last result is being copied": (
            "gpu.wait(shared.quantized.out_free.at[0])",
            "pass",
        ),
        "gives memory back before the scales are read": (
            "v_scale = self._value_scale(extra.v_scale.at[slot], exists)\n"
            "            weights = (weights * gpu.rows(v_scale)).astype(self.value_dtype)\n"
            "            gpu.commit()\n"
            "            gpu.arrive(shared.v_free.at[slot])\n",
            "gpu.arrive(shared.v_free.at[slot])\n"
            "            v_scale = self._value_scale(extra.v_scale.at[slot], exists)\n"
            "            weights = (weights * gpu.rows(v_scale)).astype(self.value_dtype)\n",
        ),
    },
    "mma": {
        "takes the scales of another head": (
            "inputs.scale.at[keys], shared",
            "inputs.scale.at[keys - item.head], shared",
        ),
        "forgets the values' scales": (
            "scale(shared=shared.v_scale, from_keys=self._to_values)",
            "jnp.ones_like(k_scale)",
        ),
        "leaves NaN among the scales": (
            "v_scale = jnp.where(gpu.column_index(KV_TILE) < exists, v_scale, 0.0)",
            "pass",
        ),
        "multiplies values that are not converted": (
            "values = self._converted(values, target)",
            "values = target",
        ),
    },
}


def faulty_attention(old: str, new: str) -> Callable:
    """Return the attention of modules in which `old`, which occurs once, is replaced by `new`."""
    names = [f"forge_kernels.attention.{name}" for name in MODULES]
    modules = {name: importlib.import_module(name) for name in names}
    texts = {name: inspect.getsource(module) for name, module in modules.items()}
    assert sum(text.count(old) for text in texts.values()) == 1, "there is no such place"
    try:
        for name, text in texts.items():
            sys.modules[name] = module = type(sys)(name)
            exec(compile(text.replace(old, new), name, "exec"), module.__dict__)
        return module.jitted_attention
    finally:
        sys.modules.update(modules)


def check_fault(old: str, new: str, check: Callable = check, head_dim: int = 64, **options) -> None:
    """Check that a fault breaks the contract: a wrong result, a race, or an interpreter error."""
    attention = faulty_attention(old, new)
    # Thread blocks take six of the 16 KV tiles, or three if there are twice as many: units are cut.
    seqs = ((1, 250), (2, 150), (1, 60))
    batch = replace(SMALL, head_dim=head_dim, seqs=seqs, rows=4, max_context=256)
    try:
        check(batch, attention=attention, multiprocessors=3, **options)
    except AssertionError:
        return
    except Exception:
        reset_gpu_interpret_mode_state()
        return
    raise LookupError("nobody noticed")


def checks(kernel: str, group: str) -> dict[str, Callable[[], None]]:
    every = all_checks(kernel, group.removeprefix("some "))
    if group.startswith("some "):
        first, step = (0, 4) if group == "some faults" else (kernel == "mma", 2)
        every = dict([*every.items()][first::step])
    return every


def all_checks(kernel: str, group: str) -> dict[str, Callable[[], None]]:
    match group:
        case "cases":
            cases = CASES.items()
            return {name: partial(check, batch, **options) for name, (batch, options) in cases}
        case "quantized":
            checks = {
                f"{kv_dtype}: {name}": partial(check_quantized, kv_dtype, batch, **options)
                for name, (kv_dtype, batch, options) in QUANTIZED.items()
            }
            return checks | {"NaN among the scales": check_nan_stays}
        case "bits":
            return {
                "bits": check_same_bits_in_any_company,
                "bits, float8": partial(check_same_bits_in_any_company, E4M3),
                "forward": check_forward,
                "gradient": check_gradient,
            }
        case "faults":
            found = FAULTS | FAULTS_OF[kernel]
            faults = {
                name: partial(
                    check_fault,
                    *fault,
                    sinks="sinks" in name,
                    **({"max_q_len": 1} if "decode" in name else {}),
                )
                for name, fault in found.items()
            }
            of_8_bits = partial(check_quantized, E4M3)
            for name, fault in FAULTS_OF_8_BITS[kernel].items():
                faults[f"8 bits: {name}"] = partial(
                    check_fault, *fault, check=of_8_bits, head_dim=128
                )
            return faults
    raise SystemExit(f"no group {group}")


def main() -> None:
    failed, seconds = {}, {}
    kernel, group = sys.argv[1:]
    with mosaic_calls.interpreted(detect_races=True), described(DEVICES[kernel]):
        for name, run in checks(kernel, group).items():
            start = time.perf_counter()
            try:
                run()
            except (AssertionError, LookupError) as error:
                failed[name] = str(error).strip().splitlines()[0]
            seconds[name] = round(time.perf_counter() - start, 1)
    print(json.dumps({"failed": failed, "seconds": seconds}))


if __name__ == "__main__":
    main()
