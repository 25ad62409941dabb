"""`training.forge_tiny.widen`: the wide model computes the same function as its source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.flax import load_file

from forge_jax.checkpoint.hub import BUNDLED, resolve
from training.forge_tiny import DRAFT
from training.forge_tiny.check import Checker, forward
from training.forge_tiny.widen import SHAPES, Shape, check, main, widen

SMALL = {"hidden_size": 512, "intermediate_size": 768, "num_hidden_layers": 7}
GROUPED = Shape(**SMALL, num_attention_heads=12, num_key_value_heads=3)
UNGROUPED = Shape(**SMALL, num_attention_heads=6, num_key_value_heads=6)
TEXT = "<|bos|><|user|>Tell me a story about a dog.<|end|><|assistant|>Once upon a time"


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    config = json.loads((folder / "config.json").read_text())
    return config, load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    widen(resolve(BUNDLED), folder, GROUPED)
    return folder


@pytest.fixture(scope="module")
def tokens() -> Any:
    ids = Checker(resolve(BUNDLED)).tokenizer.encode(TEXT, add_special_tokens=False).ids
    return jnp.array(ids, jnp.int32)


def test_wide_model_has_the_logits_and_greedy_tokens_of_its_source(wide, tokens):
    logits, wide_logits = (forward(*read(folder), tokens) for folder in (resolve(BUNDLED), wide))
    np.testing.assert_allclose(wide_logits, logits, rtol=0, atol=1e-4)
    assert (wide_logits.argmax(axis=1) == logits.argmax(axis=1)).all()


def test_key_value_heads_are_repeated_for_smaller_groups(tmp_path, tokens):
    widen(resolve(BUNDLED), tmp_path, UNGROUPED)
    logits, wide_logits = (
        forward(*read(folder), tokens) for folder in (resolve(BUNDLED), tmp_path)
    )
    np.testing.assert_allclose(wide_logits, logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.o_proj.weight",  # a layer of the source
        "model.layers.6.mlp.down_proj.weight",  # an added layer
        "model.norm.weight",  # channels that must not be read
    ],
)
def test_wrong_weight_changes_the_logits(wide, tokens, name):
    config, weights = read(wide)
    logits = forward(config, weights, tokens)
    changed = weights | {name: weights[name] + jnp.bfloat16(0.1)}
    assert not np.allclose(forward(config, changed, tokens), logits, rtol=0, atol=0.01)


def test_wide_model_has_the_shape_and_the_tokenizer(wide):
    config, weights = read(wide)
    source = resolve(BUNDLED)
    assert {name: config[name] for name in vars(GROUPED)} == vars(GROUPED)
    assert weights["model.layers.6.mlp.up_proj.weight"].shape == (768, 512)
    assert weights["model.layers.6.self_attn.k_proj.weight"].shape == (3 * 64, 512)
    assert (wide / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_published_shapes_fit_the_bundled_model_and_its_draft_model():
    for folder, names in ((resolve(BUNDLED), ["1.1B"]), (DRAFT, ["160M", "68M"])):
        config = json.loads((folder / "config.json").read_text())
        for name in names:
            check(config, SHAPES[name])


@pytest.mark.parametrize(
    ("sizes", "field"),
    [
        ({"hidden_size": 640}, "hidden_size"),
        ({"num_hidden_layers": 5}, "num_hidden_layers"),
        ({"num_attention_heads": 13}, "num_attention_heads"),
        ({"num_key_value_heads": 1}, "num_key_value_heads"),
    ],
)
def test_sizes_that_do_not_fit_are_named_in_the_error(sizes, field):
    config, _ = read(resolve(BUNDLED))
    with pytest.raises(ValueError, match=f"^{field}: "):
        check(config, Shape(**vars(GROUPED) | sizes))


def test_too_few_key_value_heads_are_rejected():
    config, _ = read(resolve(BUNDLED))
    # Three groups of three become groups of two, so each takes two key-value heads.
    config |= {"num_key_value_heads": 3, "num_attention_heads": 9}
    shape = Shape(**SMALL, num_attention_heads=10, num_key_value_heads=5)
    with pytest.raises(ValueError, match=r"^num_key_value_heads: 5 is too few"):
        check(config, shape)


def test_command_reports_why_a_model_cannot_be_widened(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    arguments = ["--shape", "68M", "--source", str(tmp_path), "--output", str(tmp_path / "wide")]
    assert main(arguments) == 1
    assert "only Llamas" in capsys.readouterr().err
