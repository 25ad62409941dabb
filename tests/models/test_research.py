"""The research API: gradients through the cache, manual steps, and the examples."""

import importlib.util
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import forge_jax
from forge_jax.checkpoint.safetensors import read_header

FIXTURES = Path(__file__).parent.parent / "fixtures"
EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def example(name: str):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_gradient_through_the_cache_equals_the_one_without_it(capsys):
    errors = example("gradients").main(str(FIXTURES / "goldens/llama32_tied"))
    assert len(errors) == 2 * 3 and max(errors.values()) < 1e-4
    assert "relative difference" in capsys.readouterr().out


@pytest.mark.slow
def test_16_bit_weights_have_a_gradient_through_a_16_bit_cache():
    loaded = forge_jax.load(str(FIXTURES / "goldens/llama2"), dtype="bfloat16", progress=False)
    exact = forge_jax.load(str(FIXTURES / "goldens/llama2"), progress=False)
    gradients = example("gradients")
    tokens = jnp.asarray([5, 9, 300, 2, 17])
    _, half = gradients.loss_and_gradient(gradients.paged_loss, loaded, tokens)
    _, full = gradients.loss_and_gradient(gradients.dense_loss, exact, tokens)
    for name, ours, theirs in zip(loaded.model.names, half, full, strict=True):
        ours, theirs = np.asarray(ours, np.float32), np.asarray(theirs)
        assert np.linalg.norm(ours - theirs) < 0.1 * np.linalg.norm(theirs), name


def test_decode_steps_give_hugging_face_tokens():
    loaded = forge_jax.load(str(FIXTURES / "goldens/llama2"), progress=False)
    stored = read_header(FIXTURES / "goldens/llama2/golden.safetensors")
    prompts, greedy = stored["input_ids"].read(), stored["greedy_ids"].read()
    kv = forge_jax.new_kv(loaded, 24, 16)
    tables = jnp.arange(24, dtype=jnp.int32).reshape(3, 8)
    step = partial(forge_jax.decode_step, loaded, implementation="reference")
    step = jax.jit(step, donate_argnums=1)

    tokens, starts = jnp.asarray(prompts.reshape(-1), jnp.int32), jnp.arange(4) * 61
    lens, output = jnp.full(3, 61), []
    for _ in range(6):
        kv, tokens, scores = step(loaded.leaves, kv, tokens, starts, lens, tables)
        output.append(np.asarray(tokens))
        starts, lens = jnp.arange(4), lens + 1
    np.testing.assert_array_equal(np.stack(output, axis=1), greedy[:, :6])
    assert scores.shape == (3, 331)


def test_cache_dtype_is_the_models_float32_or_8_bits():
    loaded = forge_jax.load(str(FIXTURES / "goldens/llama2"), dtype="bfloat16", progress=False)
    assert forge_jax.new_kv(loaded, 2, 8, jnp.float32)[0].dtype == jnp.float32
    assert forge_jax.new_kv(loaded, 2, 8, "int8")[0].data.dtype == jnp.int8
    with pytest.raises(ValueError, match="bfloat16, float32, fp8 or int8, got float16"):
        forge_jax.new_kv(loaded, 2, 8, jnp.float16)


def test_handwritten_step_loop_writes_a_story(capsys):
    text = example("research_step").main(str(FIXTURES / "stories260k-hf"))
    assert text.startswith("Once upon a time, there was a little girl named Lily.")
    assert "layer by layer" in capsys.readouterr().out
