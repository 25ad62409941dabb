"""The engine's loop with drafts, on the fake device: the same outputs in fewer steps."""

import itertools
import random

import pytest

from forge_jax.config import EngineConfig
from forge_jax.engine.core import EngineCore
from forge_jax.engine.fake import assemble_fake
from forge_jax.sampling_params import SamplingParams
from forge_jax.schedule.lifecycle import Status
from forge_jax.schedule.request import Request, Sequence
from forge_jax.speculate.draft_length import FIRST_RETRY
from forge_jax.speculate.drafter import Draft, OneByOne
from forge_jax.speculate.speculator import LOOK_PART, Budget, Speculator
from forge_jax.testing import FailingDevice, drafts_always_pay


class Oracle:
    """A drafter with every sequence's output, of which a share `right` is unchanged."""

    def __init__(self, outputs, *, right: float, length: int, seed: int = 0):
        self.outputs, self.right, self.length = outputs, right, length
        self.rng = random.Random(seed)
        self.ended = []

    def propose(self, key, tokens, prompt_len, salt):
        known = len(tokens) - prompt_len
        rest = self.outputs.get(key, ())[known : known + self.length]
        drafts = [t if self.rng.random() < self.right else self.rng.randrange(200) for t in rest]
        return Draft(tuple(drafts), (0.9,) * len(drafts))

    def ingest(self, limit):
        return False

    def end(self, key, tokens, prompt_len, salt):
        self.ended.append(key)


def requests(count: int, seed: int) -> list[Request]:
    rng = random.Random(seed)
    return [
        Request(
            request_id=f"r{i}",
            prompt_token_ids=[rng.randrange(200) for _ in range(rng.randint(1, 60))],
            params=SamplingParams(
                n=rng.choice((1, 1, 3)),
                max_tokens=rng.randint(1, 50),
                min_tokens=rng.choice((0, 1)),
                temperature=rng.choice((0.0, 1.0)),
                logprobs=rng.choice((None, 1)),
                prompt_logprobs=rng.choice((None, None, 0)),
                stop=rng.choice(((), ("garden",), ("the", "river"))),
                stop_token_ids=rng.choice(((), (5, 6, 7))),
            ),
            cache_salt=rng.choice(("", "a")),
            seed=rng.getrandbits(64),
        )
        for i in range(count)
    ]


def make_core(drafter=None, *, device=None, **options) -> EngineCore:
    config = EngineConfig.from_options(**{"max_num_seqs": 8, "num_blocks": 24, **options})
    parts = assemble_fake(config, step_time_s=0.0, max_model_len=160, check=True)
    core = parts.core
    if device is not None:
        core.device = device(core.device)
    if drafter is not None:
        one_step_ahead = config.batch.one_step_ahead
        core.speculator = Speculator(
            OneByOne(drafter), max_draft_tokens=8, one_step_ahead=one_step_ahead
        )
        drafts_always_pay(core.speculator.policy)
    return core


def serve(core: EngineCore, arriving: list[Request], *, at_once: int = 6):
    found = {}
    waiting = list(reversed(arriving))
    while waiting or core.has_work:
        while waiting and len(core.scheduler.request_ids()) < at_once:
            core.add(waiting.pop())
        for request_id, deltas in core.tick().items():
            for delta in deltas:
                outcome = found.setdefault((request_id, delta.index), [(), "", (), (), None])
                outcome[0] += delta.token_ids
                outcome[1] += delta.text
                outcome[2] += delta.logprobs or ()
                outcome[3] += delta.prompt_logprobs or ()
                outcome[4] = (delta.finish_reason, delta.stop_reason)
    assert core.scheduler.pool.num_used == 0
    return found


@pytest.mark.parametrize("length", [0, 3])
def test_drafting_time_counts_even_if_nothing_is_verified(monkeypatch, length):
    arriving, core = requests(4, seed=1), make_core()
    outputs = {key: outcome[0] for key, outcome in serve(make_core(), arriving).items()}
    drafter = OneByOne(Oracle(outputs, right=1.0, length=length))
    core.speculator = Speculator(drafter, max_draft_tokens=8)
    policy = core.speculator.policy
    monkeypatch.setattr(policy, "knows", lambda num_sequences, **_: True)
    monkeypatch.setattr(policy, "plain_s", lambda num_sequences, **_: 1.0)

    def choose(num_sequences, updates, *, in_flight=False, **_) -> int:
        """Choose drafts that seem worth waiting for, but are not."""
        return int(in_flight)

    monkeypatch.setattr(policy, "choose", choose)
    serve(core, arriving)
    assert core.speculator.stats().num_drafts == 0
    assert (policy.drafted.largest > 0) == (length > 0)


class TimedDevice:
    """A device whose steps take a second on its own clock, plus the lookups' time."""

    def __init__(self, device):
        self._device, self.now_s, self.looked_s = device, 0.0, 0.0

    def __getattr__(self, name):
        return getattr(self._device, name)

    def read(self, pending):
        self.now_s += 1.0
        return self._device.read(pending)

    def look(self, seconds: float) -> None:
        self.now_s += seconds
        self.looked_s += seconds


