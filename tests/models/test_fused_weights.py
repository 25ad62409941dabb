"""Quantized matrices as GPUs hold them: converted inside matrix products, 4 bits in JAX's own type.

Everything but the compiler's fusion is the same on a CPU. There, products of float32 operands are
not rounded to 16 bits, so the products below give the exact values of a matrix.
"""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_quantized as quantized
from gguf_zoo import write_zoo
from test_converted import converted

from forge_jax.checkpoint.load import load_weights, read_shards
from forge_jax.checkpoint.model_spec import read_spec
from forge_jax.models import build_model
from forge_jax.weights.formats import WeightFormats, fused_values
from forge_kernels.devices import HOPPER, Gpu, described
from forge_kernels.linear import MixedMatrix, OrderedWeight, Quantization, QuantizedWeight, linear
from forge_kernels.linear.quantized import _in_fusions, _in_parts, fp8_product

ALL = frozenset(("int8", "int4", "fp8"))


def load(folder, dtype="bfloat16", **formats):
    model = build_model(read_spec(folder), dtype, WeightFormats(**formats))
    return model, load_weights(model, folder, progress=False)


def weights(model, leaves) -> list[QuantizedWeight]:
    """Return the quantized matrices of a model, except experts and embeddings."""

    def flat(x):
        if isinstance(x, MixedMatrix):
            return [each for piece in x.pieces for each in flat(piece)]
        if isinstance(x, OrderedWeight):
            return flat(x.matrix)
        return [x] if isinstance(x, QuantizedWeight) and x.quantization.experts is None else []

    kinds = MixedMatrix | OrderedWeight | QuantizedWeight
    tree = jax.tree.unflatten(model.treedef, leaves)
    return [
        w for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kinds)) for w in flat(x)
    ]


def matrix(w: QuantizedWeight, product) -> np.ndarray:
    """Return the matrix [N, K] as a product multiplies it."""
    dtype = jnp.bfloat16 if product is _in_fusions else jnp.float32
    return np.asarray(product(jnp.eye(w.quantization.inputs, dtype=dtype), w)).T


def assert_same_matrices(fused, plain) -> None:
    ours, theirs = weights(*fused), weights(*plain)
    assert ours and len(ours) == len(theirs)
    for w, want in zip(ours, theirs, strict=True):
        exact = matrix(want, _in_parts)
        bound = 1e-6 * np.abs(exact).max()  # zeros and minima are added in another order
        assert w.quantization.fused and not want.quantization.fused
        # A last group that is shorter than the others is not fused.
        whole = w.quantization.inputs % w.quantization.group == 0
        rtol = 1e-6 if whole else 2**-8
        rounded = w.quantization.combined  # scales and minima, to float16
        bound = 2**-10 * np.abs(exact).max() if rounded else bound
        np.testing.assert_allclose(matrix(w, _in_fusions), exact, rtol=rtol, atol=bound)
        np.testing.assert_allclose(matrix(w, _in_parts), exact, rtol=1e-6, atol=bound)


@pytest.mark.parametrize("name", quantized.CASES)
@pytest.mark.quick_cases(8)
def test_fused_matrices_have_the_checkpoints_values(name, tmp_path):
    quantized.write(quantized.CASES[name], tmp_path, torch_dtype="bfloat16")
    fused = load(tmp_path, fused=ALL)
    assert_same_matrices(fused, load(tmp_path))
    of_4_bits = [w.weight.dtype == jnp.int4 for w in weights(*fused)]
    assert all(of_4_bits) if quantized.CASES[name].bits == 4 else not any(of_4_bits)


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_fused_matrices_have_the_rounded_values(kind, goldens):
    source = goldens / "llama2"
    assert_same_matrices(load(source, rounded=kind, fused=ALL), load(source, rounded=kind))


@pytest.mark.parametrize("name", ["fp8_matrix_dynamic", "fp8_matrix_static", "fp8_rows"])
def test_products_of_two_fp8_operands_equal_products_of_floats(name, tmp_path):
    quantized.write(quantized.CASES[name], tmp_path, torch_dtype="bfloat16")
    for w in weights(*load(tmp_path)):
        assert w.quantization.activations == "fp8"
        x = np.random.default_rng(0).normal(0, 100, (5, w.quantization.inputs))
        x = jnp.asarray(np.clip(x, -448, 448), jnp.float8_e4m3fn)
        want = _in_parts(x.astype(jnp.float32), w)
        np.testing.assert_allclose(fp8_product(x.astype(jnp.bfloat16), w), want, rtol=1e-5)


