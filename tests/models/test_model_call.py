"""A loaded model as one function: `model(token_ids)`, its weights as a pytree and as a module."""

import io
from contextlib import redirect_stdout
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import forge_jax
from forge_jax.checkpoint.safetensors import read_header
from forge_jax.models.summary import MAX_LINES

GOLDENS = Path(__file__).parent.parent / "fixtures" / "goldens"
# One per kind of attention, cache and MLP. The last two keep state in some layers.
NAMES = [
    "llama2",
    "gpt2",
    "gemma2",
    "gemma4_shared",
    "cohere2",
    "mistral_window",
    "gpt_oss",
    "qwen3_moe",
    "deepseek_v3",
    "qwen3_next",
    "qwen3_5",
]
# Kinds of layers. A small change of weights changes no choice of experts in these models.
LAYERS = [
    "llama2",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("deepseek_v3", "gemma4_shared")),
    "qwen3_5",
]


@pytest.fixture(scope="module")
def models():
    """Return a function that loads a model once."""
    loaded = {}

    def load(name):
        if name not in loaded:
            loaded[name] = forge_jax.load(str(GOLDENS / name), dtype="float32", progress=False)
        return loaded[name]

    return load


def golden(name):
    stored = read_header(GOLDENS / name / "golden.safetensors")
    return stored["input_ids"].read(), stored["logits"].read()


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(models, name):
    ids, logits = golden(name)
    np.testing.assert_allclose(models(name)(ids), logits, atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", LAYERS)
def test_padding_changes_no_logits_of_a_sequence(models, name):
    model, ids = models(name), golden(name)[0][:2, :12].astype(np.int32)
    lengths = [7, 12]
    padded = np.where(np.arange(12)[None] < np.array(lengths)[:, None], ids, -1)
    logits = model(padded, lengths=lengths)
    for row, length in enumerate(lengths):
        alone = model(ids[row, :length])
        assert alone.shape == (length, model.spec.vocab_size)
        np.testing.assert_allclose(logits[row, :length], alone, atol=2e-5, rtol=0)
        assert not logits[row, length:].any()


def test_call_is_compiled_once_per_shape(models):
    model, traces = models("llama2"), []

    @jax.jit
    def call(model, ids):
        traces.append(ids.shape)
        return model(ids)

    first = call(model, jnp.arange(5))
    second = call(model, jnp.arange(5) + 1)
    assert traces == [(5,)] and not np.array_equal(first, second)
    np.testing.assert_allclose(first, model(jnp.arange(5)), atol=1e-5)


def derivative(function, at, direction, step=1e-3):
    """Return the central difference of a function of arrays along a direction."""
    ahead, behind = (
        function(jax.tree.map(lambda a, d, s=sign: a + s * step * d, at, direction))
        for sign in (1, -1)
    )
    return (ahead - behind) / (2 * step)


@pytest.mark.parametrize("name", LAYERS)
def test_gradient_of_weights_is_the_difference_quotient(models, name):
    model, ids = models(name), jnp.asarray(golden(name)[0][0, :6], jnp.int32)
    weights = jax.random.normal(jax.random.key(1), (6, model.spec.vocab_size))

    @jax.jit
    def loss(leaves):
        return jnp.sum(jax.nn.log_softmax(model(ids, leaves=leaves)) * weights) / weights.size

    gradient = jax.jit(jax.grad(loss))(model.leaves)
    scales = [jnp.linalg.norm(each) for each in gradient]
    direction = tuple(g / (s + 1e-12) for g, s in zip(gradient, scales, strict=True))
    expected = sum(float(s) for s in scales)
    assert expected > 0
    assert derivative(loss, model.leaves, direction) == pytest.approx(expected, rel=2e-2)


def test_gradient_of_a_16_bit_model_exists():
    model = forge_jax.load(str(GOLDENS / "llama2"), dtype="bfloat16", progress=False)
    exact = forge_jax.load(str(GOLDENS / "llama2"), dtype="float32", progress=False)

    def loss(model):
        return model([5, 9, 30, 2])[-1, 7]

    ours, theirs = (jax.jit(jax.grad(loss))(each) for each in (model, exact))
    for name, half, full in zip(model.model.names, ours.leaves, theirs.leaves, strict=True):
        half, full = np.asarray(half, np.float32), np.asarray(full)
        assert np.linalg.norm(half - full) <= 0.1 * np.linalg.norm(full), name


def test_model_is_a_pytree_of_its_weights(models):
    model = models("llama2")
    leaves, treedef = jax.tree.flatten(model)
    assert all(ours is theirs for ours, theirs in zip(leaves, model.leaves, strict=True))
    doubled = jax.tree.map(lambda leaf: 2 * leaf, model)
    assert isinstance(doubled, forge_jax.LoadedModel) and doubled.model is model.model
    np.testing.assert_array_equal(doubled.leaf("norm.weight"), 2 * model.leaf("norm.weight"))
    assert jax.tree.structure(doubled) == treedef


# ---- modules -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYERS)
def test_module_has_the_weights_and_converts_back(models, name):
    model = models(name)
    module = model.module()
    state = nnx.state(module, nnx.Param)
    assert len(jax.tree.leaves(state)) == len(model.leaves)
    _, state = nnx.split(module)
    nnx.update(module, jax.tree.map(lambda leaf: leaf * 0, state))
    zeros = model.with_module(module)
    assert not any(leaf.any() for leaf in zeros.leaves)
    assert any(leaf.any() for leaf in model.leaves)
    again = model.with_module(model.module())
    ids = golden(name)[0][0, :5]
    np.testing.assert_array_equal(again(ids), model(ids))


def test_module_can_be_displayed(models):
    with redirect_stdout(io.StringIO()) as text:
        nnx.display(models("llama2").module())
    assert "layers=List" in text.getvalue() and "Attention" in text.getvalue()


def test_module_of_another_model_is_rejected(models):
    with pytest.raises(ValueError, match="not those of this LlamaForCausalLM"):
        models("llama2").with_module(models("gpt2").module())


def test_leaves_of_another_shape_are_rejected(models):
    model = models("llama2")
    with pytest.raises(ValueError, match=r"leaves: embedding\.weight must be \(331"):
        model([1], leaves=(model.leaves[0][:5], *model.leaves[1:]))
    with pytest.raises(ValueError, match="leaves must be the"):
        model.with_leaves(model.leaves[1:])


# ---- repr ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(each.name for each in GOLDENS.iterdir() if each.is_dir()))
def test_repr_is_short_and_names_the_architecture(name):
    if not (GOLDENS / name / "config.json").exists():
        pytest.skip("not a model")
    model = forge_jax.load(str(GOLDENS / name), progress=False)
    for text in (repr(model), repr(model.model)):
        lines = text.splitlines()
        assert len(lines) <= MAX_LINES and max(map(len, lines)) <= 160
        assert model.spec.architecture in lines[0] and str(model.model.dtype) in lines[0]


def test_repr_condenses_equal_layers(models):
    lines = repr(models("llama2")).splitlines()
    layers = models("llama2").spec.num_hidden_layers
    assert f"  layers.0-{layers - 1}" in lines
    qkv = models("llama2").leaf("layers.0.attention.qkv.weight")
    assert f"    .attention.qkv.weight   float32{list(qkv.shape)}" in lines


def test_repr_of_latent_attention_has_its_sizes(models):
    spec = models("deepseek_v3").spec
    sizes = repr(models("deepseek_v3")).splitlines()[1]
    heads = f"{spec.num_attention_heads} heads of {spec.qk_nope_head_dim + spec.head_dim}"
    assert f"{heads}, whose values have {spec.v_head_dim}, latents of {spec.kv_lora_rank}" in sizes
    assert "key/value heads" not in sizes
