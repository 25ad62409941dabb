"""`score` returns the bits of an engine's logprobs, so a trainer's KL to its rollouts is exactly 0.

Each setting is one deterministic engine. Many requests of different kinds run on it together,
twice. Every logprob of every sample is compared bit by bit with one jitted call of `score`.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forge_jax import LLM, ModelError, RequestOutput, SamplingParams, load, score
from forge_jax.scoring import ScoreOptions, served_logits
from forge_jax.testing import core_of, drafts_always_pay
from tests.server_process import virtual_devices

pytestmark = [pytest.mark.full_compile, pytest.mark.slow]

GOLDENS = Path(__file__).parent.parent / "fixtures" / "goldens"
MAX_LEN = 160
SIZES: dict[str, Any] = {"max_num_seqs": 6, "max_model_len": MAX_LEN, "deterministic": True}
PROMPT_LENGTHS = (1, 9, 40, 63, 64, 65, 120)
MODES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.7, "logprobs_mode": "processed_logprobs"},
)
REQUESTS = list(itertools.product(PROMPT_LENGTHS, MODES, (1, 2)))


@dataclass(frozen=True, kw_only=True)
class Setting:
    """An engine, and the part of it that the requests must have used."""

    model: str
    options: dict[str, Any]
    uses: str = ""  # drafts, preemption or ""


SETTINGS = {
    "float32": Setting(model="short_stories", options={"dtype": "float32"}),
    "bfloat16": Setting(model="short_stories", options={"dtype": "bfloat16"}),
    "bfloat16 in plain XLA": Setting(
        model="short_stories", options={"dtype": "bfloat16", "kernels": "xla"}
    ),
    "small steps, preemption": Setting(
        model="short_stories",
        options={
            "dtype": "float32",
            "max_num_batched_tokens": 24,
            "prefill_chunk_size": 7,
            "num_blocks": 24,
            "block_size": 8,
        },
        uses="preemption",
    ),
    "drafts in float32": Setting(
        model="short_stories", options={"dtype": "float32", "speculation": "ngram"}, uses="drafts"
    ),
    "drafts in bfloat16": Setting(
        model="short_stories", options={"dtype": "bfloat16", "speculation": "ngram"}, uses="drafts"
    ),
    "8-bit cache": Setting(model="short_stories", options={"dtype": "bfloat16", "kv_dtype": "fp8"}),
    "experts": Setting(model="qwen3_moe_step", options={"dtype": "bfloat16"}),
}


class Rollouts(NamedTuple):
    tokens: np.ndarray  # i32[B, T]
    lengths: np.ndarray  # i32[B]
    temperature: np.ndarray  # f32[B]; 1: raw
    logprobs: list[dict[int, float]]  # by position
    outputs: list[RequestOutput]


def rollouts(llm: LLM, seed: int) -> Rollouts:
    """Run all requests at once."""
    rng = random.Random(0)  # equal prompts in every call, so that later calls hit the prefix cache
    prompts, params = [], []
    for index, (length, mode, n) in enumerate(REQUESTS):
        # Repeated tokens, which n-gram drafts find.
        some = [rng.randrange(3, llm.model.spec.vocab_size) for _ in range(length)]
        prompts.append((some[: length // 2] * 3)[:length] if length > 8 else some)
        more: dict[str, Any] = {} if index % 3 else {"prompt_logprobs": 0}
        params.append(
            SamplingParams(
                max_tokens=20,
                n=n,
                seed=seed + index,
                logprobs=0,
                ignore_eos=True,
                detokenize=False,
                **mode,
                **more,
            )
        )
    outputs = llm.generate(prompts, params, progress=False)
    samples = [(o, c, p) for o, p in zip(outputs, params, strict=True) for c in o.outputs]
    tokens = np.zeros((len(samples), MAX_LEN - 20), np.int32)
    lengths, temperature, logprobs = [], [], []
    for row, (output, completion, p) in zip(tokens, samples, strict=True):
        prompt, processed = output.prompt_token_ids, p.processed
        ids = [*prompt, *completion.token_ids]
        row[: len(ids)] = ids
        lengths.append(len(ids))
        temperature.append(p.temperature if processed else 1.0)
        scored = {} if processed else dict(enumerate(output.prompt_logprobs or (), 1))
        scored |= dict(enumerate(completion.logprobs or (), len(prompt)))
        logprobs.append({position: each.logprob for position, each in scored.items()})
    return Rollouts(tokens, np.array(lengths), np.array(temperature, np.float32), logprobs, outputs)


def num_differing(runs: Rollouts, scores: Any) -> int:
    """Return how many logprobs have other bits than the scores."""
    scores = np.asarray(scores)
    return sum(
        np.float32(value) != scores[row, position]
        for row, of_row in enumerate(runs.logprobs)
        for position, value in of_row.items()
    )


def jitted(llm: LLM, options: ScoreOptions | None = None) -> Any:
    options = options or llm.score_options
    found = partial(score, llm.model, options=options)
    return jax.jit(
        lambda leaves, tokens, lengths, t: found(leaves, tokens, lengths, temperature=t),
        compiler_options=options.compiler_options,
    )


@contextmanager
def engine(setting: Setting, short_stories: Path) -> Iterator[LLM]:
    model = short_stories if setting.model == "short_stories" else GOLDENS / setting.model
    with LLM(str(model), **SIZES | setting.options) as llm:
        speculator = core_of(llm).speculator
        if speculator is not None:
            drafts_always_pay(speculator.policy)
        yield llm


@pytest.mark.parametrize("name", SETTINGS)
def test_score_has_the_bits_of_every_rollout(short_stories, name):
    setting = SETTINGS[name]
    with engine(setting, short_stories) as llm:
        scored = jitted(llm)
        for seed in (0, 1000):
            runs = rollouts(llm, seed)
            assert sum(map(len, runs.logprobs)) >= 20 * len(runs.tokens) >= 20 * 84
            scores = scored(llm.leaves, runs.tokens, runs.lengths, runs.temperature)
            assert num_differing(runs, scores) == 0
        assert any(output.num_cached_tokens for output in runs.outputs)
        if setting.uses == "preemption":
            assert core_of(llm).scheduler.num_preemptions > 5
        if setting.uses == "drafts":
            assert sum(c.num_accepted_tokens for o in runs.outputs for c in o.outputs) > 5
        # Batching of `score` itself: one sequence, and a shorter padding.
        few = scored(llm.leaves, *(x[:3, :60] if x.ndim > 1 else x[:3] for x in runs[:3]))
        assert np.array_equal(few, np.asarray(scores)[:3, :60])


TWO_DEVICES = """
import sys
import jax
import numpy as np
from safetensors.numpy import load_file
from test_rollouts import SIZES, jitted, num_differing, rollouts
from forge_jax import LLM, ModelError, score

