"""Gradients of the kernels: the served bits forward, the plain function's gradient backward."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from forge_kernels.attention import (
    QuantizedKV,
    ragged_paged_attention,
    rotate_and_write,
    rotate_write_attend,
)
from forge_kernels.attention.api import attention_without_gradient
from forge_kernels.attention.quantized import dequantize_rows, quantize_rows
from forge_kernels.blocks import Blocks
from forge_kernels.embed import embed
from forge_kernels.experts import ClampedSwiGLU, mix_experts
from forge_kernels.experts.activations import swiglu
from forge_kernels.experts.reference import reference_experts
from forge_kernels.linear import (
    BlockPacking,
    OrderedWeight,
    PackedWeight,
    Packing,
    PlainWeight,
    Quantization,
    QuantizedWeight,
    linear,
    pack,
    pack_blocks,
    pack_experts,
)
from forge_kernels.linear.quantized import float_rows
from forge_kernels.linear.reference import reference_linear
from forge_kernels.linear.unpacked import unpacked
from forge_kernels.rope import apply_rope, inverse_frequencies, rope_tables

pytestmark = pytest.mark.quick_compile

T, H, K, D, BS, N, S = 40, 4, 2, 32, 8, 24, 4  # T includes padding
SEQS = ((1, 9), (19, 70), (5, 5))  # rows and context; a decode, a chunk and a short prompt
ROWS = sum(rows for rows, _ in SEQS)
SCALE = 0.3


def distance(ours: Any, theirs: Any) -> float:
    """Return the norm of the difference by the norm of `theirs`."""
    ours, theirs = (np.asarray(x, np.float64) for x in (ours, theirs))
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


# ---- attention ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """The arrays of one call; unused entries of the cache and of padding rows are NaN."""

    qkv: jax.Array
    kv: jax.Array | QuantizedKV
    cos: jax.Array
    sin: jax.Array
    slots: jax.Array
    batch: tuple[jax.Array, ...]

    def attend(self, qkv: jax.Array, kv: Any, sinks: jax.Array | None = None, **options: Any):
        options = {"sm_scale": SCALE, "num_tokens": jnp.int32(ROWS), **options}
        rest = self.cos, self.sin, self.slots, *self.batch
        return rotate_write_attend(qkv, kv, *rest, sinks=sinks, **options)


def make_step(dtype: Any = jnp.float32) -> Step:
    """Return numbers that bfloat16 represents."""
    rng = np.random.default_rng(0)
    tables, lens, starts = np.full((S, 12), 10**6, np.int32), np.zeros(S, np.int32), [0]
    slots, positions = np.full(T, N * BS, np.int32), np.zeros(T, np.int32)
    kv, blocks = np.full((N, 2, K, BS, D), np.nan, np.float32), iter(rng.permutation(N))
    for seq, (rows, context) in enumerate(SEQS):
        count = -(-context // BS)
        tables[seq, :count] = [next(blocks) for _ in range(count)]
        lens[seq] = context
        for position in range(context):
            block, offset = tables[seq, position // BS], position % BS
            kv[block, :, :, offset] = rng.standard_normal((2, K, D))
            row = starts[-1] + position - (context - rows)
            if position >= context - rows:
                slots[row], positions[row] = block * BS + offset, position
        starts.append(starts[-1] + rows)
    starts += [starts[-1]] * (S + 1 - len(starts))
    qkv = rng.standard_normal((T, H + 2 * K, D))
    qkv[ROWS:] = np.nan
    cos, sin = rope_tables(jnp.asarray(positions), inverse_frequencies(D, 10_000.0))
    batch = tables, lens, np.asarray(starts, np.int32), np.int32(len(SEQS))
    half = [jnp.asarray(x).astype(jnp.bfloat16) for x in (qkv, kv)]
    arrays = [x.astype(dtype) for x in half]
    return Step(*arrays, cos, sin, jnp.asarray(slots), tuple(map(jnp.asarray, batch)))


def stored(kv: jax.Array, form: str) -> Any:
    """Store a float32 cache as bfloat16 in a CPU's form, or in 8 bits."""
    if form == "bfloat16":
        return lax.bitcast_convert_type(kv.astype(jnp.bfloat16), jnp.uint16)
    return QuantizedKV(*quantize_rows(kv, jnp.int8))