class TimedDrafter:
    """A drafter whose lookups take time, most for the first one, which indexes the prompt."""

    def __init__(self, drafter, device, *, first_s: float, later_s: float):
        self._drafter, self._device = drafter, device
        self._first_s, self._later_s, self._seen = first_s, later_s, set()

    def propose(self, key, *rest):
        self._device.look(self._later_s if key in self._seen else self._first_s)
        self._seen.add(key)
        return self._drafter.propose(key, *rest)

    def ingest(self, limit):
        return False

    def end(self, *ended):
        self._drafter.end(*ended)


def timed_core(outputs, *, right: float, first_s: float, later_s: float):
    """Return an engine that measures virtual times."""
    core = make_core()
    device = core.device = TimedDevice(core.device)
    oracle = Oracle(outputs, right=right, length=8)
    drafter = TimedDrafter(oracle, device, first_s=first_s, later_s=later_s)
    core.speculator = Speculator(OneByOne(drafter), max_draft_tokens=8, clock=lambda: device.now_s)
    return core, device


def long_requests(count: int) -> list[Request]:
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    return [
        Request(request_id=f"r{i}", prompt_token_ids=[i, i + 1], params=params, seed=i)
        for i in range(count)
    ]


def test_unprofitable_drafting_costs_little_time():
    core, device = timed_core({}, right=0.0, first_s=2.0, later_s=0.1)
    serve(core, long_requests(12), at_once=1)
    assert core.num_steps > 1000
    trials = 1
    while core.num_steps > FIRST_RETRY * (2**trials - 1):
        trials += 1
    most = trials * (Budget.TRIAL + 2.0) + LOOK_PART * core.num_steps
    assert 0.5 * most < device.looked_s < most


@pytest.mark.parametrize(("first_s", "later_s"), [(3.0, 0.02), (1e-4, 1e-4)])
def test_correct_drafts_are_found_at_any_lookup_cost(first_s, later_s):
    plain = make_core()
    expected = serve(plain, long_requests(12), at_once=1)
    outputs = {key: outcome[0] for key, outcome in expected.items()}
    core, device = timed_core(outputs, right=1.0, first_s=first_s, later_s=later_s)
    assert serve(core, long_requests(12), at_once=1) == expected
    assert core.num_steps < 0.25 * plain.num_steps
    assert device.now_s < 0.35 * plain.num_steps  # includes the lookups


MODES = [{}, {"one_step_ahead": False}, {"prefill_chunk_size": 7, "max_num_batched_tokens": 20}]


@pytest.mark.parametrize("options", MODES)
@pytest.mark.parametrize("right", [0.0, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_drafts_only_change_the_number_of_steps(options, right, seed):
    plain = make_core(**options)
    expected = serve(plain, requests(30, seed))
    drafter = Oracle({k: v[0] for k, v in expected.items()}, right=right, length=3 + 3 * seed)
    core = make_core(drafter, **options)
    assert serve(core, requests(30, seed)) == expected
    stats = core.speculator.stats()
    assert stats.num_draft_tokens > 0
    if right == 1.0:
        assert core.num_steps < 0.8 * plain.num_steps
        assert stats.num_accepted_tokens > 0.9 * stats.num_draft_tokens
    assert sorted(set(drafter.ended)) == sorted(expected)
    assert not core.speculator._experience and not core.speculator._verifying


def test_failed_steps_lose_nothing_with_drafts():
    expected = serve(make_core(), requests(40, 5))
    drafter = Oracle({k: v[0] for k, v in expected.items()}, right=0.8, length=5)
    count = itertools.count()
    core = make_core(drafter, device=lambda d: FailingDevice(d, lambda *_: next(count) % 23 == 22))
    assert serve(core, requests(40, 5)) == expected
    assert core.num_recoveries > 5 and core.speculator.stats().num_accepted_tokens > 100


def test_confirmed_predictions_are_not_looked_up_again():
    asked = []

    class Counting(Oracle):
        def propose(self, key, tokens, prompt_len, salt):
            asked.append((key, len(tokens)))
            return super().propose(key, tokens, prompt_len, salt)

    prompt, output = [1, 2], [3, 4, 5, 6, 7, 8]
    request = Request(request_id="r", prompt_token_ids=prompt, params=SamplingParams())
    seq = Sequence(
        request=request,
        index=0,
        seed=1,
        stop_ids=frozenset(),
        max_tokens=50,
        tokens=list(prompt),
        status=Status.DECODING,
    )
    seq.tokens.append(3)
    drafter = OneByOne(Counting({seq.key: output}, right=1.0, length=4))
    assert drafter.predict_confidence([seq]) == [[pytest.approx(0.81), 0.9, 0.9]]
    seq.tokens.append(4)
    assert drafter.propose([seq]) == [Draft((5, 6, 7), (0.9,) * 3)] and len(asked) == 1
    assert drafter.propose([seq]) == [Draft((5, 6, 7, 8), (0.9,) * 4)] and len(asked) == 2
    drafter.predict_confidence([seq])
    seq.tokens.append(9)  # the prediction was 5
    drafter.propose([seq])
    assert len(asked) == 4
