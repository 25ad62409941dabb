"""Speculation does not change a bit of tokens, texts, logprobs and logits.

Each combination of drafter, request and schedule runs through the real scheduler and the compiled
step of the deterministic tier. Other requests with drafts share its batch. It is compared with the
same request without drafts.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from test_determinism import RecordingRunner, Rows, Thief, logits_recorded

from forge_jax.engine.core import EngineCore
from forge_jax.engine.fake import fake_tokenizer
from forge_jax.grammar import GrammarCompiler, GrammarSpec
from forge_jax.sampling_params import SamplingParams
from forge_jax.schedule.block_pool import BlockPool
from forge_jax.schedule.request import Request
from forge_jax.schedule.scheduler import Scheduler, SchedulerConfig
from forge_jax.speculate.draft import ModelDrafter
from forge_jax.speculate.draft_model import DraftModel, DraftModelOptions
from forge_jax.speculate.draft_step import draft_shapes
from forge_jax.speculate.drafter import Draft, Drafter, OneByOne
from forge_jax.speculate.ngram import NgramDrafter
from forge_jax.speculate.speculator import SpeculationStats, Speculator
from forge_jax.speculate.suffix import SuffixDrafter
from forge_jax.step.kv_cache import kv_shape
from forge_jax.step.options import RunnerOptions
from forge_jax.step.step_shapes import step_shapes
from forge_jax.testing import drafts_always_pay, random_leaves, tiny_model

pytestmark = pytest.mark.full_compile

BLOCK, NUM_BLOCKS, MAX_LEN, SLOTS, T = 8, 320, 160, 12, 64
MAX_DRAFTS = 6
OUTPUT = 24  # tokens of each sample
TARGET = "target"
TOKENIZER = fake_tokenizer()
VOCAB = TOKENIZER.vocab_size
EOS = TOKENIZER.eos_token_id
LETTERS = tuple(TOKENIZER.encode(letter, False)[0] for letter in "abcdef")
GRAMMARS = GrammarCompiler(TOKENIZER, VOCAB, (EOS,), limits=None)
NAN_TOKEN = VOCAB - 2  # its embedding is not finite in some models


class AcceptedRows(RecordingRunner):
    """A runner that keeps only the logits of accepted rows."""

    def read(self, pending):
        result = super(RecordingRunner, self).read(pending)
        logits = np.asarray(pending.out.logits)
        first = 0
        for s, got in zip(pending.plan.sequences, result.sequences, strict=True):
            name, sample = s.seq_key
            if name == TARGET and s.samples and not got.fault:
                position = s.start + len(s.token_ids) - s.num_rows
                for row in range(len(got.token_ids)):
                    self.rows[sample, position + row].add(logits[first + row].tobytes())
            first += s.num_rows
        return result


@cache
def make_runner(dtype: str, *, one_shape: bool = True, nan: bool = False) -> AcceptedRows:
    model = tiny_model(
        max_position_embeddings=MAX_LEN,
        dtype=dtype,
        vocab_size=VOCAB,
        hidden_size=64,
        head_dim=16,
        tie_word_embeddings=not nan,
    )
    runner = AcceptedRows(
        model,
        RunnerOptions(
            shapes=step_shapes(
                max_num_seqs=SLOTS,
                max_num_batched_tokens=T,
                max_rows=T,
                block_size=BLOCK,
                max_drafts=MAX_DRAFTS,
                deterministic=one_shape,
            ),
            kv_shape=kv_shape(
                model.spec,
                num_blocks=NUM_BLOCKS,
                block_size=BLOCK,
                dtype=model.dtype,
                platform="cpu",
            ),
            num_slots=SLOTS,
            max_blocks=MAX_LEN // BLOCK,
            device=jax.devices()[0],
            deterministic=one_shape,
        ),
    )
    leaves = list(random_leaves(model, seed=5))
    if nan:
        embedding = model.names.index("embedding.weight")
        leaves[embedding] = leaves[embedding].at[NAN_TOKEN].set(np.nan)
    with logits_recorded():
        runner.compile()
        runner.start(tuple(leaves))
        runner.background.finish()
    return runner


# ---- drafters ------------------------------------------------------------------------------------


class Spoiler:
    """A drafter of the target's own outputs, of which a share `right` is unchanged."""

    def __init__(self, outputs: dict[int, list[int]], right: float, wrong_token: int | None = None):
        self._outputs = outputs
        self._right = right
        self._wrong_token = wrong_token
        self._rng = random.Random(3)

    def propose(self, key, tokens, prompt_len, salt):
        rng, known = self._rng, len(tokens) - prompt_len
        name, sample = key
        if name == TARGET:
            rest = self._outputs[sample][known : known + rng.randint(1, MAX_DRAFTS)]
        else:
            rest = [rng.randrange(VOCAB) for _ in range(rng.randint(0, 3))]
        drafts = []
        for token in rest:
            if rng.random() >= self._right:
                token = self._wrong_token or (token + rng.randrange(1, VOCAB)) % VOCAB
            drafts.append(token)
        return Draft(tuple(drafts), (0.9,) * len(drafts))

    def ingest(self, limit):
        return False

    def end(self, key, tokens, prompt_len, salt):
        pass


