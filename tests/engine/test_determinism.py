"""The deterministic tier: a request's logits have the same bits on every schedule.

A request runs through the real scheduler and the compiled step in combinations of everything that
may change its schedule. Every row of logits is compared bit by bit with the request alone. The
default tier must fail this comparison, which proves that it can detect differences.
"""

from __future__ import annotations

import itertools
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from forge_jax import LLM
from forge_jax.engine.core import EngineCore
from forge_jax.models import decoder as decoder_file
from forge_jax.models.kv import element_dtype
from forge_jax.models.spec import ExpertSpec
from forge_jax.sampling_params import SamplingParams
from forge_jax.schedule.block_pool import BlockPool
from forge_jax.schedule.plan import FED_BACK, Admission, ScheduledSequence, StepPlan
from forge_jax.schedule.request import Request, Sequence
from forge_jax.schedule.scheduler import Scheduler, SchedulerConfig
from forge_jax.step import step as step_file
from forge_jax.step.kv_cache import kv_shape
from forge_jax.step.options import DETERMINISTIC_GPU_OPTIONS, RunnerOptions
from forge_jax.step.runner import Runner
from forge_jax.step.step_shapes import step_shapes
from forge_jax.testing import core_of, not_a_number, random_leaves, tiny_model
from forge_kernels.attention import api as attention_api
from forge_kernels.attention import xla as xla_attention_file

pytestmark = [pytest.mark.long, pytest.mark.full_compile, pytest.mark.slow]

GOLDENS = Path(__file__).parent.parent / "fixtures" / "goldens"
VOCAB, BLOCK, NUM_BLOCKS, MAX_LEN, SLOTS, T = 96, 8, 320, 256, 16, 64
OUTPUT = 10  # tokens of each sample
TARGET = "target"  # the compared request
SEED = 11

Rows = dict[tuple[int, int], set[bytes]]  # (sample, position) -> the bits of its logits rows


# ---- the engine --------------------------------------------------------------------------------


class OutWithLogits(NamedTuple):
    """`StepOut` with the logits behind it."""

    packed: jax.Array
    logprob: jax.Array
    rank: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array
    activations: tuple[jax.Array, ...]
    logits: jax.Array  # f32[R, V]


class RecordingRunner(Runner):
    """A `Runner` that keeps the bits of the target's logits."""

    rows: Rows

    def read(self, pending):
        logits = np.asarray(pending.out.logits)
        first = 0
        for s in pending.plan.sequences:
            name, sample = s.seq_key
            if name == TARGET:
                position = s.start + len(s.token_ids) - s.num_rows
                for row in range(s.num_rows):
                    self.rows[sample, position + row].add(logits[first + row].tobytes())
            first += s.num_rows
        return super().read(pending)

    def reset(self) -> None:
        """Drop the rows and fill the cache with NaN, because unwritten values must not matter."""
        self.rows = defaultdict(set)
        self.state.kv = jax.tree.map(
            lambda array: jax.device_put(
                np.full(array.shape, not_a_number(array.dtype), array.dtype)
            ),
            self.state.kv,
        )


SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 352, "head_dim": 32},
    "forge-tiny": {
        "vocab_size": 3072,
        "hidden_size": 256,
        "intermediate_size": 704,
        "head_dim": 64,
        "num_hidden_layers": 6,
    },
    "experts": {
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "head_dim": 32,
        "experts": ExpertSpec(count=6, per_token=2, intermediate_size=96),
    },
}


@contextmanager
def logits_recorded() -> Iterator[None]:
    """Make steps traced meanwhile output their logits."""
    sample_rows = step_file._sample_rows

    def with_logits(shape, slots, m, logits, *rest):
        slots, out = sample_rows(shape, slots, m, logits, *rest)
        return slots, OutWithLogits(*out, logits)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_file, "_sample_rows", with_logits)
        yield