with LLM(sys.argv[1], **SIZES, dtype=sys.argv[2], tensor_parallel=2) as llm:
    runs = rollouts(llm, 0)
    scores = jitted(llm)(llm.leaves, runs.tokens, runs.lengths, runs.temperature)
    print(sum(map(len, runs.logprobs)), num_differing(runs, scores))
    tensors = load_file(sys.argv[1] + "/model.safetensors")
    before = [np.asarray(leaf) for leaf in llm.leaves]
    llm.update_weights({name: 2 * tensor for name, tensor in tensors.items()})
    doubled = rollouts(llm, 0)
    scores = jitted(llm)(llm.leaves, doubled.tokens, doubled.lengths, doubled.temperature)
    print(num_differing(doubled, scores), doubled.logprobs != runs.logprobs)
    llm.update_weights(tensors)
    print(all(map(np.array_equal, before, llm.leaves)))
    scored = jitted(llm)
    try:
        total = lambda leaves: scored(leaves, runs.tokens, runs.lengths, 1.0).sum()
        jax.grad(total, allow_int=True)(llm.leaves)  # bfloat16 leaves may be stored as uint16
    except ModelError as error:
        print("tensor_parallel=1" in str(error))
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_score_has_the_bits_of_two_devices(short_stories, dtype):
    command = [sys.executable, "-c", TWO_DEVICES, str(short_stories), dtype]
    env = os.environ | {"XLA_FLAGS": virtual_devices(2)}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), env.get("PYTHONPATH", "")])
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    compared, *rest = done.stdout.split()
    assert int(compared) > 20 * 84 and rest == ["0", "0", "True", "True", "True"]