class Unwritten(DraftModel):
    """A draft model whose unwritten cache is NaN."""

    def reset(self) -> None:
        layers = self.kv_shape.layers
        dtype = layers[0].dtype
        nan = np.full(layers[0].shape, 0x7FC0 if dtype == np.uint16 else np.nan, dtype)
        self._kv = tuple(jax.device_put(nan) for _ in layers)


DRAFT_MODELS = ("itself", "its first layer", "another model")


@cache
def make_draft_model(runner: AcceptedRows, kind: str) -> DraftModel:
    target, dtype = runner.model, str(runner.model.dtype)
    options = {"max_position_embeddings": MAX_LEN, "dtype": dtype, "vocab_size": VOCAB}
    if kind == "another model":
        model = tiny_model(**options)
        leaves = random_leaves(model, seed=6)
    else:
        layers = target.spec.num_hidden_layers if kind == "itself" else 1
        model = tiny_model(num_hidden_layers=layers, hidden_size=64, head_dim=16, **options)
        named = dict(zip(target.names, runner.state.leaves, strict=True))
        leaves = tuple(named[name] for name in model.names)
    draft_model = Unwritten(
        model,
        DraftModelOptions(
            shapes=draft_shapes(
                max_num_seqs=SLOTS,
                max_num_batched_tokens=T,
                max_rows=T,
                max_blocks=MAX_LEN // BLOCK,
                deterministic=True,
            ),
            kv_shape=kv_shape(
                model.spec,
                num_blocks=60,  # not enough for all sequences
                block_size=BLOCK,
                dtype=model.dtype,
                platform="cpu",
            ),
            max_draft_tokens=MAX_DRAFTS,
            device=jax.devices()[0],
            uniform=True,
        ),
    )
    draft_model.compile()
    draft_model.start(leaves)
    draft_model.background.finish()
    return draft_model


def make_drafter(kind: str, outputs: dict[int, list[int]], runner: AcceptedRows) -> Drafter:
    match kind:
        case "ngram":
            return OneByOne(NgramDrafter(MAX_DRAFTS, min_match=1))
        case "suffix":
            return OneByOne(SuffixDrafter(MAX_DRAFTS))
        case "oracle":
            return OneByOne(Spoiler(outputs, 1.0))
        case "half right":
            return OneByOne(Spoiler(outputs, 0.6))
        case "wrong":
            return OneByOne(Spoiler(outputs, 0.0))
        case "not finite":
            return OneByOne(Spoiler(outputs, 0.5, NAN_TOKEN))
    drafter = ModelDrafter(make_draft_model(runner, kind))
    drafter.reset()
    return drafter


def make_speculator(drafter: Drafter) -> Speculator:
    """Verify every draft, as if no step took longer because of it."""
    speculator = Speculator(drafter, max_draft_tokens=MAX_DRAFTS)
    drafts_always_pay(speculator.policy)
    speculator.policy.acceptance.reach = lambda confidence, _: [1.0] * len(confidence)
    return speculator


