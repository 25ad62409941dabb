"""`--quantization` without the CPU kernels: floats are rounded while they are read."""

from __future__ import annotations

import numpy as np
import pytest
from paged import PagedRun

from forge_jax.checkpoint.load import load_weights
from forge_jax.checkpoint.matrix import StoredMatrix
from forge_jax.checkpoint.model_spec import read_spec
from forge_jax.checkpoint.safetensors import read_header
from forge_jax.errors import UnsupportedModelError
from forge_jax.models import build_model
from forge_jax.models.plugins import find_architecture
from forge_jax.models.weight_map import Tensor
from forge_jax.research import LoadedModel
from forge_jax.weights import rounding
from forge_jax.weights.formats import PackedFormat, PlainFormat, WeightFormats
from forge_jax.weights.quantized import QuantizedFormat
from forge_jax.weights.rounding import round_matrix, rounded_formats
from forge_jax.weights.tensors import PLAIN, Scheme

KINDS = ("int8", "fp8", "int4")


class Rows:
    """A matrix in memory with the interface of one in a file."""

    def __init__(self, values):
        self.values, self.shape = values, values.shape

    def read_rows(self, out, first):
        out[...] = self.values[first : first + len(out)]


def back(matrix, scheme) -> np.ndarray:
    """Return the multiplied values by definition: (value - zero) * scale."""
    values = matrix.values.astype(np.float64) - (8 if scheme.values == "int4" else 0)
    group = values.shape[1] // matrix.scale.shape[1]
    return values * np.repeat(matrix.scale.astype(np.float64), group, axis=1)


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_rounded_to_nearest(kind, monkeypatch):
    monkeypatch.setattr(rounding, "CHUNK", 3 * 256)
    rng = np.random.default_rng(0)
    w = rng.standard_normal((17, 256)).astype(np.float32) * rng.uniform(0.001, 9, (17, 1))
    w = w.astype(np.float32)
    w[5] = 0
    scheme = Scheme(layout=PLAIN, values=kind, block=(1, 128 if kind == "int4" else None))
    matrix = round_matrix(Rows(w), scheme)
    got, scale = back(matrix, scheme), np.repeat(matrix.scale, 256 // matrix.scale.shape[1], axis=1)
    if kind == "fp8":  # three bits after the first, and steps of 2^-9 below 2^-6
        step = np.maximum(2.0 ** (np.floor(np.log2(np.abs(w / scale) + 1e-30)) - 3), 2.0**-9)
    else:
        step = 1.0
    assert (np.abs(got - w) <= 0.5001 * step * scale).all()
    assert not got[5].any() and np.isfinite(matrix.scale).all()
    top = np.abs(w).reshape(17, -1, scheme.block[1] or 256).argmax(axis=2)
    largest = np.take_along_axis(np.abs(got).reshape(*top.shape, -1), top[..., None], 2)
    exact = np.take_along_axis(np.abs(w).reshape(*top.shape, -1), top[..., None], 2)
    np.testing.assert_allclose(largest, exact, rtol=1e-6)


def load(folder, kind, dtype="float32"):
    model = build_model(read_spec(folder), dtype, WeightFormats(rounded=kind))
    return LoadedModel(model, load_weights(model, folder, progress=False), folder)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("qwen2", "int8"), ("gemma2", "fp8"), ("phi3", "int4"), ("mixtral", "int4")]
    + [("qwen3_moe", kind) for kind in ("int8", "fp8")],
)
@pytest.mark.quick_cases(1)
def test_logits_match_the_rounded_weights_as_floats(name, kind, goldens):
    """Covers tied and untied heads, biases, fused storage, other activations, experts."""
    folder = goldens / name
    rounded = load(folder, kind)
    plain = build_model(rounded.spec, "float32")
    leaves = dict(zip(plain.names, load_weights(plain, folder, progress=False), strict=True))
    stored = read_header(folder / "model.safetensors")
    weights = find_architecture(rounded.spec.architecture).weights(rounded.spec)
    quantized = rounded.model.in_format(QuantizedFormat)
    assert set(quantized) == {
        f"layers.{i}.{matrix}.weight"
        for i in range(rounded.spec.num_hidden_layers)
        for matrix in ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")
    }
    for leaf, format in quantized.items():
        matrix = round_matrix(StoredMatrix(weights[leaf], stored), format.scheme)
        leaves[leaf] = back(matrix, format.scheme).astype(np.float32).reshape(leaves[leaf].shape)
    exact = LoadedModel(plain, tuple(leaves[name] for name in plain.names), folder)
    ids = np.random.default_rng(1).integers(0, 96, (1, 40)).tolist()
    ours, want = (PagedRun(each, 1).step(ids)[0] for each in (rounded, exact))
    assert np.linalg.norm(ours - want) < 1e-5 * np.linalg.norm(want)
    assert rounded.model.param_bytes < plain.param_bytes
    beside = sum(
        leaf.nbytes
        for leaf_name, leaf in zip(rounded.model.names, rounded.leaves, strict=True)
        if f"{leaf_name.rsplit('.', 1)[0]}.weight" in quantized
    )
    whole = sum(leaves[leaf].size for leaf in quantized)
    assert beside < whole * {"int8": 1.2, "fp8": 1.2, "int4": 0.8}[kind]


def test_experts_in_one_tensor_are_rounded_equally(goldens):
    folder = goldens / "mixtral_window"
    model = load(folder, "int8")
    stored = read_header(folder / "model.safetensors")
    for leaf, name in (("gate_up", "gate_up_proj"), ("down", "down_proj")):
        source = stored[f"model.layers.0.mlp.experts.{name}"]
        scheme = model.model.in_format(QuantizedFormat)[f"layers.0.mlp.{leaf}.weight"].scheme
        matrix = round_matrix(StoredMatrix((Tensor(source.name, source.shape),), stored), scheme)
        values = model.leaf(f"layers.0.mlp.{leaf}.weight")
        assert values.shape == source.shape and values.dtype == np.int8
        np.testing.assert_array_equal(values, matrix.values.reshape(source.shape))
        scale = model.leaf(f"layers.0.mlp.{leaf}.scale")
        np.testing.assert_array_equal(scale, matrix.scale.reshape(scale.shape))


@pytest.mark.parametrize(
    "formats",
    [*(WeightFormats(rounded=kind) for kind in KINDS), WeightFormats(layers="int8", head="int8")],
)
def test_gates_of_states_are_not_rounded(formats, goldens):
    spec = read_spec(goldens / "qwen3_5_moe_text")
    found = set()
    for leaf, (format, _) in build_model(spec, "bfloat16", formats).matrices.items():
        in_floats = isinstance(format, PlainFormat) or format == PackedFormat("bf16")
        if leaf.startswith("layers.") and in_floats:
            found.add(leaf.split(".", 2)[2])
    assert found == {"delta.ba.weight", "mlp.router.weight", "mlp.shared.gate.weight"}


def test_unroundable_weights_are_named_in_the_error():
    odd = {"layers.0.mlp.down.weight": (Tensor("down", (64, 40)),)}
    with pytest.raises(UnsupportedModelError, match=r"down has 40 columns, .* multiple of 16"):
        rounded_formats(odd, "int4")
    assert rounded_formats(odd, "int8")["layers.0.mlp.down.weight"].rounded