@cache
def make_runner(
    dtype: str,
    num_tokens: int = T,
    *,
    kv_dtype: str = "auto",
    size: str = "tiny",
    one_shape: bool = True,
    uniform: bool = True,
) -> RecordingRunner:
    """Return a runner; the deterministic tier has one shape and uniform rows."""
    model = tiny_model(max_position_embeddings=MAX_LEN, dtype=dtype, **SIZES[size])
    runner = RecordingRunner(
        model,
        RunnerOptions(
            shapes=step_shapes(
                max_num_seqs=SLOTS,
                max_num_batched_tokens=num_tokens,
                max_rows=num_tokens,
                block_size=BLOCK,
                deterministic=one_shape,
            ),
            kv_shape=kv_shape(
                model.spec,
                num_blocks=NUM_BLOCKS,
                block_size=BLOCK,
                dtype=element_dtype(kv_dtype, model.dtype),
                platform="cpu",
            ),
            num_slots=SLOTS,
            max_blocks=MAX_LEN // BLOCK,
            device=jax.devices()[0],
            deterministic=uniform,
        ),
    )
    with logits_recorded():
        runner.compile()
        runner.start(random_leaves(model, seed=5))
        runner.background.finish()
    return runner


# ---- the full matrix ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Combination:
    prompt_len: int = 21
    temperature: float = 0.0
    company: str = "alone"  # or few, behind, many
    chunk: int | None = None
    preempt: bool = False
    prefix: bool = False
    shuffle: bool = False
    n: int = 1


AXES: dict[str, tuple[Any, ...]] = {
    "prompt_len": (21, 150),
    "temperature": (0.0, 0.9),
    "company": ("alone", "few", "behind", "many"),
    "chunk": (None, 5, 16, 33),
    "preempt": (False, True),
    "prefix": (False, True),
    "shuffle": (False, True),
    "n": (1, 3),
}
MATRIX = [
    Combination(**dict(zip(AXES, values, strict=True)))
    for values in itertools.product(*AXES.values())
]


def some(count: int) -> list[Combination]:
    """Return `count` of the combinations, always the same ones."""
    return random.Random(count).sample(MATRIX, count)


def target(combination: Combination, **changes: Any) -> Request:
    params = SamplingParams(
        n=combination.n,
        max_tokens=OUTPUT,
        temperature=combination.temperature,
        top_p=0.95,
        ignore_eos=True,
    )
    rng = random.Random(combination.prompt_len)
    return Request(
        request_id=TARGET,
        prompt_token_ids=[rng.randrange(VOCAB) for _ in range(combination.prompt_len)],
        params=replace(params, **changes),
        seed=SEED,
    )


def companions(count: int, rng: random.Random) -> Iterator[Request]:
    """Yield requests of all sizes that use every part of the sampler."""
    for i in range(count):
        prompt_len = rng.choice((1, 2, 9, 30, 70, 140))
        params = SamplingParams(
            max_tokens=rng.randint(5, 40),
            temperature=rng.choice((0.0, 1.2)),
            top_k=rng.choice((0, 5)),
            frequency_penalty=rng.choice((0.0, 0.5)),
            logit_bias=rng.choice(({}, {3: 2.0})),
            min_tokens=rng.choice((0, 4)),
            logprobs=rng.choice((None, 3)),
            prompt_logprobs=rng.choice((None, None, 0)),
        )
        prompt = [rng.randrange(VOCAB) for _ in range(prompt_len)]
        yield Request(request_id=f"other-{i}", prompt_token_ids=prompt, params=params)


class Run(NamedTuple):
    tokens: dict[int, list[int]]  # by sample
    rows: Rows
    num_cached: int
    num_preemptions: int  # preemptions of the target's samples