# ---- the matrix ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Combination:
    drafter: str = "half right"
    asked: str = "nothing"
    temperature: float = 0.0
    schedule: str = "alone"
    n: int = 1


ASKED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "penalties": {
        "presence_penalty": 0.4,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
        "logprobs": 0,
    },
    "logit_bias": {"logit_bias": {5: 3.0, 9: -2.0, 40: 2.5}},
    "logprobs": {"logprobs": 5},
    "stop strings": {"stop": ("old", "e w", "\ufffd")},
    "stop tokens": {"stop_token_ids": tuple(range(0, VOCAB, 17)), "min_tokens": 3},
    "min_tokens": {"stop_token_ids": tuple(range(0, VOCAB, 6)), "min_tokens": 9},
    "top_k and min_p": {"top_k": 8, "min_p": 0.05},
    "a schema": {
        "structured_outputs": GrammarSpec.json_schema(
            {
                "type": "object",
                "properties": {"a": {"enum": [1, 22]}, "b": {"type": "boolean"}},
                "required": ["a", "b"],
                "additionalProperties": False,
            }
        ),
        "logprobs": 2,
    },
    "a regex": {
        "structured_outputs": GrammarSpec.regex("( the| cat| sat|[a-f]| old){2,}"),
        "ignore_eos": False,
        "min_tokens": 9,
        "frequency_penalty": 0.5,
    },
    "allowed tokens": {"allowed_token_ids": (*LETTERS, *range(0, VOCAB, 9)), "logprobs": 2},
    "bad words": {"allowed_token_ids": LETTERS, "bad_words": ("ab", "cb", "dd", "bac", "f")},
    "a regex without words": {
        "structured_outputs": GrammarSpec.regex("( the| cat| sat|[a-f]| old){2,}"),
        "allowed_token_ids": tuple(range(VOCAB)),
        "bad_words": ("ee", "fd", "bac", "ab"),
        "ignore_eos": False,
        "min_tokens": 9,
    },
}
AXES: dict[str, tuple[Any, ...]] = {
    "drafter": ("ngram", "suffix", "oracle", "half right", "wrong"),
    "asked": tuple(ASKED),
    "temperature": (0.0, 0.9),
    "schedule": ("alone", "beside others", "in chunks", "preempted", "after a prefix"),
    "n": (1, 3),
}
MATRIX = [
    Combination(**dict(zip(AXES, values, strict=True)))
    for values in itertools.product(*AXES.values())
]


class Outcome(NamedTuple):
    tokens: dict[int, list[int]]  # by sample
    text: dict[int, str]
    logprobs: dict[int, list]
    ends: dict[int, tuple]
    rows: Rows


@dataclass
class Seen:
    """Counters which show that the intended events happened."""

    preempted: int = 0
    cached: int = 0
    stats: list[SpeculationStats] = field(default_factory=list)


def target(combination: Combination) -> Request:
    params = SamplingParams(
        n=combination.n,
        max_tokens=OUTPUT,
        temperature=combination.temperature,
        top_p=0.95,
        ignore_eos=True,
    )
    rng = random.Random(1)
    motif = [rng.randrange(VOCAB) for _ in range(7)]
    prompt = [*motif, *(rng.randrange(VOCAB) for _ in range(20)), *motif]
    return Request(
        request_id=TARGET,
        prompt_token_ids=prompt,
        params=replace(params, **ASKED[combination.asked]),
        seed=11,
    )


def companions(rng: random.Random) -> list[Request]:
    made = []
    for i in range(5):
        params = SamplingParams(
            max_tokens=rng.randint(5, 40),
            temperature=rng.choice((0.0, 1.2)),
            frequency_penalty=rng.choice((0.0, 0.5)),
            logprobs=rng.choice((None, 3)),
            prompt_logprobs=rng.choice((None, None, 0)),
        )
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice((1, 2, 9, 30, 70)))]
        made.append(Request(request_id=f"other-{i}", prompt_token_ids=prompt, params=params))
    return made


