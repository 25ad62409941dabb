"""Gradients through the served step: its value's bits, and the reference's gradient."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import forge_jax
from forge_jax.checkpoint.load import load_weights
from forge_jax.models.registry import build_model
from forge_jax.research import LoadedModel
from forge_jax.weights.formats import WeightFormats
from forge_kernels import cpu
from forge_kernels.attention import api as attention_api
from forge_kernels.experts import api as experts_api
from forge_kernels.linear import cpu_ffi
from forge_kernels.linear.unpacked import unpacked

pytestmark = pytest.mark.quick_compile

GOLDENS = Path(__file__).parent.parent / "fixtures/goldens"
ROWS, PADDED, BLOCKS, BLOCK_SIZE = 21, 24, 3, 8
FAMILIES = {
    "llama2": "plain",
    "gemma2": "window and soft cap",
    "gpt_oss": "sinks, and experts with biases",
    "qwen3_moe": "experts",
    "deepseek_v2_lite": "latent attention",
    "gemma4_shared": "layers that share a cache",
    "qwen3_next": "gated DeltaNet",
}
PACKED = {"llama32_tied": "cpu", "qwen3_moe": "auto", "gemma4_shared": "auto", "qwen3_next": "auto"}


def load(name: str, dtype: str = "float32") -> LoadedModel:
    return forge_jax.load(str(GOLDENS / name), dtype=dtype, progress=False)


def load_packed(name: str) -> LoadedModel:
    """Return a model with its matrices packed for the CPU kernels."""
    cpu.load()
    spec, folder = load(name, "bfloat16").spec, GOLDENS / name
    built = build_model(spec, "bfloat16", WeightFormats(layers="bf16", head="bf16"))
    return LoadedModel(built, load_weights(built, folder, progress=False), folder)


def scores(
    model: LoadedModel, leaves: Any, kv_dtype: str, implementation: str, cuts=(ROWS,)
) -> Any:
    """Return f32[ROWS, V] of one sequence, with padding; `cuts` are the ends of its chunks."""
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, model.spec.vocab_size, PADDED))
    kv, parts, begin = forge_jax.new_kv(model, BLOCKS, BLOCK_SIZE, kv_dtype), [], 0
    for end in cuts:
        row = begin + jnp.arange(PADDED)
        kv, hidden = forge_jax.forward(
            model, leaves, kv, jnp.roll(tokens, -begin), jnp.minimum(row, ROWS),
            jnp.where(row < end, row, BLOCKS * BLOCK_SIZE), jnp.arange(BLOCKS)[None],
            jnp.asarray([end]), jnp.asarray([0, end - begin]), jnp.int32(1),
            implementation=implementation,
        )  # fmt: skip
        parts.append(forge_jax.logits(model, leaves, hidden)[: end - begin])
        begin = end
    return jnp.concatenate(parts)


def log_probability(model: LoadedModel, leaves: Any, *args: Any) -> tuple[jax.Array, jax.Array]:
    """Return the mean of tokens' log-probabilities, and the logits."""
    found = scores(model, leaves, *args)
    chosen = jnp.arange(ROWS)[:, None] % model.spec.vocab_size
    return jnp.take_along_axis(jax.nn.log_softmax(found), chosen, axis=1).mean(), found


def slopes(
    model: LoadedModel, *args: Any, leaves: Any = None
) -> tuple[jax.Array, list[np.ndarray]]:
    """Return the logits, and the gradient of each leaf in float32."""
    loss = partial(log_probability, model)
    of_leaves = jax.jit(jax.grad(lambda leaves: loss(leaves, *args), has_aux=True))
    gradients, logits = of_leaves(model.leaves if leaves is None else leaves)
    return logits, [np.asarray(gradient, np.float32) for gradient in gradients]


