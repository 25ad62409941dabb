"""The engine's loop with drafts, on the fake device: the same outputs, in fewer steps."""

import itertools
import random

import pytest

from forge_jax.config import EngineConfig
from forge_jax.core import EngineCore
from forge_jax.fake import assemble_fake
from forge_jax.sampling_params import SamplingParams
from forge_jax.schedule.request import Request
from forge_jax.speculate.drafter import Draft, OneByOne
from forge_jax.speculate.speculator import Speculator
from forge_jax.testing import FailingDevice


class Oracle:
    """Knows every sequence's whole output, and spoils it: `right` of the tokens stay."""

    def __init__(self, outputs, *, right: float, length: int, seed: int = 0):
        self.outputs, self.right, self.length = outputs, right, length
        self.rng = random.Random(seed)
        self.ended = []

    def propose(self, key, tokens, prompt_len, salt):
        known = len(tokens) - prompt_len
        rest = self.outputs.get(key, ())[known : known + self.length]
        drafts = [t if self.rng.random() < self.right else self.rng.randrange(200) for t in rest]
        return Draft(tuple(drafts), (0.9,) * len(drafts))

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
        core._device = device(core._device)
    if drafter is not None:
        one_step_ahead = config.batch.one_step_ahead
        core.speculator = Speculator(
            OneByOne(drafter), max_draft_tokens=8, one_step_ahead=one_step_ahead
        )
        drafts_always_pay(core.speculator)
    return core


def drafts_always_pay(speculator: Speculator) -> None:
    """Steps of any size take a second, and waiting costs nothing."""
    speculator.policy.ahead.record(1, 1.0)
    speculator.policy.ahead.record = lambda *_: None
    speculator.policy.waited.record = lambda *_: None


def serve(core: EngineCore, arriving: list[Request], *, at_once: int = 6):
    """What became of each sample: tokens, text, logprobs, end."""
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


MODES = [{}, {"one_step_ahead": False}, {"prefill_chunk_size": 7, "max_num_batched_tokens": 20}]


@pytest.mark.parametrize("options", MODES)
@pytest.mark.parametrize("right", [0.0, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_drafts_change_nothing_but_the_number_of_steps(options, right, seed):
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


def test_steps_that_raise_lose_nothing_with_drafts():
    expected = serve(make_core(), requests(40, 5))
    drafter = Oracle({k: v[0] for k, v in expected.items()}, right=0.8, length=5)
    count = itertools.count()
    core = make_core(drafter, device=lambda d: FailingDevice(d, lambda *_: next(count) % 23 == 22))
    assert serve(core, requests(40, 5)) == expected
    assert core.num_recoveries > 5 and core.speculator.stats().num_accepted_tokens > 100