def run(
    runner: AcceptedRows,
    combination: Combination,
    speculator: Speculator | None,
    seed: int = 0,
    seen: Seen | None = None,
) -> Outcome:
    rng = random.Random(seed)
    runner.reset()
    schedule = combination.schedule
    pool = BlockPool(NUM_BLOCKS, BLOCK, prefix_cache=schedule == "after a prefix")
    limits = SchedulerConfig(
        max_num_seqs=SLOTS,
        max_num_batched_tokens=T,
        max_rows=T,
        max_model_len=MAX_LEN,
        prefill_chunk_size=5 if schedule == "in chunks" else None,
    )
    scheduler = Scheduler(limits, pool, clock=lambda: 0.0, rng=rng)
    core = EngineCore(
        scheduler=scheduler,
        device=runner,
        tokenizer=TOKENIZER,
        vocab_size=VOCAB,
        speculator=speculator,
        grammars=GRAMMARS,
        unrecoverable=(AssertionError,),
    )
    request = target(combination)
    if schedule == "after a prefix":
        core.add(replace(request, request_id="before", params=SamplingParams(max_tokens=1)))
        while core.has_work:
            core.tick()
    if schedule in ("beside others", "in chunks", "preempted"):
        for other in companions(rng):
            core.add(other)
    core.add(request)
    samples = [seq for seq in scheduler.waiting() if seq.request_id == TARGET]
    soon = 3 if combination.drafter in DRAFT_MODELS else 6  # otherwise the sample would have ended
    thief = Thief(scheduler, soon) if schedule == "preempted" else None
    tokens, text, logprobs = defaultdict(list), defaultdict(str), defaultdict(list)
    ends = {}
    for tick in itertools.count():
        if thief is not None and any(seq.running for seq in samples):
            thief.visit(tick)
        for delta in core.tick().get(TARGET, ()):
            assert delta.error is None
            tokens[delta.index] += delta.token_ids
            text[delta.index] += delta.text
            logprobs[delta.index] += delta.logprobs or ()
            if delta.finish_reason is not None:
                ends[delta.index] = (delta.finish_reason, delta.stop_reason)
            if seen is not None:
                seen.cached += delta.num_cached_tokens > 0
        if len(ends) == combination.n:
            break
        if thief is not None:
            thief.leave_if_noticed()
    core.drain()
    if seen is not None:
        seen.preempted += any(seq.num_preemptions for seq in samples)
        assert speculator is not None
        seen.stats.append(speculator.stats())
    return Outcome(tokens, text, logprobs, ends, runner.rows)


class Plain:
    """The results of requests alone without drafts, one run for all combinations of a kind."""

    def __init__(self, runner: AcceptedRows):
        self._runner = runner
        self._known: dict[tuple[str, float], Outcome] = {}

    def __call__(self, combination: Combination) -> Outcome:
        key = combination.asked, combination.temperature
        if key not in self._known:
            alone = Combination(asked=key[0], temperature=key[1], n=3)
            self._known[key] = run(self._runner, alone, None)
        return self._known[key]


def difference(expected: Outcome, got: Outcome) -> str:
    for sample, tokens in got.tokens.items():
        for what in ("tokens", "text", "logprobs", "ends"):
            if getattr(got, what)[sample] != getattr(expected, what)[sample]:
                return f"sample {sample}: other {what}"
        assert tokens
    for (sample, position), bits in sorted(got.rows.items()):
        # After a stop string or at a preemption, more rows may be computed than counted.
        if (sample, position) in expected.rows and bits != expected.rows[sample, position]:
            return f"sample {sample}: other logits at position {position}"
    return ""


def compare(runner: AcceptedRows, combinations: list[Combination]) -> tuple[list, Seen]:
    """Return the combinations that differ from no speculation, and the events in all of them."""
    plain, seen, differing = Plain(runner), Seen(), []
    for seed, combination in enumerate(combinations):
        expected = plain(combination)
        drafter = make_drafter(combination.drafter, expected.tokens, runner)
        speculator = make_speculator(drafter)
        got = run(runner, combination, speculator, seed, seen)
        assert not speculator.has_failed
        if found := difference(expected, got):
            differing.append((combination, found))
    return differing, seen