def run(
    runner: RecordingRunner,
    combination: Combination,
    seed: int,
    num_tokens: int = T,
    **changes: Any,
) -> Run:
    """Run the target as the combination specifies; `changes` are to its SamplingParams."""
    rng = random.Random(seed)
    runner.reset()
    pool = BlockPool(NUM_BLOCKS, BLOCK, prefix_cache=combination.prefix)
    if combination.shuffle:
        rng.shuffle(pool._free)
    limits = SchedulerConfig(
        max_num_seqs=SLOTS,
        max_num_batched_tokens=num_tokens,
        max_rows=num_tokens,
        max_model_len=MAX_LEN,
        prefill_chunk_size=combination.chunk,
    )
    scheduler = Scheduler(limits, pool, clock=lambda: 0.0, rng=rng)
    core = EngineCore(
        scheduler=scheduler,
        device=runner,
        tokenizer=None,
        vocab_size=VOCAB,
        unrecoverable=(AssertionError,),
    )
    request = target(combination, **changes)

    if combination.prefix:
        shared = replace(request, request_id="before", params=SamplingParams(max_tokens=1))
        core.add(shared)
        while core.has_work:
            core.tick()

    count = {"alone": 0, "few": 2, "behind": 3, "many": 12}[combination.company]
    arrivals = [(rng.randrange(4), other) for other in companions(count, rng)]
    if combination.company == "behind":
        arrivals = [(5, other) for _, other in arrivals]
    arrivals = sorted([*arrivals, (4, request)], key=lambda arrival: arrival[0])
    thief = Thief(scheduler, 4 + rng.randint(1, 3)) if combination.preempt else None
    tokens: dict[int, list[int]] = defaultdict(list)
    unfinished, num_cached = combination.n, 0
    samples: list[Sequence] = []
    for tick in itertools.count():
        while arrivals and arrivals[0][0] <= tick:
            core.add(arrivals.pop(0)[1])
            samples = samples or [s for s in scheduler.waiting() if s.request_id == TARGET]
        if thief is not None and any(seq.running for seq in samples):
            thief.visit(tick)
        for delta in core.tick().get(TARGET, ()):
            assert delta.error is None
            tokens[delta.index] += delta.token_ids
            num_cached = max(num_cached, delta.num_cached_tokens)
            unfinished -= delta.finish_reason is not None
        if not unfinished:
            break
        if thief is not None:
            thief.leave_if_noticed()
    core.drain()
    return Run(tokens, runner.rows, num_cached, sum(seq.num_preemptions for seq in samples))


class Thief:
    """A thief that takes every free block at `tick` and returns them after a preemption."""

    def __init__(self, scheduler: Scheduler, tick: int):
        self._scheduler = scheduler
        self._tick = tick
        self._loot: list[int] | None = None

    def visit(self, tick: int) -> None:
        if self._loot is None and tick >= self._tick:
            pool = self._scheduler.pool
            self._loot = pool.allocate(pool.num_free)

    def leave_if_noticed(self) -> None:
        if self._loot and self._scheduler.num_preemptions:
            self._scheduler.pool.release(self._loot)
            self._loot = []


class Comparison:
    """Runs combinations on one runner and records differences from the request alone."""

    def __init__(self, runner: RecordingRunner, num_tokens: int = T):
        self.runner = runner
        self.num_tokens = num_tokens
        self.alone: dict[tuple[int, float], Run] = {}
        self.differing: list[tuple[Combination, str]] = []
        self.num_rows = 0
        self.num_cached = 0
        self.num_preempted = 0

    def check(self, combinations: Iterable[Combination]) -> None:
        for seed, combination in enumerate(combinations):
            expected = self._alone(combination)
            got = run(self.runner, combination, seed, self.num_tokens)
            self.num_cached += got.num_cached > 0
            self.num_preempted += got.num_preemptions > 0
            difference = self._difference(expected, got)
            if difference:
                self.differing.append((combination, difference))

    def _alone(self, combination: Combination) -> Run:
        """Run the request alone, in whole prompts, and score every prompt position."""
        key = combination.prompt_len, combination.temperature
        if key not in self.alone:
            plain = Combination(prompt_len=key[0], temperature=key[1], n=3)
            self.alone[key] = run(self.runner, plain, 0, self.num_tokens, prompt_logprobs=0)
        return self.alone[key]

    def _difference(self, expected: Run, got: Run) -> str:
        for (sample, position), bits in sorted(got.rows.items()):
            self.num_rows += 1
            if bits != expected.rows[sample, position]:
                return f"sample {sample}: other logits at position {position}"
        for sample, tokens in got.tokens.items():
            assert len(tokens) == OUTPUT
            if tokens != expected.tokens[sample]:
                return f"sample {sample}: other tokens"
        return ""