def by_weights(out: jax.Array) -> jax.Array:
    """Return a sum of all numbers in rows of sequences, each with its own weight."""
    weights = jnp.asarray(np.random.default_rng(1).standard_normal((ROWS, H, D)), jnp.float32)
    return jnp.sum(out[:ROWS].astype(jnp.float32) * weights)


SINKS = jnp.asarray([0.3, -1.0, 2.0, -np.inf], jnp.float32)
SCORINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 7},
    "soft cap": {"window": 20, "soft_cap": 2.0},
    "sinks": {"sinks": SINKS},
}


def gradients(step: Step, *, implementation: str, sinks: Any = None, **options: Any) -> Any:
    """Return (loss, gradients of qkv, the cache and sinks) of one call with a float32 cache."""

    def loss(qkv, kv, sinks):
        kv, out = step.attend(qkv, kv, sinks, implementation=implementation, **options)
        kept = jnp.where(jnp.isnan(kv), 0.0, kv)
        return by_weights(out) + jnp.sum(jnp.sin(kept))  # a later call would read the cache

    of_all = jax.jit(jax.value_and_grad(loss, (0, 1, 2) if sinks is not None else (0, 1)))
    return of_all(step.qkv, step.kv, sinks)


@pytest.mark.parametrize("scoring", SCORINGS)
def test_gradient_is_that_of_the_reference_with_a_float32_cache(scoring):
    step, options = make_step(), SCORINGS[scoring]
    loss, ours = gradients(step, implementation="xla", **options)
    reference, theirs = gradients(step, implementation="reference", **options)
    assert loss == pytest.approx(float(reference), rel=1e-5, abs=1e-3)
    assert (ours[0][ROWS:] == 0).all()
    for mine, other in zip(ours, theirs, strict=True):
        other = jnp.where(jnp.isnan(other), 0.0, other)  # the reference's, in padding rows
        mine = jnp.where(jnp.isnan(mine), 0.0, mine)
        assert distance(mine, other) < 1e-5


def test_comparison_detects_another_window():
    step = make_step()
    _, ours = gradients(step, implementation="xla", window=7)
    _, theirs = gradients(step, implementation="reference", window=8)
    assert distance(ours[0][:ROWS], theirs[0][:ROWS]) > 0.01


@pytest.mark.parametrize("scoring", SCORINGS)
def test_gradient_is_that_of_finite_differences(scoring):
    step, options = make_step(), dict(SCORINGS[scoring])
    sinks = options.pop("sinks", None)

    @jax.jit
    def loss(qkv):
        return by_weights(step.attend(qkv, step.kv, sinks, implementation="xla", **options)[1])

    slope, rng = jax.jit(jax.grad(loss))(step.qkv), np.random.default_rng(2)
    for _ in range(3):
        direction = jnp.asarray(rng.standard_normal(step.qkv.shape), jnp.float32)
        ahead, behind = (loss(step.qkv + h * direction) for h in (1e-2, -1e-2))
        want = float(jnp.sum(slope[:ROWS] * direction[:ROWS]))
        assert float(ahead - behind) / 2e-2 == pytest.approx(want, rel=1e-2, abs=0.05)


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("form", ["bfloat16", "int8"])
def test_kernels_have_their_own_bits_and_the_gradient_of_the_reference(form, scoring):
    """The reference reads a float32 cache with the same numbers, as constants and as rows."""
    step, options = make_step(jnp.bfloat16), dict(SCORINGS[scoring])
    sinks = options.pop("sinks", None)
    kv = stored(make_step().kv, form)
    options |= {"implementation": "cpu", "kv_dtype": "bfloat16" if form == "bfloat16" else None}

    def served(qkv, sinks):
        return step.attend(qkv, kv, sinks, **options)

    def loss(qkv, sinks):
        kv, out = served(qkv, sinks)
        return by_weights(out), (kv, out)

    argnums = 0 if sinks is None else (0, 1)
    ours, (found, out) = jax.jit(jax.grad(loss, argnums, has_aux=True))(step.qkv, sinks)
    want_kv, want_out = jax.jit(served)(step.qkv, sinks)
    jax.tree.map(np.testing.assert_array_equal, found, want_kv)
    np.testing.assert_array_equal(out[:ROWS].view(jnp.uint16), want_out[:ROWS].view(jnp.uint16))
    assert (out[ROWS:] == 0).all()

    if form == "bfloat16":
        floats = lax.bitcast_convert_type(want_kv, jnp.bfloat16).astype(jnp.float32)
    else:
        floats = dequantize_rows(*want_kv)
    theirs = reference_gradient(step, floats, sinks, **options)
    ours = (ours,) if sinks is None else ours
    for mine, other in zip(ours, theirs, strict=True):
        # The gradient of a bfloat16 array is rounded to bfloat16, by 2**-9 at most.
        assert distance(mine[:ROWS], other[:ROWS]) < 2**-8