@pytest.mark.parametrize(
    ("device", "options", "expected"),
    [
        (HOPPER, {"activations": "fp8"}, True),
        (Gpu((8, 9), 58), {"activations": "fp8"}, True),
        (Gpu((8, 0), 108), {"activations": "fp8"}, False),
        (HOPPER, {}, False),  # rows of x are not rounded
        (HOPPER, {"activations": "fp8", "group": 128}, False),
    ],
)
def test_fp8_tensor_cores_multiply_rows_with_one_scale(device, options, expected):
    options = {"values": "fp8", "outputs": 256, "inputs": 256, "group": 256} | options
    w = QuantizedWeight.abstract(Quantization(**options))
    with described(device):
        product = jax.jit(lambda x, w: linear(x, w))  # not traced for another device before
        traced = product.trace(jax.ShapeDtypeStruct((16, 256), jnp.bfloat16), w)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert ("tensor<16x256xf8E4M3FN>, tensor<256x256xf8E4M3FN>" in text) == expected


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    return write_zoo(tmp_path_factory.mktemp("zoo") / "zoo.gguf")


def test_fused_matrices_have_the_blocks_values(zoo):
    fused = load(zoo, fused=ALL)
    assert_same_matrices(fused, load(zoo))
    assert {str(w.weight.dtype) for w in weights(*fused)} == {"int4", "int8"}


def test_memory_counts_half_a_byte_per_native_value(zoo):
    fused, plain = load(zoo, fused=ALL), load(zoo)
    combined = [w.quantization for w in weights(*fused) if w.quantization.combined]
    assert combined
    # Two bytes for a scale and a minimum each, instead of one and a float16 factor per block.
    more = sum(2 * q.outputs * (q.groups - q.inputs // q.blocks.size * 2) for q in combined)
    assert fused[0].param_bytes == plain[0].param_bytes + more


@pytest.mark.parametrize("kind", ["gguf", "gptq_zeros", "rounded"])
def test_converted_folder_gives_native_values(kind, goldens, zoo, tmp_path):
    source, options, formats = zoo, {"kernels": "xla"}, {}
    if kind == "gptq_zeros":
        source = tmp_path / "source"
        source.mkdir()
        quantized.write(quantized.CASES[kind], source)
    elif kind == "rounded":
        source, formats = goldens / "llama2", {"rounded": "int4"}
        options["quantization"] = "int4"
    out = converted(source, tmp_path / "out", dtype="bfloat16", **options)
    fused = load(out, fused=ALL, **formats)
    want = load(source, fused=ALL, **formats)
    assert fused[0].names == want[0].names
    for name, ours, theirs in zip(fused[0].names, fused[1], want[1], strict=True):
        assert ours.dtype == theirs.dtype, name
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs), name)
    assert any(leaf.dtype == jnp.int4 for leaf in fused[1])


def shard_leaves(model, arrays, index):
    stored = zip(arrays.values(), model.leaves, strict=True)
    return [jnp.asarray(x[index] if x.ndim > leaf.ndim else x) for x, leaf in stored]


@pytest.mark.parametrize("name", ["gptq", "w4a16_zeros"])
def test_shards_of_native_values_are_parts_of_the_matrix(name, tmp_path):
    quantized.write(quantized.CASES[name], tmp_path)
    shards = []
    for fused in (ALL, frozenset()):
        model = build_model(read_spec(tmp_path), "bfloat16", WeightFormats(fused=fused), 2)
        arrays = read_shards(model, tmp_path, progress=False)
        shards.append((model, arrays))
    for index in range(2):
        parts = [(m, shard_leaves(m, arrays, index)) for m, arrays in shards]
        assert_same_matrices(*parts)


@pytest.mark.parametrize(
    ("platform", "capability", "expected"),
    [
        ("cpu", None, set()),
        ("gpu", "8.0", {"int8", "int4"}),
        ("gpu", "8.9", {"int8", "int4"}),
        ("gpu", "9.0", {"int8", "int4", "fp8"}),
        ("gpu", "12.0", {"int8", "int4", "fp8"}),
    ],
)
def test_devices_fuse_the_values_that_xla_converts_in_products(platform, capability, expected):
    device = SimpleNamespace(platform=platform, compute_capability=capability)
    assert fused_values(device) == expected