def largest_error(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    """Return the largest relative difference of a leaf's gradient.

    Some gradients are zero, up to rounding, such as that of a scale before a norm. They are
    compared with the largest gradient instead.
    """
    norms = [float(np.linalg.norm(b)) for b in theirs]
    pairs = zip(ours, theirs, norms, strict=True)
    errors = [float(np.linalg.norm(a - b)) / max(norm, 1e-4 * max(norms)) for a, b, norm in pairs]
    return float(np.max(errors))  # NaN if one is


@pytest.mark.full_compile
@pytest.mark.slow
@pytest.mark.parametrize("name", list(FAMILIES))
def test_served_step_has_the_gradient_of_the_reference(name):
    model = load(name)
    logits, ours = slopes(model, "float32", "auto")
    served = jax.jit(lambda leaves: scores(model, leaves, "float32", "auto"))(model.leaves)
    np.testing.assert_array_equal(logits, served)
    _, theirs = slopes(model, "float32", "reference")
    assert largest_error(ours, theirs) < 1e-4


def test_gradient_is_that_of_finite_differences():
    model, rng = load("llama2"), np.random.default_rng(3)

    @jax.jit
    def loss(leaves):
        return log_probability(model, leaves, "float32", "auto")[0]

    gradients = jax.jit(jax.grad(loss))(model.leaves)
    for _ in range(3):
        step = [
            jnp.asarray(rng.standard_normal(w.shape), jnp.float32) * jnp.sqrt(jnp.mean(w * w))
            for w in model.leaves
        ]
        ends = [
            loss(tuple(w + h * each for w, each in zip(model.leaves, step, strict=True)))
            for h in (1e-3, -1e-3)
        ]
        want = sum(float(jnp.vdot(g, each)) for g, each in zip(gradients, step, strict=True))
        assert float(ends[0] - ends[1]) / 2e-3 == pytest.approx(want, rel=0.03, abs=3e-3)


def test_chunks_of_a_float32_cache_have_the_gradient_of_the_whole():
    """A bfloat16 cache does not: keys of earlier calls are constants."""
    model = load("llama2")
    _, whole = slopes(model, "float32", "auto")
    _, chunks = slopes(model, "float32", "auto", (9, 17, ROWS))
    assert largest_error(chunks, whole) < 1e-4
    half = load("llama2", "bfloat16")
    _, constants = slopes(half, "bfloat16", "auto", (9, 17, ROWS))
    assert largest_error(constants, whole) > 0.3


@pytest.mark.skipif(not cpu.available(), reason="no CPU kernels on this machine")
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_cpu_kernels_keep_their_bits_and_differentiate_packed_leaves(kv_dtype):
    """Activations and their gradients are rounded to 8 bits in each of about 30 operations.

    The rounding errors, of 2**-9 each, add up to less than 0.1 with a bfloat16 cache.
    """
    model = load_packed("llama32_tied")
    served = jax.jit(lambda leaves: scores(model, leaves, kv_dtype, "cpu"))(model.leaves)
    with pytest.raises(TypeError, match=r"grad requires real- or complex-valued.*uint16"):
        slopes(model, kv_dtype, "cpu")

    leaves = tuple(x.view(jnp.bfloat16) if x.dtype == jnp.uint16 else x for x in model.leaves)
    logits, ours = slopes(model, kv_dtype, "cpu", leaves=leaves)
    np.testing.assert_array_equal(logits, served)
    exact = load("llama32_tied")
    _, theirs = slopes(exact, "float32", "reference")
    matrices = {name: matrix.shape for name, matrix in model.model.matrices.items()}
    found = [
        unpack(gradient, model, name) if name in matrices else gradient
        for gradient, name in zip(ours, model.model.names, strict=True)
    ]
    assert largest_error(found, theirs) < 0.1


def unpack(gradient: np.ndarray, model: LoadedModel, name: str) -> np.ndarray:
    """Return the gradient of a matrix from that of its packed leaf."""
    packing = model.model.packings[name]
    return np.asarray(unpacked(jnp.asarray(gradient).astype(jnp.bfloat16), None, packing))


@pytest.fixture
def undefined_is_nan(monkeypatch):
    """Let the CPU kernels return NaN in rows that they leave undefined."""

    def nan_from(count: jax.Array | None, x: jax.Array) -> jax.Array:
        if count is None:
            return x
        exists = jnp.arange(len(x)).reshape(-1, *(1,) * (x.ndim - 1)) < count
        return jnp.where(exists, x, jnp.nan)

    def replace(module: Any, name: str, count: Callable[..., jax.Array | None]) -> None:
        kernel = getattr(module, name)

        def replaced(*args: Any, **options: Any) -> Any:
            found, rows = kernel(*args, **options), count(*args)
            if isinstance(found, tuple):
                return nan_from(rows, found[0]), *found[1:]
            return nan_from(rows, found)

        monkeypatch.setattr(module, name, replaced)

    replace(cpu_ffi, "_multiply", lambda *args: args[-1])
    replace(experts_api, "packed_experts", lambda *args: args[-1])
    replace(attention_api, "cpu_rotate_write", lambda *args: args[4])
    replace(attention_api, "cpu_attention", lambda *args: args[4][args[5]])


@pytest.mark.skipif(not cpu.available(), reason="no CPU kernels on this machine")
@pytest.mark.usefixtures("undefined_is_nan")
@pytest.mark.parametrize("name", PACKED)
def test_undefined_padding_of_frozen_layers_does_not_reach_a_gradient(name):
    model = load_packed(name)
    at = model.model.names.index("norm.weight")

    def slope(implementation: str) -> np.ndarray:
        def loss(weight: jax.Array) -> jax.Array:
            leaves = (*model.leaves[:at], weight, *model.leaves[at + 1 :])
            return log_probability(model, leaves, "bfloat16", implementation)[0]

        return np.asarray(jax.jit(jax.grad(loss))(model.leaves[at]), np.float32)

    ours = slope(PACKED[name])
    assert np.isfinite(ours).all()
    assert largest_error([ours], [slope("reference")]) < 0.1


def test_padding_of_embeddings_does_not_reach_a_gradient():
    model = load("llama2")
    row = jnp.arange(PADDED)
    embeddings = model.embed(row)

    def slope(padding: float) -> list[np.ndarray]:
        def loss(leaves: Any) -> jax.Array:
            _, _, found = forge_jax.decode_step(
                model, leaves, forge_jax.new_kv(model, BLOCKS, BLOCK_SIZE), None,
                jnp.asarray([0, ROWS]), jnp.asarray([ROWS]), jnp.arange(BLOCKS)[None],
                inputs_embeds=embeddings.at[ROWS:].set(padding),
            )  # fmt: skip
            return jax.nn.log_softmax(found)[0, 0]

        return [np.asarray(x) for x in jax.jit(jax.grad(loss))(model.leaves)]

    for found, want in zip(slope(np.nan), slope(0.0), strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-6)


def test_layers_that_share_a_cache_require_float32():
    model = load("gemma4_shared", "bfloat16")

    def loss(leaves, kv_dtype):
        return log_probability(model, leaves, kv_dtype, "auto")[0]

    with pytest.raises(NotImplementedError, match="only if it is float32"):
        jax.eval_shape(jax.grad(partial(loss, kv_dtype="bfloat16")), model.leaves)
    jax.eval_shape(jax.grad(partial(loss, kv_dtype="float32")), model.leaves)
