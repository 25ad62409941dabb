"""The interpretability examples find the expected effects in forge-tiny."""

import runpy
from pathlib import Path

import jax
import pytest

EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "interpretability"
FILES = sorted(EXAMPLES.glob("*.py"))
MAX_LINES = 25


def found(name):
    """Run an example with JAX's default promotion, as users do, and return its variables."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return runpy.run_path(str(EXAMPLES / f"{name}.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_examples_are_short_and_in_the_page(file):
    page = (EXAMPLES.parent.parent / "docs" / "interpretability.md").read_text()
    assert len(file.read_text().splitlines()) <= MAX_LINES
    assert f"../examples/interpretability/{file.name}" in page


def test_logit_lens_ends_with_the_prediction(capsys):
    tokens = found("logit_lens")["tokens"]
    assert tokens[0] == " time" and tokens[-1] == ","
    assert capsys.readouterr().out.count("\n") == len(tokens)


@pytest.mark.slow
def test_patched_word_changes_the_pronoun_until_it_is_read():
    effects = found("activation_patching")["effects"]
    assert effects[0] > 0 > effects[-1]  # the last layer reads no other position


def test_later_layers_have_induction_heads():
    scores = [max(map(float, heads)) for heads in found("attention_patterns")["scores"]]
    assert max(scores[4:]) > 0.1 > 2 * max(scores[:4])


@pytest.mark.slow
def test_soft_prompt_makes_its_text_likely():
    result = found("soft_prompt")
    losses, model = result["losses"], result["model"]
    assert losses[0] > 5 and losses[-1] < 0.5
    program = result["step"].lower(result["prompt"], model).as_text()
    assert len(program) < model.model.param_bytes  # the weights are arguments, not constants


@pytest.mark.slow
def test_probe_reads_the_previous_token_only_after_attention():
    accuracy = list(found("linear_probe")["accuracy"].values())
    assert accuracy[0] < 0.6 and accuracy[-1] > 0.95


@pytest.mark.slow
def test_steering_changes_the_probability():
    low, middle, high = found("steering")["probabilities"]
    assert low < middle < high