def reference_gradient(step: Step, floats: jax.Array, sinks: Any, **options: Any) -> Any:
    """Return the gradients of qkv and sinks if this call's rows in the cache were differentiable.

    The gradient of the rows is that of their numbers in the cache, so rounding is the identity.
    """
    options = {name: options.get(name) for name in ("window", "soft_cap")}

    def loss(qkv, sinks):
        turned = apply_rope(qkv[:, : H + K], step.cos, step.sin)
        rows = jnp.stack([turned[:, H:], qkv[:, H + K :]], axis=1)
        block, offset = step.slots // BS, step.slots % BS
        kept = floats.at[block, :, :, offset].get(mode="fill", fill_value=0)
        rows = lax.stop_gradient(kept - rows) + rows
        kv = floats.at[block, :, :, offset].set(rows, mode="drop")
        out = ragged_paged_attention(
            turned[:, :H], kv, *step.batch, sm_scale=SCALE, sinks=sinks,
            implementation="reference", **options,
        )  # fmt: skip
        return by_weights(out)

    qkv = jnp.where(jnp.isnan(step.qkv), 0, step.qkv).astype(jnp.float32)
    argnums = (0,) if sinks is None else (0, 1)
    return jax.jit(jax.grad(loss, argnums))(qkv, sinks)


def test_gradient_passes_from_one_call_to_another_only_with_a_float32_cache():
    step = make_step(jnp.bfloat16)
    exact = make_step()
    later = replace(step, slots=jnp.full(T, N * BS, jnp.int32))  # writes nothing

    def loss(qkv, kv, kv_dtype):
        options = {"implementation": "xla", "kv_dtype": kv_dtype}
        kv, _ = step.attend(qkv, kv, **options)
        _, out = later.attend(lax.stop_gradient(qkv), kv, **options)
        return by_weights(out)

    through = jax.grad(loss)(step.qkv, exact.kv, None)
    assert float(jnp.abs(through[:ROWS].astype(jnp.float32)).max()) > 0.1
    constant = jax.grad(loss)(step.qkv, stored(exact.kv, "bfloat16"), jnp.bfloat16)
    assert (constant == 0).all()
    as_floats = exact.kv.astype(jnp.bfloat16)  # as on a GPU
    assert (jax.grad(loss)(step.qkv, as_floats, None) == 0).all()
    with pytest.raises(NotImplementedError, match="only if it is float32"):
        jax.grad(loss, argnums=1)(step.qkv, as_floats, None)


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize("form", ["bfloat16", "int8"])
@pytest.mark.parametrize("implementation", ["cpu", "xla", "reference"])
def test_program_without_a_gradient_is_unchanged(implementation, form):
    """The calls without any derivative lower to the same text."""
    step = make_step(jnp.bfloat16)
    kv, count = stored(make_step().kv, form), jnp.int32(ROWS)

    def unit(qkv, kv, count, *rest):
        options = {"kv_dtype": jnp.dtype(form), "implementation": implementation}
        options |= {"max_q_len": None, "uniform": False, "sm_scale": SCALE}
        return rotate_write_attend(qkv, kv, *rest, num_tokens=count, **options)

    def bare(qkv, kv, count, cos, sin, slots, *batch):
        options: Any = {"kv_dtype": jnp.dtype(form), "implementation": implementation}
        q, kv = rotate_and_write(qkv, kv, cos, sin, slots, num_tokens=count, **options)
        more = {"max_q_len": None, "uniform": False, "window": None, "soft_cap": None}
        scoring = {"sm_scale": SCALE, "sinks": None, **more, **options}
        return kv, attention_without_gradient(q, kv, *batch, **scoring)

    bare.__name__ = unit.__name__
    rest = step.cos, step.sin, step.slots, *step.batch
    texts = [jax.jit(f).lower(step.qkv, kv, count, *rest).as_text() for f in (unit, bare)]
    assert texts[0] == texts[1]


