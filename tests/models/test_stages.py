"""Stages: how the layers of a model are divided, and models of one stage."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forge_jax.checkpoint.load import load_weights
from forge_jax.checkpoint.model_spec import read_spec
from forge_jax.errors import ConfigError
from forge_jax.models import build_model
from forge_jax.models.stages import split_stages
from forge_jax.step.kv_cache import kv_shape
from forge_jax.step.mesh import cache_layouts
from forge_jax.testing import tiny_model

GOLDENS = Path(__file__).parent.parent / "fixtures" / "goldens"
BLOCK, BLOCKS = 8, 4


def stages_of(model, count):
    return split_stages(model, cache_layouts(model), count)


def model_of(name, **changes):
    return build_model(dataclasses.replace(read_spec(GOLDENS / name), **changes))


def largest_by_search(model, count):
    """Return the bytes of the largest stage in the best of all divisions."""

    def divisions(start, stages):
        if stages == 1:
            yield ((start, model.spec.num_hidden_layers),)
            return
        for end in range(start + 1, model.spec.num_hidden_layers - stages + 2):
            for others in divisions(end, stages - 1):
                yield ((start, end), *others)

    [*templates] = stages_of(model, count)
    return min(
        max(
            model.of_stage(dataclasses.replace(stage, layers=range(*layers))).param_bytes
            for stage, layers in zip(templates, division, strict=True)
        )
        for division in divisions(0, count)
    )


@pytest.mark.parametrize("count", [2, 3, 5, 7])
@pytest.mark.parametrize("tied", [True, False])
def test_largest_stage_is_as_small_as_possible(count, tied):
    model = tiny_model(
        num_hidden_layers=7, vocab_size=4096, tie_word_embeddings=tied, intermediate_size=96
    )
    stages = stages_of(model, count)
    assert [layer for stage in stages for layer in stage.layers] == list(range(7))
    assert all(stage.layers for stage in stages)
    largest = max(model.of_stage(stage).param_bytes for stage in stages)
    assert largest == largest_by_search(model, count)


@pytest.mark.parametrize("name", ["llama31", "qwen2", "gpt2", "glm4_moe", "cohere"])
def test_stages_own_every_leaf_and_only_ends_share_one(name):
    model = model_of(name)
    first, last = (set(model.of_stage(stage).names) for stage in stages_of(model, 2))
    assert first | last == set(model.names)
    shared = first & last
    assert not any(leaf.startswith("layers.") for leaf in shared)
    tied = model.spec.tie_word_embeddings
    assert (("head.weight" in shared), ("embedding.weight" in first - last)) == (tied, not tied)


@pytest.mark.parametrize("name", ["llama31", "gemma2", "gpt2"])
def test_stages_one_after_another_are_the_model(name):
    model, folder = model_of(name), GOLDENS / name
    tokens = np.random.default_rng(0).integers(3, model.spec.vocab_size, 24).astype(np.int32)
    rest = np.arange(24), np.arange(24), jnp.arange(BLOCKS)[None], jnp.array([24])
    rest = *rest, jnp.array([0, 24]), jnp.int32(1)

    def empty_kv(model):
        shape = kv_shape(
            model.spec, num_blocks=BLOCKS, block_size=BLOCK, dtype=model.dtype, platform="cpu"
        )
        return dataclasses.replace(shape, layouts=cache_layouts(model)).empty()

    leaves = load_weights(model, folder, progress=False)
    _, expected = jax.jit(model.forward)(leaves, empty_kv(model), tokens, *rest)
    expected = model.logits(leaves, expected)
    stream = None
    for stage in stages_of(model, 2):
        part = model.of_stage(stage)
        own = load_weights(part, folder, progress=False)
        assert len(own) == len(part.names) < len(leaves)
        _, stream = jax.jit(part.forward)(own, empty_kv(part), tokens, *rest, stream=stream)
    np.testing.assert_array_equal(part.logits(own, stream), expected)


def test_more_stages_than_layers_are_rejected():
    with pytest.raises(ConfigError, match="more than the model's 2 layers: use at most 2"):
        stages_of(tiny_model(num_hidden_layers=2), 3)


def test_decoder_with_its_own_pass_over_layers_is_rejected():
    with pytest.raises(ConfigError, match="whose decoder computes all layers together"):
        stages_of(model_of("gemma4_shared"), 2)


def test_stage_without_attention_is_rejected():
    with pytest.raises(ConfigError, match="layers 0 to 1 would have no attention: use fewer"):
        stages_of(model_of("qwen3_next"), 2)