@pytest.mark.timeout(400)
@pytest.mark.parametrize("drafter", AXES["drafter"])
@pytest.mark.quick_cases(1)
def test_drafts_do_not_change_the_output(drafter):
    check_the_matrix(drafter, 110)


@pytest.mark.soak
@pytest.mark.parametrize("drafter", AXES["drafter"])
def test_full_matrix_gives_identical_output(drafter):
    check_the_matrix(drafter, 160)


def check_the_matrix(drafter: str, count: int) -> None:
    combinations = [c for c in MATRIX if c.drafter == drafter]
    combinations = random.Random(count).sample(combinations, count)
    assert count * len(AXES["drafter"]) >= 500
    differing, seen = compare(make_runner("float32"), combinations)
    assert differing == []
    of_schedule = Counter(combination.schedule for combination in combinations)
    assert seen.preempted > 0.5 * of_schedule["preempted"] > 0
    assert seen.cached >= of_schedule["after a prefix"] > 0
    drafted = sum(stats.num_draft_tokens for stats in seen.stats)
    accepted = sum(stats.num_accepted_tokens for stats in seen.stats)
    assert drafted > len(combinations)
    if drafter == "wrong":
        assert accepted < 0.1 * drafted
    else:
        assert accepted > 0
    if drafter == "oracle":
        assert accepted > 0.5 * drafted  # the others' drafts are wrong


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("drafter", "dtype"),
    [
        ("itself", "float32"),
        ("itself", "bfloat16"),
        ("its first layer", "float32"),
        ("another model", "bfloat16"),
    ],
)
@pytest.mark.slow
def test_draft_model_does_not_change_the_output(drafter, dtype):
    rng = random.Random(DRAFT_MODELS.index(drafter))
    combinations = [Combination(asked=asked, temperature=0.9) for asked in ASKED]
    for schedule in AXES["schedule"][1:]:
        combinations.append(Combination(asked="penalties", schedule=schedule, n=3))
    combinations += rng.sample(MATRIX, 2)
    combinations = [replace(combination, drafter=drafter) for combination in combinations]
    differing, seen = compare(make_runner(dtype), combinations)
    assert differing == []
    assert seen.preempted and seen.cached
    for combination, stats in zip(combinations, seen.stats, strict=True):
        same_distribution = combination.asked in ("nothing", "logprobs", "top_k and min_p")
        if same_distribution and combination.schedule in ("alone", "after a prefix"):
            assert stats.num_draft_tokens >= OUTPUT // 2
            if drafter == "itself":
                assert stats.num_accepted_tokens == stats.num_draft_tokens
    drafted = sum(stats.num_draft_tokens for stats in seen.stats)
    accepted = sum(stats.num_accepted_tokens for stats in seen.stats)
    if drafter == "itself":
        assert accepted > 0.5 * drafted
    else:
        assert 0 < accepted < 0.5 * drafted


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_drafts_do_not_change_the_output_in_bfloat16():
    differing, _ = compare(make_runner("bfloat16"), random.Random(2).sample(MATRIX, 80))
    assert differing == []


@pytest.mark.slow
def test_rounding_differs_in_the_default_tier():
    """The comparison must be able to detect differences."""
    differing, _ = compare(
        make_runner("float32", one_shape=False), random.Random(2).sample(MATRIX, 40)
    )
    assert differing


@pytest.mark.slow
def test_draft_with_a_non_finite_row_costs_its_request_nothing():
    runner = make_runner("float32", nan=True)
    combinations = [
        Combination(drafter="not finite", asked=asked, n=n)
        for asked in ("nothing", "penalties", "stop tokens")
        for n in (1, 3)
    ]
    differing, seen = compare(runner, combinations)
    assert differing == []
    assert seen.preempted == len(combinations)