def test_backward_pass_needs_memory_for_one_tile_of_scores():
    """Doubling the context adds less than half of a float for each pair of tokens and heads."""

    def temp(tokens: int) -> int:
        blocks = tokens // BS
        shapes = (
            jax.ShapeDtypeStruct((tokens, H, D), jnp.float32),
            jax.ShapeDtypeStruct((blocks, 2, K, BS, D), jnp.float32),
        )
        batch = (
            jnp.arange(blocks, dtype=jnp.int32)[None],
            jnp.asarray([tokens], jnp.int32),
            jnp.asarray([0, tokens], jnp.int32),
            jnp.int32(1),
        )

        def loss(q, kv):
            return ragged_paged_attention(q, kv, *batch, sm_scale=SCALE, implementation="xla").sum()

        compiled = jax.jit(jax.grad(loss, (0, 1))).lower(*shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    more = temp(4096) - temp(2048)
    assert more < 0.5 * 4 * H * (4096**2 - 2048**2) / 4


# ---- products -----------------------------------------------------------------------------------


def random(*shape: int, seed: int = 0, dtype: Any = ml_dtypes.bfloat16) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def weighted(y: jax.Array) -> jax.Array:
    """Return a sum of all numbers, each with its own weight."""
    return jnp.sum(y.astype(jnp.float32) * jnp.asarray(random(*y.shape, seed=8, dtype=np.float32)))


def pack_matrix(w: np.ndarray, form: str, paired: bool = False) -> PackedWeight:
    packing = Packing(form, *w.shape, paired)  # type: ignore[arg-type]
    weight, scale = pack(w, packing)
    return PackedWeight(jnp.asarray(weight), None if scale is None else jnp.asarray(scale), packing)


def matrix_of(w: PackedWeight) -> jax.Array:
    return unpacked(w.weight, w.scale, w.packing)


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize(("form", "error"), [("bf16", 0.0), ("int8", 0.01), ("int4", 0.12)])
@pytest.mark.parametrize("paired", [False, True])
def test_unpacked_matrix_is_the_packed_one(form, error, paired):
    w = random(70, 45)
    found = distance(matrix_of(pack_matrix(w, form, paired)), w.astype(np.float32))
    assert error / 3 <= found <= error


BLOCKS = {
    "8 bits": Blocks("int8", 32, 32),
    "8 bits, two levels with minima": Blocks("int8", 32, 256, minima=True),
    "4 bits": Blocks("int4", 32, 32),
    "4 bits, two levels with minima": Blocks("int4", 16, 256, minima=True),
}


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("paired", [False, True])
def test_unpacked_blocks_are_the_values(kind, paired):
    from tests.kernels.test_blocks import make

    values = make(BLOCKS[kind], 70, 512)
    packing = BlockPacking(BLOCKS[kind], 70, 512, paired)
    weight = pack_blocks(lambda at: values.each(lambda array: array[at]), packing)
    found = matrix_of(PackedWeight(jnp.asarray(weight), None, packing))
    np.testing.assert_array_equal(found, values.floats())


def operands(rows: int, outputs: int, inputs: int, *, swiglu: bool) -> dict[str, Any]:
    """Return the options of a product with all fused operations, some rows being padding."""
    options = {"norm": (jnp.asarray(random(inputs, seed=3)), 1e-5), "swiglu": swiglu}
    if not swiglu:
        options["residual"] = jnp.asarray(random(rows, outputs, seed=4))
    return options


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize("form", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("swiglu", [False, True])
def test_packed_product_has_its_own_bits_and_the_gradient_of_its_matrix(form, swiglu):
    rows, x, w = 7, random(9, 64), pack_matrix(random(80, 64, seed=1), form, swiglu)
    x[rows:] = np.nan
    options = operands(9, 80, 64, swiglu=swiglu)

    def served(x, options):
        return linear(x, w, num_rows=jnp.int32(rows), **options)

    def summed(y):
        return weighted(y[:rows])

    def loss(x, norm, residual):
        given = {**options, "norm": (norm, 1e-5)}
        y = served(x, given if residual is None else {**given, "residual": residual})
        return summed(y), y

    def plain(x, norm, residual):
        given = {**options, "norm": (norm, 1e-5), "residual": residual}
        return summed(reference_linear(x, matrix_of(w), **given))

    arrays = [jnp.asarray(x), options["norm"][0], options.get("residual")]
    argnums = tuple(i for i, array in enumerate(arrays) if array is not None)
    ours, y = jax.jit(jax.grad(loss, argnums, has_aux=True))(*arrays)
    want = jax.jit(lambda x: served(x, options))(arrays[0])
    np.testing.assert_array_equal(y[:rows].view(jnp.uint16), want[:rows].view(jnp.uint16))
    assert (y[rows:] == 0).all() and (ours[0][rows:] == 0).all()
    arrays[0] = arrays[0][:rows]
    arrays[2] = None if arrays[2] is None else arrays[2][:rows]
    theirs = jax.grad(plain, argnums)(*arrays)
    # Gradients are rounded to bfloat16.
    for mine, other in zip(ours, theirs, strict=True):
        assert distance(mine[: len(other)], other) < 2**-8


@pytest.mark.usefixtures("cpu_kernels")
def test_bfloat16_leaf_in_the_packed_shape_has_a_gradient_in_that_shape():
    """A step of gradient descent in the packed layout is the packed matrix after that step."""
    x, w = jnp.asarray(random(9, 64)), random(70, 64, seed=1)
    packed = pack_matrix(w, "bf16")

    def loss(matrix):
        return weighted(linear(x, matrix))

    leaf = lax.bitcast_convert_type(packed.weight, jnp.bfloat16)
    value, slope = jax.value_and_grad(lambda leaf: loss(replace(packed, weight=leaf)))(leaf)
    assert slope.dtype == jnp.bfloat16 and slope.shape == packed.weight.shape
    assert value == loss(packed)

    def plain(w):
        return weighted(reference_linear(x.astype(jnp.float32), w))

    by_matrix = jax.grad(plain)(jnp.asarray(w.astype(np.float32)))
    assert distance(matrix_of(replace(packed, weight=slope)), by_matrix) < 2**-8
    moved = replace(packed, weight=leaf - slope)
    repacked = pack_matrix(np.asarray(matrix_of(moved)).astype(ml_dtypes.bfloat16), "bf16")
    np.testing.assert_array_equal(moved.weight.view(jnp.uint16), repacked.weight)

    tokens = jnp.asarray([3, 3, 69])
    by_table = jax.grad(lambda leaf: jnp.sum(embed(replace(packed, weight=leaf), tokens)))(leaf)
    want = np.zeros((70, 64))
    want[3], want[69] = 2, 1
    np.testing.assert_array_equal(matrix_of(replace(packed, weight=by_table)), want)


@pytest.mark.usefixtures("cpu_kernels")
def test_integer_weights_have_no_gradient_and_their_scales_do():
    x, w = jnp.asarray(random(9, 64)), pack_matrix(random(70, 64, seed=1), "int8")

    def loss(weight, scale):
        return jnp.sum(linear(x, replace(w, weight=weight, scale=scale), out_dtype=jnp.float32))

    with pytest.raises(TypeError, match="grad requires real- or complex-valued inputs"):
        jax.grad(loss)(w.weight, w.scale)
    by_scale = jax.grad(loss, argnums=1)(w.weight, w.scale)[:70]
    want = (x.astype(jnp.float32) @ (matrix_of(w) / w.scale[:70, None]).T).sum(axis=0)
    assert distance(by_scale, want) < 1e-5


def quantized(values: str, activations: str | None = None, *, zeros: bool = False) -> Any:
    rng = np.random.default_rng(5)
    group = 64 if activations is None else 128
    q = Quantization(
        values=values, outputs=300, inputs=128, group=group, zeros=zeros, activations=activations
    )  # type: ignore[arg-type]
    arrays: dict[str, Any] = {"zero": None, "input_scale": None}
    stored = q.weight
    if values == "fp8":
        data = (rng.standard_normal(stored.shape) * 100).astype(ml_dtypes.float8_e4m3fn)
        arrays["weight"] = jnp.asarray(data.view(np.uint8))
    else:
        low, high = (-127, 128) if values == "int8" else (0, 256)
        arrays["weight"] = jnp.asarray(rng.integers(low, high, stored.shape), stored.dtype)
    if values == "mxfp4":
        arrays["scale"] = jnp.asarray(rng.integers(118, 122, q.scale.shape), jnp.uint8)
    else:
        arrays["scale"] = jnp.asarray(rng.uniform(0.001, 0.002, q.scale.shape), jnp.float32)
    if q.zero is not None:
        arrays["zero"] = jnp.asarray(rng.integers(0, 16, q.zero.shape), jnp.uint8)
    return QuantizedWeight(**arrays, quantization=q)


@pytest.mark.parametrize(
    ("values", "activations", "zeros"),
    [
        ("int8", None, False),
        ("int8", "int8", False),
        ("fp8", None, False),
        ("fp8", "fp8", False),
        ("int4", None, False),
        ("int4", None, True),
        ("mxfp4", None, False),
    ],
)
def test_quantized_product_has_the_gradient_of_its_floats(values, activations, zeros):
    """Rounded activations count as the identity: the derivative of a rounding would be zero."""
    w, x = (
        quantized(values, activations, zeros=zeros),
        jnp.asarray(random(5, 128, dtype=np.float32)),
    )

    def loss(x):
        return weighted(linear(x, w))

    def plain(x):
        return weighted(reference_linear(x, float_rows(w)))

    product = jax.jit(linear)(x, w)
    rounding = 0.05 if activations else 1e-5
    assert distance(product, reference_linear(x, float_rows(w))) < rounding
    assert distance(jax.jit(jax.grad(loss))(x), jax.grad(plain)(x)) < 1e-5


def test_reordered_columns_pass_a_gradient_in_16_bits():
    order = jnp.asarray(np.random.default_rng(0).permutation(64), jnp.int32)
    x, w = jnp.asarray(random(5, 64)), jnp.asarray(random(30, 64, seed=1))
    weight = OrderedWeight(PlainWeight(w), order)
    slope = jax.grad(lambda x: jnp.sum(linear(x, weight).astype(jnp.float32)))(x)
    want = jax.grad(lambda x: jnp.sum(linear(x[:, order], w).astype(jnp.float32)))(x)
    assert distance(slope, want) < 2**-8


# ---- experts ------------------------------------------------------------------------------------


def mixture(dtype: Any, rows: int = 21, count: int = 5) -> tuple[jax.Array, ...]:
    """Return x, gate_up, down, experts and weights; the last expert has no rows."""
    rng = np.random.default_rng(7)
    experts = np.argsort(rng.standard_normal((rows, count - 1)), axis=1)[:, :2]
    arrays = (
        random(rows, 32, dtype=np.float32),
        random(count, 96, 32, seed=1, dtype=np.float32) / 6,
        random(count, 32, 48, seed=2, dtype=np.float32) / 7,
    )
    x, gate_up, down = (jnp.asarray(array).astype(jnp.bfloat16).astype(dtype) for array in arrays)
    weights = jnp.asarray(rng.uniform(0.1, 1, (rows, 2)), jnp.float32)
    return x, gate_up, down, jnp.asarray(experts, jnp.int32), weights


@pytest.mark.parametrize("activation", [swiglu, ClampedSwiGLU(limit=1.0, alpha=1.7)])
def test_experts_have_the_gradient_of_the_reference(activation):
    x, gate_up, down, experts, weights = mixture(jnp.float32)
    biases = None
    if activation is not swiglu:
        biases = (
            jnp.asarray(random(5, 96, dtype=np.float32)),
            jnp.asarray(random(5, 32, dtype=np.float32)),
        )

    def loss(form, x, gate_up, down, weights, biases):
        y = form(x, gate_up, down, experts, weights, biases=biases, activation=activation)
        return weighted(y)

    arrays = x, gate_up, down, weights, biases
    argnums = (0, 1, 2, 3) if biases is None else (0, 1, 2, 3, 4)
    ours, theirs = (
        jax.jit(jax.value_and_grad(partial(loss, form), argnums))(*arrays)
        for form in (mix_experts, reference_experts)
    )
    assert float(ours[0]) == pytest.approx(float(theirs[0]), rel=1e-4)
    for mine, other in zip(jax.tree.leaves(ours[1]), jax.tree.leaves(theirs[1]), strict=True):
        assert distance(mine, other) < 1e-5
    assert (ours[1][1][4] == 0).all()


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize("form", ["bf16", "int8", "int4"])
def test_packed_experts_have_their_own_bits_and_the_gradient_of_their_matrices(form):
    x, gate_up, down, experts, weights = mixture(jnp.bfloat16)
    rows = 17
    x = x.at[rows:].set(jnp.nan)
    packed = []
    for w, paired in ((gate_up, True), (down, False)):
        packing = Packing(form, *w.shape[1:], paired, len(w))  # type: ignore[arg-type]
        arrays = pack_experts(np.asarray(w), packing)
        packed.append(
            PackedWeight(*(None if a is None else jnp.asarray(a) for a in arrays), packing)
        )

    def served(x, weights):
        return mix_experts(x, *packed, experts, weights, num_rows=jnp.int32(rows))

    def loss(x, weights):
        y = served(x, weights)
        return weighted(y[:rows]), y

    (by_x, by_weights), y = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(x, weights)
    want = jax.jit(served)(x, weights)
    np.testing.assert_array_equal(y[:rows].view(jnp.uint16), want[:rows].view(jnp.uint16))
    assert (y[rows:] == 0).all() and (by_x[rows:] == 0).all()

    floats = [
        jnp.stack([matrix_of(jax.tree.map(lambda a, e=e: a[e], w)) for e in range(5)])
        for w in packed
    ]
    plain = jax.grad(
        lambda x, weights: weighted(reference_experts(x, *floats, experts[:rows], weights)),
        (0, 1),
    )
    theirs = plain(x[:rows].astype(jnp.float32), weights[:rows])
    assert distance(by_x[:rows], theirs[0]) < 2**-8  # rounded to bfloat16, as that of y is
    assert distance(by_weights[:rows], theirs[1]) < 2**-8


def test_quantized_experts_have_the_gradient_of_their_floats():
    x, gate_up, down, experts, weights = mixture(jnp.float32)
    matrices = []
    for w in (gate_up, down):
        q = Quantization(
            values="int8", outputs=w.shape[1], inputs=w.shape[2], group=16, experts=len(w)
        )
        scale = jnp.abs(w.reshape(*w.shape[:2], -1, 16)).max(axis=3) / 127
        values = jnp.round(w / jnp.repeat(scale, 16, axis=2)).astype(jnp.int8)
        matrices.append(QuantizedWeight(values, scale, None, None, q))

    def loss(x, weights, *scales):
        some = [replace(w, scale=scale) for w, scale in zip(matrices, scales, strict=True)]
        return weighted(mix_experts(x, *some, experts, weights))

    def plain(x, weights, *scales):
        some = [replace(w, scale=scale) for w, scale in zip(matrices, scales, strict=True)]
        floats = [w.weight.astype(jnp.float32) * jnp.repeat(w.scale, 16, axis=2) for w in some]
        return weighted(reference_experts(x, *floats, experts, weights))

    arrays = x, weights, *(w.scale for w in matrices)
    ours, theirs = (jax.jit(jax.grad(f, (0, 1, 2, 3)))(*arrays) for f in (loss, plain))
    for mine, other in zip(ours, theirs, strict=True):
        assert distance(mine, other) < 1e-5
