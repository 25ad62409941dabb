"""`LLM.embed`: pooled hidden states, compared with a plain forward pass over the whole text."""

from functools import cache, partial
from typing import Any

import jax
import numpy as np
import pytest

from forge_jax import LLM, SamplingParams, load, new_kv
from forge_jax.errors import ContextLengthError, RequestError
from forge_jax.testing import core_of

LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 150, 256)
POOLINGS = ("last", "mean")


@pytest.fixture(scope="module")
def stories(short_stories):
    return short_stories


def texts(seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 500, n).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def reference(stories):
    """Return a function of (text, pooling) to f32[d], by one forward pass without an engine."""
    model = load(stories)

    most = max(LENGTHS)
    places = np.arange(most, dtype=np.int32)
    table = np.arange(most // 16, dtype=np.int32)[None]
    forward = jax.jit(partial(model.model.forward, implementation="reference"))

    @cache
    def states(text: tuple[int, ...]) -> np.ndarray:
        n = len(text)
        tokens = np.pad(np.array(text, np.int32), (0, most - n))
        slots = np.where(places < n, places, most)
        ends = np.array([0, n], np.int32)
        kv = new_kv(model, most // 16, 16)
        one = np.int32(1)
        _, hidden = forward(model.leaves, kv, tokens, places, slots, table, ends[1:], ends, one)
        return np.asarray(hidden, np.float64)[:n]

    def embed(text: list[int], pooling: str) -> np.ndarray:
        hidden = states(tuple(text))
        vector = hidden[-1] if pooling == "last" else hidden.mean(axis=0)
        return vector / np.linalg.norm(vector)

    return embed


@pytest.fixture(scope="module")
def llm(stories) -> LLM:
    """Return an LLM with room for 320 tokens, in which prompts and outputs preempt each other."""
    return LLM(stories, max_num_seqs=4, max_num_batched_tokens=64, num_blocks=20, max_model_len=256)


@pytest.fixture(scope="module")
def exact(stories) -> LLM:
    return LLM(stories, max_num_seqs=4, max_num_batched_tokens=64, deterministic=True)


def test_pooling_compiles_nothing_before_the_first_call(llm):
    device: Any = core_of(llm).device
    llm.generate(["a"], SamplingParams(max_tokens=2), progress=False)
    assert not [name for name in device.compiled() if name.startswith("pool")]
    llm.embed(["a"], progress=False)
    assert [name for name in device.compiled() if name.startswith("pool")]
    assert llm._parts.compilations() == 0, "it is no compilation that nobody expects"


@pytest.mark.parametrize("pooling", POOLINGS)
def test_vectors_match_a_plain_forward_pass(llm, reference, pooling):
    vectors = llm.embed(texts(), pooling=pooling, progress=False)
    assert vectors.dtype == np.float32
    for text, vector in zip(texts(), vectors, strict=True):
        np.testing.assert_allclose(vector, reference(text, pooling), atol=2e-5)


def test_cached_prefix_does_not_change_the_vector(llm, reference):
    text = texts(seed=1)[-2]
    for _ in range(2):
        llm.generate([text], SamplingParams(max_tokens=1), progress=False)
        for pooling in POOLINGS:
            [vector] = llm.embed([text], pooling=pooling, progress=False)
            np.testing.assert_allclose(vector, reference(text, pooling), atol=2e-5)


def test_preempted_prompts_are_pooled_from_their_beginning(llm, reference, monkeypatch):
    """Each long prompt is preempted once, between two of its chunks, among outputs."""
    scheduler, preempted = core_of(llm).scheduler, set()
    schedule = scheduler.schedule

    def preempt_and_schedule(*args: Any, **kwargs: Any) -> Any:
        for seq in list(scheduler.running):
            begun = seq.pooling is not None and 0 < seq.num_computed < seq.prompt_len
            if begun and seq.key not in preempted:
                preempted.add(seq.key)
                scheduler.slots.preempt(seq)
        return schedule(*args, **kwargs)

    monkeypatch.setattr(scheduler, "schedule", preempt_and_schedule)
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    streams = [llm.stream(text, params) for text in texts(seed=2)[6:8]]
    for stream in streams:
        next(stream)
    vectors = llm.embed(texts(), pooling="mean", progress=False)
    for text, vector in zip(texts(), vectors, strict=True):
        np.testing.assert_allclose(vector, reference(text, "mean"), atol=2e-5)
    assert len(preempted) >= 2
    assert all(sum(len(delta.token_ids) for delta in stream) == 59 for stream in streams)


@pytest.mark.full_compile
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.slow
def test_vectors_are_batch_invariant_in_the_deterministic_tier(exact, pooling):
    alone = [exact.embed([text], pooling=pooling, progress=False)[0] for text in texts()]
    prompt, params = texts(seed=3)[4], SamplingParams(max_tokens=40, temperature=0, logprobs=0)
    [quiet] = exact.generate([prompt], params, progress=False)
    stream = exact.stream(prompt, params)
    deltas = [next(stream)]
    together = exact.embed(texts(), pooling=pooling, progress=False)
    deltas += list(stream)
    assert np.array_equal(np.stack(alone), together)
    logprobs = [entry.logprob for delta in deltas for entry in delta.logprobs or ()]
    assert logprobs == [entry.logprob for entry in quiet.outputs[0].logprobs or ()]


def test_unnormalized_vectors_have_the_same_direction(llm):
    text = texts()[5]
    [plain] = llm.embed([text], normalize=False, progress=False)
    [unit] = llm.embed([text], progress=False)
    assert np.linalg.norm(unit) == pytest.approx(1, abs=1e-6)
    np.testing.assert_allclose(plain / np.linalg.norm(plain), unit, atol=1e-6)


def test_unservable_requests_are_rejected(llm):
    with pytest.raises(ContextLengthError):
        llm.embed([[5] * (llm.max_model_len + 1)], progress=False)
    with pytest.raises(RequestError, match="pooling"):
        llm.embed(["a"], pooling="max", progress=False)
