"""Rejection sampling through the engine: the output distribution is that without drafts.

The vocabulary has four tokens. The probability of each output of four tokens is therefore known
from the model's predictions after every possible prefix, without drafts.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from scipy import stats

from forge_jax.engine.core import EngineCore
from forge_jax.sampling_params import SamplingParams
from forge_jax.schedule.block_pool import BlockPool
from forge_jax.schedule.request import Request
from forge_jax.schedule.scheduler import Scheduler, SchedulerConfig
from forge_jax.speculate.draft import ModelDrafter
from forge_jax.speculate.draft_model import DraftModel, DraftModelOptions
from forge_jax.speculate.draft_step import draft_shapes
from forge_jax.speculate.drafter import Draft, Drafter, OneByOne
from forge_jax.speculate.speculator import Speculator
from forge_jax.step.draft_probs import DraftProbs, Proposed
from forge_jax.step.inputs import StepShape
from forge_jax.step.kv_cache import kv_shape
from forge_jax.step.options import RunnerOptions
from forge_jax.step.runner import Runner
from forge_jax.testing import drafts_always_pay, random_leaves, tiny_model

FINE, WRONG = 1e-4, 1e-12  # p-values: correct results are above FINE, wrong ones below WRONG
V, LENGTH, DRAFTS = 4, 4, 3
SLOTS, T, BLOCK, NUM_BLOCKS, MAX_LEN = 128, 512, 8, 600, 32
PROMPT = [1, 3, 0, 2, 2]
COUNT = 10_000
DEVICE = jax.devices()[0]
pytestmark = [
    pytest.mark.long,
    pytest.mark.full_compile,
    pytest.mark.timeout(400),
    pytest.mark.slow,
]
ASKED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.6},
    "filters": {"temperature": 1.8, "top_k": 3, "min_p": 0.1},
    "penalties": {"temperature": 1.4, "frequency_penalty": 0.7, "presence_penalty": -0.4},
}


def model_and_leaves(*, unlike: float = 0.0):
    """Return the target, or a model that differs from it by `unlike`."""
    model = tiny_model(vocab_size=V, max_position_embeddings=MAX_LEN, tie_word_embeddings=False)
    both = zip(random_leaves(model, seed=5), random_leaves(model, seed=6), strict=True)
    return model, tuple((1 - unlike) * leaf + unlike * other for leaf, other in both)


def cache_of(model, num_blocks: int = NUM_BLOCKS):
    return kv_shape(
        model.spec, num_blocks=num_blocks, block_size=BLOCK, dtype=model.dtype, platform="cpu"
    )


@cache
def make_runner(draft_probs: DraftProbs | None) -> Runner:
    model, leaves = model_and_leaves()
    runner = Runner(
        model,
        RunnerOptions(
            shapes=[
                StepShape.decode(SLOTS),
                StepShape.verify(T, SLOTS, BLOCK, DRAFTS),
                StepShape.mixed(T, SLOTS, T, BLOCK, DRAFTS),
            ],
            kv_shape=cache_of(model),
            num_slots=SLOTS,
            max_blocks=MAX_LEN // BLOCK,
            device=DEVICE,
            verification="rejection",
            draft_probs=draft_probs,
        ),
    )
    runner.compile()
    runner.start(leaves)
    return runner


@cache
def make_draft_model() -> tuple[DraftModel, Runner]:
    model, leaves = model_and_leaves(unlike=0.25)
    draft_probs = DraftProbs(num_slots=SLOTS, max_drafts=DRAFTS, vocab_size=V, device=DEVICE)
    draft_model = DraftModel(
        model,
        DraftModelOptions(
            shapes=draft_shapes(
                max_num_seqs=SLOTS // 2,  # needs two calls
                max_num_batched_tokens=T,
                max_rows=T,
                max_blocks=MAX_LEN // BLOCK,
                proposes=True,
            ),
            kv_shape=cache_of(model),
            max_draft_tokens=DRAFTS,
            device=DEVICE,
            draft_probs=draft_probs,
        ),
    )
    draft_model.compile()
    draft_model.start(leaves)
    draft_model.background.finish()
    return draft_model, make_runner(draft_probs)


class Told:
    """A drafter of mostly wrong n-gram drafts, of many lengths."""

    def propose(self, key, tokens, prompt_len, salt):
        rng = random.Random(f"2 {tokens}")
        length = rng.randint(0, DRAFTS)
        return Draft(tuple(rng.randrange(V) for _ in range(length)), (0.5,) * length)

    def ingest(self, limit):
        return False

    def end(self, key, tokens, prompt_len, salt):
        pass


def make_speculator(drafter: Drafter) -> Speculator:
    """Verify a random number of drafts in any order; no time is measured."""
    speculator = Speculator(drafter, max_draft_tokens=DRAFTS, one_step_ahead=False)
    speculator._pays = lambda *_: True
    policy, rng = speculator.policy, random.Random(1)
    drafts_always_pay(policy)
    policy.acceptance.reach = lambda confidence, _: sorted(
        (rng.random() for _ in confidence), reverse=True
    )
    policy.choose = lambda _, updates, **options: rng.randint(len(updates) // 2, len(updates))
    return speculator


def make_core(runner: Runner, speculator: Speculator | None) -> EngineCore:
    runner.reset()
    limits = SchedulerConfig(
        max_num_seqs=SLOTS, max_num_batched_tokens=T, max_rows=T, max_model_len=MAX_LEN
    )
    scheduler = Scheduler(
        limits, BlockPool(NUM_BLOCKS, BLOCK), clock=lambda: 0.0, rng=random.Random(0)
    )
    return EngineCore(
        scheduler=scheduler,
        device=runner,
        tokenizer=None,
        vocab_size=V,
        one_step_ahead=False,
        speculator=speculator,
        unrecoverable=(AssertionError,),
    )


def answers(core: EngineCore, requests: list[Request]) -> dict[str, list]:
    """Return (token, logprobs) of each token by request."""
    got = defaultdict(list)
    for request in requests:
        core.add(request)
    while core.has_work:
        for request_id, deltas in core.tick().items():
            for delta in deltas:
                assert delta.error is None
                logprobs = delta.logprobs or [None] * len(delta.token_ids)
                got[request_id] += zip(delta.token_ids, logprobs, strict=True)
    return got


@cache
def logits_after() -> dict[tuple[int, ...], np.ndarray]:
    """Return f64[V], up to a constant, after every output shorter than `LENGTH` tokens."""
    outputs = [o for n in range(LENGTH) for o in itertools.product(range(V), repeat=n)]
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=V)
    requests = [
        Request(request_id=str(o), prompt_token_ids=[*PROMPT, *o], params=params) for o in outputs
    ]
    found = {}
    for output, [(_, logprobs)] in zip(
        outputs, answers(make_core(make_runner(None), None), requests).values(), strict=True
    ):
        found[output] = np.array([value for _, value in sorted(logprobs.top)])
    return found


def follow(output: tuple[int, ...], asked: dict[str, Any]) -> np.ndarray:
    """Return f64[V]: the distribution of the next token."""
    count = np.bincount(output, minlength=V) if output else np.zeros(V)
    logits = logits_after()[output] - asked.get("frequency_penalty", 0) * count
    logits = (logits - asked.get("presence_penalty", 0) * (count > 0)) / asked["temperature"]
    if "top_k" in asked:
        logits[logits < np.sort(logits)[-asked["top_k"]]] = -np.inf
    logits[logits < logits.max() + np.log(max(asked.get("min_p", 0), 1e-30))] = -np.inf
    p = np.exp(logits - logits.max())
    return p / p.sum()


def p_value(counts: np.ndarray, asked: dict[str, Any]) -> float:
    """Return the p-value of `i64[V, V, ...]`, the count of each output."""
    expected = np.zeros(counts.shape)
    for output in itertools.product(range(V), repeat=LENGTH):
        steps = (follow(output[:n], asked)[output[n]] for n in range(LENGTH))
        expected[output] = np.prod(list(steps)) * COUNT
    if counts[expected == 0].any():
        return 0.0
    few = expected < 8
    merged = (np.append(x[~few], x[few].sum()) for x in (counts, expected))
    counts, expected = (x[:-1] if not x[-1] else x for x in merged)
    return float(stats.chisquare(counts, expected).pvalue)


def outputs(core: EngineCore, asked: dict[str, Any]) -> np.ndarray:
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True, **asked)
    requests = [
        Request(request_id=str(i), prompt_token_ids=PROMPT, params=params, seed=i)
        for i in range(COUNT)
    ]
    counts = np.zeros((V,) * LENGTH, np.int64)
    for answer in answers(core, requests).values():
        counts[tuple(token for token, _ in answer)] += 1
    assert counts.sum() == COUNT
    return counts


def check_drafts(core: EngineCore, low: float, high: float) -> None:
    assert core.speculator is not None and not core.speculator.has_failed
    verified = core.speculator.stats()
    assert verified.num_draft_tokens > COUNT
    assert low < verified.num_accepted_tokens / verified.num_draft_tokens < high
    assert all(verified.accepted_per_position[:2])


@pytest.mark.parametrize("asked", ASKED)
def test_outputs_without_drafts_follow_the_model(asked):
    core = make_core(make_runner(None), None)
    assert p_value(outputs(core, ASKED[asked]), ASKED[asked]) > FINE


@pytest.mark.parametrize("asked", ASKED)
def test_ngram_drafts_preserve_the_distribution(asked):
    core = make_core(make_runner(None), make_speculator(OneByOne(Told())))
    assert p_value(outputs(core, ASKED[asked]), ASKED[asked]) > FINE
    check_drafts(core, 0.1, 0.5)


@pytest.mark.parametrize("asked", ASKED)
def test_draft_model_preserves_the_distribution(asked):
    draft_model, runner = make_draft_model()
    core = make_core(runner, make_speculator(ModelDrafter(draft_model)))
    assert p_value(outputs(core, ASKED[asked]), ASKED[asked]) > FINE
    check_drafts(core, 0.3, 0.95)


def test_wrong_draft_probabilities_are_detected(monkeypatch):
    draft_model, runner = make_draft_model()
    draft, draft_probs = draft_model.draft, draft_model.options.draft_probs
    assert draft_probs is not None

    def mixed(rows):
        made = draft(rows)
        rolled = [np.roll(np.asarray(array), 1, axis=0) for array in draft_probs.latest]
        draft_probs.latest = Proposed(*jax.device_put(rolled, DEVICE))
        return made

    monkeypatch.setattr(draft_model, "draft", mixed)
    core = make_core(runner, make_speculator(ModelDrafter(draft_model)))
    asked = ASKED["temperature"]
    assert p_value(outputs(core, asked), asked) < WRONG
    check_drafts(core, 0.3, 0.95)


@pytest.mark.parametrize("kind", ["text", "model"])
def test_temperature_zero_gives_the_tokens_without_drafts(kind):
    draft_model, runner = make_draft_model()
    drafter = OneByOne(Told()) if kind == "text" else ModelDrafter(draft_model)
    params = SamplingParams(max_tokens=12, temperature=0.0, frequency_penalty=0.5, ignore_eos=True)
    requests = [
        Request(request_id=str(i), prompt_token_ids=[i % V, i // V % V, i // V**2], params=params)
        for i in range(V**3)
    ]
    core = make_core(runner if kind == "model" else make_runner(None), make_speculator(drafter))
    expected = answers(make_core(make_runner(None), None), requests)
    assert answers(core, requests) == expected
    assert core.speculator is not None and core.speculator.stats().num_accepted_tokens > 50


def test_equal_drafts_and_seed_give_equal_tokens():
    draft_model, runner = make_draft_model()
    params = SamplingParams(max_tokens=12, temperature=1.5, ignore_eos=True)

    def run(**seed: int) -> dict[str, list]:
        core = make_core(runner, make_speculator(ModelDrafter(draft_model)))
        prompt = Request(request_id="r", prompt_token_ids=PROMPT, params=params, **seed)
        return answers(core, [prompt])

    assert run(seed=3) == run(seed=3) != run(seed=4)


def test_step_settings_include_the_draft_verification():
    assert make_runner(None).settings["verification"] == "rejection"