@pytest.fixture(scope="module")
def float32(short_stories) -> Iterator[LLM]:
    with engine(SETTINGS["float32"], short_stories) as llm:
        yield llm


def test_one_ulp_of_one_weight_is_detected(float32):
    runs = rollouts(float32, 0)
    leaves = list(float32.leaves)
    at = float32.model.names.index("layers.0.mlp.down.weight")
    whole = np.array(leaves[at])
    whole.flat[7] = np.nextafter(whole.flat[7], np.float32(np.inf))
    leaves[at] = jnp.array(whole)
    scores = jitted(float32)(tuple(leaves), runs.tokens, runs.lengths, runs.temperature)
    assert num_differing(runs, scores) > 0


def test_other_step_size_is_detected(float32):
    """The tier has one shape: another one rounds differently in float32."""
    runs = rollouts(float32, 0)
    options = float32.score_options
    other = ScoreOptions(**{**vars(options), "num_tokens": 17, "num_rows": 17, "num_seqs": 6})
    args = float32.leaves, runs.tokens, runs.lengths, runs.temperature
    scores = np.asarray(jitted(float32, other)(*args))
    assert num_differing(runs, scores) > 0
    assert np.allclose(scores, jitted(float32)(*args), atol=2e-4)


def test_engine_outside_the_deterministic_tier_is_rejected_and_differs(short_stories, float32):
    with LLM(short_stories, **SIZES | {"dtype": "float32", "deterministic": False}) as llm:
        with pytest.raises(ModelError, match="deterministic=True"):
            _ = llm.score_options
        runs = rollouts(llm, 0)
        scores = jitted(float32)(llm.leaves, runs.tokens, runs.lengths, runs.temperature)
        assert num_differing(runs, scores) > 0


def test_other_dtype_is_detected(short_stories, float32):
    with engine(SETTINGS["bfloat16 in plain XLA"], short_stories) as llm:
        runs = rollouts(llm, 0)
        scores = jitted(float32)(float32.leaves, runs.tokens, runs.lengths, runs.temperature)
        assert num_differing(runs, scores) > 1000


def test_gradient_is_that_of_the_dense_forward_pass(short_stories):
    model = load(short_stories, dtype="float32")
    tokens = jnp.array([[5, 9, 20, 33, 8, 7, 6], [7, 6, 5, 4, 0, 0, 0]])
    lengths = jnp.array([7, 4])
    at = model.model.names.index("layers.1.mlp.down.weight")

    @jax.jit
    def loss(leaf: jax.Array) -> jax.Array:
        leaves = (*model.leaves[:at], leaf, *model.leaves[at + 1 :])
        return score(model, leaves, tokens, lengths, temperature=0.5).sum()

    leaf = model.leaves[at]
    direction = jax.random.normal(jax.random.key(1), leaf.shape) * 1e-2
    slope = (loss(leaf + direction) - loss(leaf - direction)) / 2
    assert float(slope) == pytest.approx(float((jax.grad(loss)(leaf) * direction).sum()), rel=1e-2)


def test_served_logits_have_the_bits_and_the_gradient_of_score(float32):
    model, options = float32.model, float32.score_options
    tokens = jnp.array([[5, 9, 20, 33, 8, 7, 6], [7, 6, 5, 4, 3, 2, 1]], jnp.int32)
    after = tokens[:, 1:, None]

    def by_logits(leaves: Any) -> jax.Array:
        logits = served_logits(model, leaves, tokens, options)[:, :-1]
        chosen = jnp.take_along_axis(logits, after, axis=2)[..., 0]
        return chosen - jax.nn.logsumexp(logits, axis=2)

    def by_score(leaves: Any) -> jax.Array:
        return score(model, leaves, tokens, options=options)[:, 1:]

    leaves = float32.leaves
    assert np.array_equal(jax.jit(by_logits)(leaves), jax.jit(by_score)(leaves))
    one, other = (
        jax.jit(jax.grad(lambda x, f=f: f(x).sum()))(leaves) for f in (by_logits, by_score)
    )
    for name, a, b in zip(model.names, one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4, err_msg=name)
    with pytest.raises(ValueError, match="raise max_model_len"):
        served_logits(model, leaves, jnp.ones((1, options.max_len + 1), jnp.int32), options)


