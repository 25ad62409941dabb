"""`logprobs_mode`: logprobs of the distribution that the sampler draws from, row by row.

The reference applies the documented steps in NumPy to the logits of one dense forward pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from forge_jax import LLM, GrammarSpec, SamplingParams, forward, load, logits, new_kv
from forge_jax.errors import RequestError
from forge_jax.testing import core_of, drafts_always_pay

PROMPT = "Once upon a time there was a dog. The dog was a good dog. The dog"
SIZES: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "dtype": "float32"}
BIAS = {300: 2.5, 5: -3.0}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "greedy": {"temperature": 0.0, "top_k": 3},
    "top_k": {"temperature": 1.3, "top_k": 7},
    "top_p": {"temperature": 1.2, "top_p": 0.8},
    "min_p": {"temperature": 1.5, "min_p": 0.05},
    "penalties": {"frequency_penalty": 0.8, "presence_penalty": -0.4, "repetition_penalty": 1.2},
    "bias": {"logit_bias": BIAS, "temperature": 0.8},
    "min_tokens": {"min_tokens": 4, "stop_token_ids": [262, 266, 268]},
    "allowed": {"allowed_token_ids": list(range(100, 160))},
    "everything": {
        "temperature": 0.9,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.001,
        "frequency_penalty": 0.3,
        "logit_bias": BIAS,
        "bad_words": ["dog"],
    },
}


@pytest.fixture(scope="module")
def llm(short_stories) -> Iterator[LLM]:
    with LLM(short_stories, **SIZES) as llm:
        yield llm


@pytest.fixture(scope="module")
def drafting(short_stories) -> Iterator[LLM]:
    with LLM(short_stories, speculation="ngram", **SIZES) as llm:
        speculator = core_of(llm).speculator
        assert speculator is not None
        drafts_always_pay(speculator.policy)
        yield llm


@pytest.fixture(scope="module")
def dense(short_stories):
    """Return a function from tokens to f32[T, V], the logits of each."""
    model = load(short_stories, dtype="float32")

    def rows(tokens: list[int]) -> np.ndarray:
        size = len(tokens)
        blocks = -(-size // 16)
        _, hidden = forward(
            model,
            model.leaves,
            new_kv(model, blocks, 16),
            jnp.array(tokens),
            jnp.arange(size),
            jnp.arange(size),
            jnp.arange(blocks)[None],
            jnp.array([size]),
            jnp.array([0, size]),
            jnp.int32(1),
        )
        return np.asarray(logits(model, model.leaves, hidden), np.float64)

    return rows


def expected(row: np.ndarray, prompt: list[int], output: list[int], p: SamplingParams, llm: LLM):
    """Return the logprobs of the distribution of the token after `prompt + output`."""
    row = row.copy()
    for token, bias in p.logit_bias.items():
        row[token] += bias
    for token in {*prompt, *output}:
        row[token] = (
            row[token] / p.repetition_penalty
            if row[token] > 0
            else row[token] * p.repetition_penalty
        )
    for token in set(output):
        row[token] -= p.frequency_penalty * output.count(token) + p.presence_penalty
    if len(output) < p.min_tokens:
        row[[*p.stop_token_ids, llm.tokenizer.eos_token_id]] = -np.inf
    if p.allowed_token_ids is not None:
        keep = np.array(p.allowed_token_ids)
        row[np.setdiff1d(np.arange(len(row)), keep)] = -np.inf
    for word in p.bad_words:
        for text in (word, " " + word):
            ids = llm.tokenizer.encode(text, False)
            if (output[-len(ids) + 1 :] if len(ids) > 1 else []) == ids[:-1]:
                row[ids[-1]] = -np.inf
    if p.temperature:
        row /= p.temperature
        if p.top_k:
            row[row < np.sort(row)[-p.top_k]] = -np.inf
        probs = np.exp(row - row.max())
        probs /= probs.sum()
        order = np.argsort(-probs)
        if p.top_p < 1:
            kept = np.cumsum(probs[order]) - probs[order] < p.top_p
            row[order[~kept]] = -np.inf
        if p.min_p:
            row[row < row.max() + np.log(p.min_p)] = -np.inf
    return row - row.max() - np.log(np.exp(row - row.max()).sum())


def check(llm: LLM, dense, output, p: SamplingParams) -> None:
    prompt = list(output.prompt_token_ids)
    for completion in output.outputs:
        tokens = list(completion.token_ids)
        rows = dense(prompt + tokens)[len(prompt) - 1 : -1]
        for i, (token, got) in enumerate(zip(tokens, completion.logprobs, strict=True)):
            scores = expected(rows[i], prompt, tokens[:i], p, llm)
            assert got.token_id == token
            assert got.logprob == pytest.approx(scores[token], abs=2e-4)
            low, high = ((scores > scores[token] + d).sum() for d in (2e-4, -2e-4))
            assert low < got.rank <= high
            assert len(got.top) == min(20, np.isfinite(scores).sum())
            for other, value in got.top:
                assert value == pytest.approx(scores[other], abs=2e-4)


def sampled(llm: LLM, p: SamplingParams, prompt: Any = PROMPT):
    [output] = llm.generate(prompt, p, progress=False)
    return output


@pytest.mark.parametrize("name", OPTIONS)
def test_processed_logprobs_are_of_the_sampled_distribution(llm, drafting, dense, name):
    options = {"max_tokens": 10, "seed": 1, "logprobs": 20, "n": 2, **OPTIONS[name]}
    p = SamplingParams(logprobs_mode="processed_logprobs", **options)
    output = sampled(llm, p)
    check(llm, dense, output, p)
    check(drafting, dense, sampled(drafting, p), p)
    raw = sampled(llm, SamplingParams(**options))
    assert [c.token_ids for c in raw.outputs] == [c.token_ids for c in output.outputs]
    plain = SamplingParams()
    check(llm, dense, raw, plain)
    if name not in ("plain", "greedy"):  # these change no logit
        with pytest.raises(AssertionError):
            check(llm, dense, raw, p)


def test_drafts_were_verified(drafting):
    p = SamplingParams(
        max_tokens=40, temperature=0.0, logprobs=1, logprobs_mode="processed_logprobs"
    )
    assert sum(c.num_accepted_tokens for c in sampled(drafting, p).outputs) > 0


def test_grammar_is_part_of_the_processed_distribution(llm):
    p = SamplingParams(
        max_tokens=8,
        seed=2,
        logprobs=20,
        logprobs_mode="processed_logprobs",
        structured_outputs=GrammarSpec.choice(["yes", "no"]),
    )
    [completion] = sampled(llm, p).outputs
    assert completion.text in ("yes", "no")
    for entry in completion.logprobs or ():
        assert sum(np.exp([value for _, value in entry.top])) == pytest.approx(1.0, abs=1e-5)


def test_modes_share_a_batch(llm, dense):
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 0.7, "top_k": 5, "logprobs": 20}
    processed = SamplingParams(seed=4, logprobs_mode="processed_logprobs", **options)
    raw = SamplingParams(seed=5, **options)
    params = [processed, raw, dataclasses.replace(raw, logprobs=None)]
    first, second, third = llm.generate([PROMPT] * 3, params, progress=False)
    check(llm, dense, first, processed)
    check(llm, dense, second, SamplingParams())
    assert third.outputs[0].logprobs is None


def test_prompt_logprobs_are_raw_in_both_modes(llm):
    options: dict[str, Any] = {
        "max_tokens": 2,
        "temperature": 0.5,
        "top_k": 2,
        "seed": 1,
        "logprobs": 0,
        "prompt_logprobs": 20,
    }
    raw = sampled(llm, SamplingParams(**options))
    got = sampled(llm, SamplingParams(logprobs_mode="processed_logprobs", **options))
    assert got.prompt_logprobs == raw.prompt_logprobs
    assert got.outputs[0].logprobs != raw.outputs[0].logprobs


def test_unknown_mode_is_rejected():
    with pytest.raises(RequestError, match="raw_logprobs or processed_logprobs") as raised:
        SamplingParams(logprobs_mode="raw_logits")  # pyright: ignore[reportArgumentType]
    assert raised.value.param == "logprobs_mode"
