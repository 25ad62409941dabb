"""Random models: real model folders whose tokens can be counted in a text."""

import dataclasses
import json

import numpy as np
import pytest
from safetensors import safe_open

from benchmarks.random_model import (
    NUM_RESERVED,
    SHAPES,
    prompt_text,
    vocabulary,
    write_model,
)
from forge_jax import LLM, SamplingParams
from forge_jax.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

TINY = SHAPES["tiny"]
SMALL = {"max_num_seqs": 4, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("random") / "tiny"
    write_model(path, TINY)
    return path


def test_random_model_outputs_a_space_and_letters_per_token(folder):
    prompts = np.random.default_rng(0).integers(NUM_RESERVED, TINY.vocab_size, (4, 12)).tolist()
    outputs = LLM(folder, num_blocks=32, **SMALL).generate(
        prompts, SamplingParams(temperature=0, max_tokens=20)
    )
    for output in outputs:
        (sample,) = output.outputs
        assert sample.finish_reason == "length"
        assert len(sample.token_ids) == 20 == sample.text.count(" ")
        assert min(sample.token_ids) >= NUM_RESERVED


def test_text_prompt_equals_its_token_ids(folder):
    ids = np.random.default_rng(1).integers(NUM_RESERVED, TINY.vocab_size, 64).tolist()
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    text = prompt_text(ids, TINY.vocab_size)
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids) == text


def test_reserved_tokens_have_zero_output_weights(folder):
    with safe_open(folder / "model.safetensors", "np") as file:
        head = file.get_tensor("lm_head.weight").astype(np.float32)
    assert head.shape == (TINY.vocab_size, TINY.hidden_size)
    assert not head[:NUM_RESERVED].any()
    assert head[NUM_RESERVED:].any(axis=1).all()


def test_tied_shape_has_no_output_matrix(tmp_path):
    write_model(tmp_path, dataclasses.replace(TINY, tie_word_embeddings=True))
    with safe_open(tmp_path / "model.safetensors", "np") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is True


def test_written_bytes_depend_only_on_the_seed(folder, tmp_path):
    write_model(tmp_path / "again", TINY)
    write_model(tmp_path / "other", TINY, seed=1)
    first = (folder / "model.safetensors").read_bytes()
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == first
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != first


def test_vocabulary_is_unique_and_needs_room_for_words():
    names = vocabulary(SHAPES["S"].vocab_size)
    assert len(names) == len(set(names)) == SHAPES["S"].vocab_size
    with pytest.raises(ValueError, match="larger than 259"):
        vocabulary(259)
