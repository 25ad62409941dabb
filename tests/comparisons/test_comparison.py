"""Comparisons of two real engines, against an independent computation of their distributions."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from forge_jax import load
from forge_jax.errors import ConfigError, ModelError, RequestError
from forge_jax.tools.compare import Prompts, Side, compare
from forge_jax.tools.compare import run as running
from forge_jax.tools.compare.distributions import positions, summary
from tests.lora_files import merged, write_adapter

OPTIONS = {"dtype": "float32", "max_num_seqs": 2, "max_num_batched_tokens": 64}
TEXTS = ("Once upon a time, there was a girl", "The dog ran to")
PERTURBED = "model.layers.1.mlp.down_proj.weight"


def copied(model, folder):
    shutil.copytree(model, folder)
    return folder


@pytest.fixture(scope="module")
def perturbed(short_stories, tmp_path_factory):
    """Return a copy of the model in which one matrix is larger."""
    folder = copied(short_stories, tmp_path_factory.mktemp("comparisons") / "perturbed")
    tensors = load_file(folder / "model.safetensors")
    tensors[PERTURBED] = tensors[PERTURBED] * 1.5
    save_file(tensors, folder / "model.safetensors")
    return folder


def sides(*models):
    return [Side(str(model), OPTIONS) for model in models]


@pytest.fixture(scope="module")
def report(short_stories, perturbed):
    # Answers are longer than one step of 64 tokens.
    prompts = Prompts(TEXTS, max_tokens=80)
    return compare(*sides(short_stories, perturbed), prompts, progress=False)


def expected(a, b):
    """Return KL(A||B) of each row of logits, from the definition."""
    p, q = (np.exp(each.astype(np.float64)) for each in (a, b))
    p, q = (each / each.sum(axis=-1, keepdims=True) for each in (p, q))
    return (p * (np.log(p) - np.log(q))).sum(axis=-1), p, q


def test_divergence_equals_the_definition_on_dense_logits(report, short_stories, perturbed):
    models = [load(str(each), dtype="float32") for each in (short_stories, perturbed)]
    tokenizer = running.LLM(str(short_stories), **OPTIONS).tokenizer
    for entry in report["prompts"]:
        prompt, answer = tokenizer.encode(entry["prompt"]), entry["answers"][0]["tokens"]
        assert entry["prompt_tokens"] == len(prompt)
        assert len(prompt) + len(answer) > 64
        rows = slice(len(prompt) - 1, len(prompt) + len(answer) - 1)
        logits = [np.asarray(model([*prompt, *answer]))[rows] for model in models]
        kl, *probabilities = expected(*logits)
        found = entry["positions"]
        np.testing.assert_allclose([each["kl"] for each in found], kl, rtol=2e-3, atol=2e-6)
        assert max(kl) > 0.01  # the perturbation shows
        for side, p in enumerate(probabilities):
            at = p[np.arange(len(answer)), answer]
            given = np.exp([each["logprobs"][side] for each in found])
            np.testing.assert_allclose(given, at, rtol=1e-3, atol=1e-6)
            best = [each["top"][side][0][0] for each in found]
            assert best == p.argmax(axis=-1).tolist()
            entropy = -(p * np.log(p)).sum(axis=-1)
            given = [each["entropies"][side] for each in found]
            np.testing.assert_allclose(given, entropy, rtol=1e-3, atol=1e-5)


def test_report_has_both_answers_and_where_they_diverge(report):
    diverged = 0
    for entry in report["prompts"]:
        one, two = (answer["tokens"] for answer in entry["answers"])
        assert "".join(entry["answers"][0]["pieces"]).strip() == entry["answers"][0]["text"].strip()
        assert [each["token"] for each in entry["positions"]] == one
        at = entry["divergence"]
        if at is None:
            assert one == two
            continue
        diverged += 1
        assert one[:at] == two[:at] and one[at : at + 1] != two[at : at + 1]
        # Both are greedy, so the first token that differs has another top token.
        assert not entry["positions"][at]["same_top"]
        assert entry["positions"][at]["top"][1][0][0] == two[at]
    assert diverged
    assert report["summary"]["same_answers"] == len(TEXTS) - diverged
    assert json.loads(json.dumps(report, allow_nan=False)) == report


def test_adapter_of_a_side_equals_the_merged_model(short_stories, tmp_path):
    adapter = write_adapter(tmp_path / "adapter", short_stories, seed=5)
    merged_model = merged(tmp_path / "merged", short_stories, adapter, 8.0 / 4)
    adapted = Side(str(short_stories), {**OPTIONS, "lora": (f"x={adapter}",), "max_lora_rank": 8})
    report = compare(*sides(merged_model), adapted, Prompts(TEXTS, max_tokens=70), progress=False)
    assert report["summary"]["max_kl"] < 1e-8
    assert report["summary"]["same_answers"] == 2


def test_equal_sides_have_no_divergence(short_stories):
    prompts = Prompts(TEXTS, max_tokens=12, temperature=0.8, seed=3)
    report = compare(*sides(short_stories, short_stories), prompts, progress=False)
    figures = report["summary"]
    assert figures["max_kl"] == 0 and figures["same_top"] == 1
    assert figures["same_answers"] == 2
    assert figures["perplexity"][0] == figures["perplexity"][1]
    assert figures["rms_probability_change"] == 0


def test_prompts_are_scored_without_answers(short_stories, perturbed):
    report = compare(
        *sides(short_stories, perturbed), Prompts(TEXTS[:1], max_tokens=0), progress=False
    )
    [entry] = report["prompts"]
    assert report["settings"]["scored"] == "prompts"
    assert len(entry["positions"]) == entry["prompt_tokens"] - 1  # the first token is BOS
    assert "".join(each["piece"] for each in entry["positions"]).strip() == TEXTS[0]
    mean = np.mean([each["logprobs"] for each in entry["positions"]], axis=0)
    np.testing.assert_allclose(report["summary"]["perplexity"], np.exp(-mean))


def test_different_tokenizers_are_rejected(short_stories, tmp_path):
    folder = copied(short_stories, tmp_path / "other")
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    one, two = [name for name, i in vocab.items() if i in (300, 301)]
    vocab[one], vocab[two] = vocab[two], vocab[one]
    file.write_text(json.dumps(content))
    with pytest.raises(ModelError, match=r"tokenizers .* differ: token 300 .* share a tokenizer"):
        compare(*sides(short_stories, folder), Prompts(TEXTS, max_tokens=2), progress=False)


def test_prompt_without_a_scored_token_is_rejected(short_stories):
    prompts = Prompts(("",), max_tokens=0)
    with pytest.raises(RequestError, match="no token to score"):
        compare(*sides(short_stories, short_stories), prompts, progress=False)


def test_full_temporary_folder_names_the_remedy():
    class Full:
        def write(self, data):
            raise OSError(28, "No space left on device")

    with pytest.raises(ConfigError, match="TMPDIR"):
        running._write(Full(), iter([np.zeros((1, 3), np.float32)]))


# ---- distributions -------------------------------------------------------------------------------


def test_padding_of_a_vocabulary_is_ignored():
    a = np.random.default_rng(0).normal(size=(3, 7)).astype(np.float32)
    padded = np.pad(a, ((0, 0), (0, 2)), constant_values=9.0)
    assert [each.kl for each in positions(a, padded, [0, 1, 2])] == [0.0, 0.0, 0.0]


def test_logits_that_are_not_finite_are_rejected(short_stories):
    with running._load("B", Side(str(short_stories), OPTIONS)) as llm:
        llm.update_weights([np.full_like(leaf, np.nan) for leaf in llm.leaves])
        with pytest.raises(ModelError, match=r"B: the logits of .* are not finite"):
            list(running._logits("B", llm, [running._Span((1, 5, 9), 1)], progress=False))


def test_blocks_of_rows_give_the_same_positions(monkeypatch):
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=(2, 9, 30)).astype(np.float32)
    tokens = list(range(9))
    whole = list(positions(a, b, tokens))
    monkeypatch.setattr("forge_jax.tools.compare.distributions._MOST_VALUES", 60)
    assert list(positions(a, b, tokens)) == whole
    figures = summary(whole)
    kl, p, q = expected(a, b)
    assert figures["mean_kl"] == pytest.approx(kl.mean())
    assert figures["max_kl"] == pytest.approx(kl.max())
    assert figures["same_top"] == np.mean(p.argmax(-1) == q.argmax(-1))
    at = np.arange(9)
    shift = q[at, tokens] - p[at, tokens]
    assert figures["rms_probability_change"] == pytest.approx(np.sqrt(np.mean(shift**2)))
    assert whole[4].ranks == (
        1 + int((a[4] > a[4][4]).sum()),
        1 + int((b[4] > b[4][4]).sum()),
    )
