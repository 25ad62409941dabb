"""The router of a group of engines: cached prefixes, load, and its counts."""

import dataclasses
import random

import pytest

from forge_jax import SamplingParams
from forge_jax.engine.process.routing import SAMPLE_TOKENS, PrefixIndex, Route, Router
from forge_jax.schedule.outputs import Delta
from forge_jax.schedule.request import LoraRef, Request

BLOCK = 16
ALL = (0, 1)


@pytest.fixture
def router() -> Router:
    return Router(block_size=BLOCK, num_blocks=256)


def request(prompt: list[int], n: int = 1, **fields) -> Request:
    params = SamplingParams(n=n)
    return Request(request_id="r", prompt_token_ids=prompt, params=params, **fields)


def begin(router: Router, route: Route) -> None:
    """Let a request get its first token."""
    router.take(route, [Delta(0, token_ids=(1,))])


def finish(router: Router, route: Route, output: tuple[int, ...] = ()) -> None:
    ends = [Delta(i, token_ids=output, finish_reason="stop") for i in list(route.outputs)]
    router.take(route, ends)


def test_longest_cached_prefix_wins_at_equal_load(router):
    story = list(range(100, 200))
    for engine, prompt in ((0, story[:32]), (1, story)):
        finish(router, router.route(request(prompt), [engine]))
    assert router.route(request([*story, 7]), ALL).engine == 1
    router = Router(block_size=BLOCK, num_blocks=0)  # without a prefix cache
    finish(router, router.route(request(story), [1]))
    assert router.route(request([*story, 7]), ALL).engine == 0


@pytest.mark.parametrize(("blocks", "samples", "chosen"), [
    (SAMPLE_TOKENS // BLOCK + 1, 1, 1),
    (SAMPLE_TOKENS // BLOCK - 1, 1, 0),
    (3 * SAMPLE_TOKENS // BLOCK + 1, 3, 1),
    (3 * SAMPLE_TOKENS // BLOCK - 1, 3, 0),
])  # fmt: skip
def test_prefix_outweighs_a_sample_per_constant_number_of_tokens(router, blocks, samples, chosen):
    prefix = list(range(blocks * BLOCK))
    finish(router, router.route(request(prefix), [1]))
    begin(router, router.route(request([5], n=samples), [1]))
    assert router.route(request([*prefix, 9]), ALL).engine == chosen


def test_uncomputed_prompts_count_until_their_first_token(router):
    waiting = router.route(request([1] * 500), [0])
    begin(router, router.route(request([2], n=2), [1]))
    probe = router.route(request([3]), ALL)
    assert probe.engine == 1  # 500 + 128 against 256
    router.discard(probe)
    begin(router, waiting)
    assert router.route(request([3]), ALL).engine == 0  # 128 against 256


def test_outputs_extend_the_cached_prefix(router):
    prompt, output = list(range(20)), tuple(range(1000, 1300))
    finish(router, router.route(request(prompt), [1]), output)
    begin(router, router.route(request([5], n=2), [1]))  # outweighs the prompt alone
    assert router.route(request([*prompt, *output, 3]), ALL).engine == 1


@pytest.mark.parametrize("fields", [
    {"cache_salt": "other"},
    {"lora": LoraRef(name="a", place=1, identity="1")},
])  # fmt: skip
def test_namespaces_of_the_prefix_cache_are_separate(router, fields):
    prompt = list(range(64))
    finish(router, router.route(request(prompt), [0]))
    finish(router, router.route(request(list(range(500, 700))), [1]))  # 1 remembers more blocks
    other = dataclasses.replace(request(prompt), **fields)
    finish(router, router.route(other, [1]))
    begin(router, router.route(request([5]), [1]))
    assert router.route(request(prompt), ALL).engine == 0
    assert router.route(other, [0]).uncomputed == 64


def test_replaced_process_has_no_cached_prefix(router):
    prompt = list(range(64))
    finish(router, router.route(request(prompt), [1]))
    router.forget(1)
    assert router.route(request(prompt), [1]).uncomputed == 64


def test_equal_engines_take_turns(router):
    chosen = []
    for i in range(6):
        route = router.route(request([i] * 64), ALL)
        chosen.append(route.engine)
        finish(router, route)
    assert chosen == [0, 1, 0, 1, 0, 1]


def test_full_index_evicts_the_end_of_the_oldest_sequence():
    index = PrefixIndex(6)
    index.add([1, 2, 3, 4])
    index.add([11, 12, 13])
    assert index.match([1, 2, 3, 4]) == 3
    assert index.match([11, 12, 13]) == 3
    assert len(index) == 6


def test_counts_return_to_zero():
    rng = random.Random(0)
    router = Router(block_size=4, num_blocks=20)
    live: list[Route] = []
    for _ in range(2000):
        if not live or rng.random() < 0.4:
            prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 30))]
            route = router.route(request(prompt, n=rng.randint(1, 3)), range(3))
            (router.discard if rng.random() < 0.1 else live.append)(route)
            continue
        route = rng.choice(live)
        index = rng.choice(list(route.outputs))
        reason = "stop" if rng.random() < 0.3 else None
        router.take(route, [Delta(index, token_ids=(rng.randrange(2),), finish_reason=reason)])
        if not route.outputs:
            live.remove(route)
    for route in live:
        finish(router, route)
    engines = router._engines.values()
    assert [(each.num_samples, each.uncomputed) for each in engines] == [(0, 0)] * 3
    assert all(len(each.index) <= 20 for each in engines)