def check_the_tier(runner: RecordingRunner, combinations: list[Combination], **options) -> None:
    comparison = Comparison(runner, **options)
    comparison.check(combinations)
    assert comparison.differing == []
    # The combinations took effect: every row was seen, blocks were shared, sequences preempted.
    assert comparison.num_rows >= sum(c.n * OUTPUT for c in combinations)
    assert comparison.num_cached == sum(c.prefix for c in combinations)
    assert comparison.num_preempted > 0.8 * sum(c.preempt for c in combinations)


DTYPES = ("float32", "bfloat16")
EIGHT_BITS = (("float32", "int8"), ("bfloat16", "fp8"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_request_has_the_same_bits_on_every_schedule(dtype):
    check_the_tier(make_runner(dtype), some(300))


@pytest.mark.parametrize(("dtype", "kv_dtype"), EIGHT_BITS)
def test_request_has_the_same_bits_with_an_8_bit_cache(dtype, kv_dtype):
    """A step reads its own writes rounded, so it does not matter where a chunk ends."""
    check_the_tier(make_runner(dtype, kv_dtype=kv_dtype), some(25))


@pytest.mark.parametrize("dtype", DTYPES)
def test_request_has_the_same_bits_with_shared_experts(dtype):
    check_the_tier(make_runner(dtype, size="experts"), some(25))


@pytest.mark.soak
@pytest.mark.parametrize("dtype", DTYPES)
def test_request_has_the_same_bits_with_experts_full_matrix(dtype):
    check_the_tier(make_runner(dtype, size="experts"), MATRIX)


@pytest.mark.soak
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8", "int8"])
def test_full_matrix_gives_identical_output(dtype, kv_dtype):
    check_the_tier(make_runner(dtype, kv_dtype=kv_dtype), MATRIX)


@pytest.mark.soak
@pytest.mark.parametrize("num_tokens", [19, 37, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_request_has_the_same_bits_with_other_step_sizes(dtype, num_tokens):
    runner = make_runner(dtype, num_tokens)
    check_the_tier(runner, some(500), num_tokens=num_tokens)


@pytest.mark.soak
@pytest.mark.parametrize("dtype", DTYPES)
def test_request_has_the_same_bits_at_the_bundled_models_size(dtype):
    check_the_tier(make_runner(dtype, size="forge-tiny"), some(200))


# ---- the comparison detects differences ----------------------------------------------------------


@pytest.mark.parametrize("uniform", [False, True])
def test_without_one_shape_logits_differ(uniform):
    """Float32 only, because in bfloat16 rounding hides the differences of so small a model.

    Attention alone changes logits only on some CPUs.
    """
    comparison = Comparison(make_runner("float32", one_shape=False, uniform=uniform))
    comparison.check(some(40))
    assert comparison.differing


@pytest.mark.soak
def test_default_tier_differs_in_bfloat16_with_a_larger_model():
    runner = make_runner("bfloat16", 256, size="forge-tiny", one_shape=False, uniform=False)
    comparison = Comparison(runner, num_tokens=256)
    comparison.check(some(100))
    assert comparison.differing


@pytest.fixture
def shorter_tiles(monkeypatch):
    """Make attention sum over tiles of 64 keys, and drop traces with other tiles."""
    jax.clear_caches()
    monkeypatch.setattr(xla_attention_file, "KV_TILE", 64)
    yield
    jax.clear_caches()


def test_different_summation_order_is_detected_in_bfloat16(request):
    long = Combination(prompt_len=150)
    expected = Comparison(make_runner("bfloat16"))
    expected.check([long])
    request.getfixturevalue("shorter_tiles")
    comparison = Comparison(make_runner.__wrapped__("bfloat16"))
    comparison.alone = expected.alone
    comparison.check([long])
    assert not expected.differing and comparison.differing


def test_scales_shared_by_a_batch_are_detected(monkeypatch):
    def quantize_together(rows, dtype):
        largest = attention_api.LARGEST[dtype]
        scale = jax.numpy.full(rows.shape[:-1], abs(rows).max() / largest)
        return (rows / scale[..., None]).astype(dtype), scale

    monkeypatch.setattr(attention_api, "quantize_rows", quantize_together)
    comparison = Comparison(make_runner.__wrapped__("float32", kv_dtype="int8"))
    comparison.check(some(8))
    assert comparison.differing


def test_experts_that_drop_tokens_are_detected(monkeypatch):
    mix = decoder_file.mix_experts

    def mix_some(x, gate_up, down, experts, weights, **options):
        one_hot = jax.nn.one_hot(experts, len(gate_up.weight), dtype=jax.numpy.int32).sum(axis=1)
        before = jax.numpy.cumsum(one_hot, axis=0) - one_hot
        fits = jax.numpy.take_along_axis(before, experts, axis=1) < 4
        weights = jax.numpy.where(fits, weights, 0.0)
        return mix(x, gate_up, down, experts, weights, **options)

    monkeypatch.setattr(decoder_file, "mix_experts", mix_some)
    comparison = Comparison(make_runner.__wrapped__("float32", size="experts"))
    comparison.check(some(8))
    assert comparison.differing


# ---- beyond the current scheduler ----------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "kv_dtype"), [*((d, "auto") for d in DTYPES), *EIGHT_BITS])
def test_verified_draft_rows_have_the_bits_of_decoded_ones(dtype, kv_dtype):
    runner = make_runner(dtype, kv_dtype=kv_dtype)
    decoded = run(runner, Combination(), 0)
    drafts = decoded.tokens[0][1:5]
    request = target(Combination())
    prompt = tuple(request.prompt_token_ids)
    runner.reset()
    admission = Admission(0, 0, request.params, (), len(prompt), (9, 4, 7, 2), prompt, (TARGET, 0))
    prefill = ScheduledSequence(0, 0, prompt, 1, True, (), 0, seq_key=(TARGET, 0))
    verify = ScheduledSequence(
        0, len(prompt), (FED_BACK, *drafts), 5, True, (), 1, seq_key=(TARGET, 0)
    )
    runner.read(runner.dispatch(StepPlan(0, (admission,), (prefill,))))
    [result] = runner.read(runner.dispatch(StepPlan(1, (), (verify,)))).sequences
    assert list(result.token_ids) == decoded.tokens[0][1:6]
    assert len(runner.rows) == 6
    assert all(bits == decoded.rows[key] for key, bits in runner.rows.items())


def test_gpu_options_exist_in_this_xla():
    lowered = jax.jit(lambda x: x + 1).lower(np.float32(1))
    lowered.compile(DETERMINISTIC_GPU_OPTIONS)
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        lowered.compile({"xla_gpu_deterministic_dreams": True})


@pytest.mark.parametrize("kernels", ["auto", "xla"])
def test_bundled_model_is_batch_invariant_and_has_a_fingerprint(kernels):
    options: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 512, "kernels": kernels}
    llm = LLM("forge-tiny", deterministic=True, **options)
    steps = [name for name in core_of(llm).device.compiled() if "[" in name]
    assert steps == ["mixed[64]"]
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=1, logprobs=20, ignore_eos=True)
    mine, others = "Once upon a time", [f"Tell me {i} stories. " * (i + 1) for i in range(9)]
    [alone] = llm.generate(mine, params, progress=False)
    crowd = llm.generate([*others, mine, *others], params, progress=False)[len(others)]
    assert crowd.num_cached_tokens == 0 and len(alone.outputs[0].token_ids) == 24
    assert crowd.outputs == alone.outputs  # tokens, text, and the float32 bits of the logprobs
    assert re.fullmatch("fp_[0-9a-f]{12}", llm.system_fingerprint)


def test_cpu_kernel_experts_are_batch_invariant():
    options: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 128, "dtype": "bfloat16"}
    llm = LLM(str(GOLDENS / "qwen3_moe_step"), deterministic=True, **options)
    params = SamplingParams(max_tokens=16, temperature=0.8, seed=1, logprobs=20, ignore_eos=True)
    rng = random.Random(2)
    mine, *others = [[rng.randrange(3, 331) for _ in range(n)] for n in (21, 3, 40, 9, 60, 1, 33)]
    [alone] = llm.generate([mine], params, progress=False)
    crowd = llm.generate([*others, mine, *others], params, progress=False)[len(others)]
    assert len(alone.outputs[0].token_ids) == 16
    assert crowd.outputs == alone.outputs