def test_gradient_computes_the_logits_of_a_few_rows_at_a_time():
    """The groups of rows do not change the gradient, and bound the logits."""
    model = load(str(GOLDENS / "llama2"), dtype="float32", progress=False)
    tokens = jnp.array([[5, 9, 20, 33, 8, 7, 6], [7, 6, 5, 4, 0, 0, 0]])
    default = ScoreOptions.default(model.model, 7)

    def gradient(num_rows: int, leaves: Any) -> Any:
        options = dataclasses.replace(default, num_rows=num_rows)
        temperature = jnp.array([0.5, 2.0])

        def loss(leaves: Any) -> jax.Array:
            return score(
                model, leaves, tokens, jnp.array([7, 4]), temperature=temperature, options=options
            ).sum()

        return jax.jit(jax.grad(loss))(leaves)

    whole = gradient(64, model.leaves)
    as_numpy = [np.asarray(leaf) for leaf in model.leaves]
    for num_rows, leaves in ((5, model.leaves), (7, as_numpy)):  # with padding, and without
        for one, other in zip(whole, gradient(num_rows, leaves), strict=True):
            assert np.abs(one - other).max() <= 1e-4 * np.abs(one).max()
    vocab = model.model.spec.vocab_size
    long = jnp.tile(tokens[:1], (8, 1))
    few = dataclasses.replace(default, num_rows=4)
    loss = partial(score, model, tokens=long, options=few)
    text = str(jax.make_jaxpr(jax.grad(lambda leaves: loss(leaves).sum()))(model.leaves))
    assert f"f32[4,{vocab}]" in text and f"f32[56,{vocab}]" not in text


def test_one_sequence_needs_no_batch_axis(float32):
    tokens = jnp.array([5, 9, 20, 33, 8])
    alone = score(float32.model, float32.leaves, tokens)
    both = score(float32.model, float32.leaves, tokens[None], jnp.array([4]))
    assert alone.shape == (5,) and alone[0] == 0
    assert np.array_equal(both[0, :4], alone[:4]) and both[0, 4] == 0


def test_empty_batches_have_empty_scores(float32):
    for shape in ((0,), (2, 0), (0, 4)):
        found = score(float32.model, float32.leaves, jnp.zeros(shape, jnp.int32))
        assert found.shape == shape and found.dtype == np.float32


def test_lengths_above_the_tokens_count_as_all(float32):
    tokens = jnp.array([5, 9, 20, 33, 8])
    expected = score(float32.model, float32.leaves, tokens)
    assert np.array_equal(score(float32.model, float32.leaves, tokens, jnp.array(99)), expected)


def test_invalid_arguments_are_named_in_the_error(short_stories, float32):
    with pytest.raises(ValueError, match="of shape"):
        score(float32.model, float32.leaves, jnp.zeros((1, 2, 3), jnp.int32))
    wrong: tuple[Any, ...] = (0.0, -1, float("nan"), np.array([1.0, 0.0]))
    for temperature in wrong:
        two = jnp.ones((2, 3), jnp.int32)
        with pytest.raises(ValueError, match="temperature must be above 0"):
            score(float32.model, float32.leaves, two, temperature=temperature)
    tokens = jnp.zeros(MAX_LEN + 100, jnp.int32)
    with pytest.raises(ValueError, match="raise max_model_len"):
        score(float32.model, float32.leaves, tokens, options=float32.score_options)
    with engine(SETTINGS["bfloat16"], short_stories) as llm:
        at = llm.model.names.index("norm.weight")
        before, leaf, after = llm.leaves[:at], llm.leaves[at], llm.leaves[at + 1 :]

        def loss(leaf: jax.Array) -> jax.Array:
            return score(llm.model, (*before, leaf, *after), jnp.array([1, 2, 3])).sum()

        with pytest.raises(ModelError, match="gradients require plain float weights"):
            jax.grad(loss)(leaf)
