"""Structured output and token lists on a device that checks every mistake.

Under every schedule, each output is valid and equals that of the request alone.
"""

import asyncio
import itertools
import json
import os
import random
import re
import signal
from dataclasses import replace

import numpy as np
import pytest

from forge_jax import SamplingParams
from forge_jax.config import EngineConfig
from forge_jax.engine.constraints import Constraints
from forge_jax.engine.fake import WORDS, assemble_fake, fake_tokenizer
from forge_jax.engine.process.client import EngineProcess
from forge_jax.engine.thread import Engine
from forge_jax.errors import GrammarError, GrammarLimitError, RequestError
from forge_jax.grammar import GrammarCompiler, GrammarSpec, Matcher
from forge_jax.grammar.matcher import MaskPool
from forge_jax.schedule.request import Request
from forge_jax.speculate.drafter import Draft, OneByOne
from forge_jax.speculate.speculator import Speculator
from forge_jax.testing import FailingDevice, drafts_always_pay

TOKENIZER = fake_tokenizer()
EOS = TOKENIZER.eos_token_id
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def is_person(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["name", "age", "tags"]
        and len(value["name"]) <= 12
        and 0 <= value["age"] <= 150
        and set(value["tags"]) <= {"a", "b"}
    )


GRAMMARS = {
    "schema": (GrammarSpec.json_schema(PERSON), is_person),
    "regex": (
        GrammarSpec.regex(r"[a-z]{2,9}(, [a-z]{2,9}){1,4}\."),
        lambda text: re.fullmatch(r"[a-z]{2,9}(, [a-z]{2,9}){1,4}\.", text),
    ),
    "open": (GrammarSpec.regex("x[a-c]*"), lambda text: re.fullmatch("x[a-c]*", text)),
    "choice": (
        GrammarSpec.choice(["yes", "no", "maybe 日本"]),
        lambda text: text in ("yes", "no", "maybe 日本"),
    ),
    "lark": (
        GrammarSpec.grammar('start: "[" inner "]"\ninner: /[0-9]{1,3}/ | start'),
        lambda text: re.fullmatch(r"\[+[0-9]{1,3}\]+", text) and text.count("[") == text.count("]"),
    ),
}


@pytest.fixture(scope="module")
def compiler():
    """Share tried grammars between all engines here, so that no trial process starts."""
    made = GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size, (EOS,), limits=None)
    yield made
    made.close()


@pytest.fixture
def make_core(compiler):
    def make(*, seed=None, outputs=None, fails=None, **options):
        config = EngineConfig.from_options(
            **{"max_num_seqs": 8, "num_blocks": 400, "one_step_ahead": True, **options}
        )
        parts = assemble_fake(config, step_time_s=0.0, max_model_len=200, check=True)
        core = parts.core
        core.grammars = compiler
        core.device._next_token = None  # every token is equally likely
        if seed is not None:
            core.speculator = scripted(seed, outputs or {})
        if fails is not None:
            core.device = FailingDevice(core.device, fails)
        return core

    return make


class Script:
    """A drafter of the known future tokens, with nonsense in between and elsewhere."""

    def __init__(self, seed, outputs):
        self._rng = random.Random(seed)
        self._outputs = outputs

    def propose(self, key, tokens, prompt_len, salt):
        rng, known = self._rng, len(tokens) - prompt_len
        count = rng.randint(0, 5)
        draft = list(self._outputs[key][0][known : known + count] if key in self._outputs else ())
        while len(draft) < count or rng.random() < 0.3:
            draft.insert(rng.randint(0, len(draft)), rng.randrange(TOKENIZER.vocab_size))
        return Draft(tuple(draft[:5]), (0.9,) * len(draft[:5]))

    def ingest(self, limit):
        return False

    def end(self, key, tokens, prompt_len, salt):
        pass


def scripted(seed, outputs):
    speculator = Speculator(OneByOne(Script(seed, outputs)), max_draft_tokens=5)
    drafts_always_pay(speculator.policy)
    speculator.policy.acceptance.reach = lambda confidence, _: [1.0] * len(confidence)
    return speculator


LETTERS = tuple(TOKENIZER.encode(letter, False)[0] for letter in "abcd")
# In combination with a grammar, every text can still be written, in other tokens.
NO_WORDS = tuple(range(len(WORDS), TOKENIZER.vocab_size))
LISTS = (
    {"allowed_token_ids": LETTERS},
    {"allowed_token_ids": (*LETTERS, EOS), "bad_words": ("ab", "cc", "bda", "d")},
    {"bad_words": ("the", " dog", "e")},
)
LISTS_BESIDE_A_GRAMMAR = (
    {"allowed_token_ids": NO_WORDS},
    {"bad_words": ("bb", "ca", "the", "cat", ", a", "[[[")},
    {"allowed_token_ids": NO_WORDS, "bad_words": ("aa", "cc", "ab", "[1")},
)


def follows_lists(tokens, params) -> bool:
    bad = [TOKENIZER.encode(s + w.strip(), False) for w in params.bad_words for s in ("", " ")]
    allowed = params.allowed_token_ids
    return (allowed is None or set(tokens) <= set(allowed)) and not any(
        list(tokens[i : i + len(b)]) == b for b in bad for i in range(len(tokens))
    )


def requests(count: int, seed: int) -> list[Request]:
    rng, of_lists = random.Random(seed), random.Random(seed)
    made = []
    for i in range(count):
        name = rng.choice([*GRAMMARS, None, None])
        params = SamplingParams(
            n=rng.choice((1, 1, 3)),
            max_tokens=rng.choice((8, 60, 60, 60)),
            temperature=rng.choice((0.0, 1.0)),
            logprobs=rng.choice((None, 1)),
            prompt_logprobs=rng.choice((None, None, 0)),
            min_tokens=rng.choice((0, 0, 5)),
            ignore_eos=name is None or rng.random() < 0.3,
            stop=rng.choice(((), ("b", ","))),
            stop_token_ids=rng.choice(((), (40, 200))),
            structured_outputs=None if name is None else GRAMMARS[name][0],
        )
        if of_lists.random() < 0.5:
            lists = of_lists.choice(LISTS if name is None else LISTS_BESIDE_A_GRAMMAR)
            params = replace(params, **lists)
        stem = [7] * 40 if rng.random() < 0.5 else []
        prompt = stem + [rng.randrange(200) for _ in range(rng.randint(1, 40))]
        made.append(
            Request(request_id=f"{name}-{seed}-{i}", prompt_token_ids=prompt, params=params, seed=i)
        )
    return made


def serve(core, arriving, *, at_once=8, tick=None):
    """Return tokens, text, logprobs and end by (request id, sample)."""
    found: dict = {}
    waiting = list(reversed(arriving))
    while waiting or core.has_work:
        while waiting and len(core.scheduler.request_ids()) < at_once:
            core.add(waiting.pop())
        if tick is not None:
            tick(core)
        for request_id, deltas in core.tick().items():
            for delta in deltas:
                entry = found.setdefault((request_id, delta.index), [(), "", (), None, None])
                assert entry[3] is None, "news after the end"
                entry[0] += delta.token_ids
                entry[1] += delta.text
                entry[2] += delta.logprobs or ()
                entry[3] = delta.finish_reason
                entry[4] = delta.error
    assert core.scheduler.pool.num_used == 0 and not core.constraints
    return {key: tuple(entry) for key, entry in found.items()}


def check(found, batch) -> dict[str, int]:
    """Check that each output is valid or cut with the right reason; return counts by kind."""
    ended: dict[str, int] = {}
    params = {request.request_id: request.params for request in batch}
    assert sum(p.masked and not p.constrained for p in params.values()) > 3
    for (request_id, _), (tokens, text, logprobs, reason, error) in found.items():
        name = request_id.split("-")[0]
        assert reason in ("stop", "length") and error is None, (request_id, error)
        assert not logprobs or len(logprobs) == len(tokens)
        assert follows_lists(tokens, params[request_id]), (request_id, tokens)
        if name == "None":
            continue
        ended[name] = ended.get(name, 0) + (reason == "stop")
        if reason == "stop":
            assert GRAMMARS[name][1](text), (name, text)
    return ended


def test_outputs_are_valid_and_independent_of_the_schedule(make_core):
    batch = requests(60, seed=1)
    alone = serve(make_core(), batch, at_once=1)
    ended = check(alone, batch)
    assert set(ended) == set(GRAMMARS) and all(count >= 4 for count in ended.values()), ended
    together = make_core()
    assert serve(together, batch) == alone
    assert serve(make_core(one_step_ahead=False), batch) == alone
    assert serve(make_core(max_num_batched_tokens=7, prefill_chunk_size=3), batch) == alone
    tight = make_core(num_blocks=13)
    assert serve(tight, batch) == alone
    assert tight.scheduler.num_preemptions > 2
    assert serve(make_core(prefix_cache=False), batch) == alone


@pytest.mark.parametrize("seed", [1, 2])
def test_drafts_do_not_change_structured_output(make_core, seed):
    batch = requests(60, seed=seed)
    alone = serve(make_core(), batch, at_once=1)
    core = make_core(seed=seed, outputs=alone, num_blocks=40)
    assert serve(core, batch) == alone
    stats = core.speculator.stats()
    assert stats.num_accepted_tokens > 200 and stats.num_draft_tokens > stats.num_accepted_tokens


@pytest.mark.parametrize("drafts", [None, 5])
def test_failing_device_does_not_change_structured_output(make_core, drafts):
    batch, rng = requests(60, seed=3), random.Random(3)
    alone = serve(make_core(), batch, at_once=1)
    core = make_core(
        seed=drafts, outputs=alone, num_blocks=24, fails=lambda plan, where: rng.random() < 0.02
    )
    assert serve(core, batch) == alone
    assert core.num_recoveries > 5


def test_resumed_request_continues_in_its_grammar(make_core):
    """After a process death, only the request's tokens remain."""
    batch = [r for r in requests(60, seed=4) if r.params.masked]
    batch = [replace(r, params=replace(r.params, prompt_logprobs=None)) for r in batch]
    alone = serve(make_core(), batch, at_once=1)
    moved = []
    for request in batch:
        samples = [key for key in alone if key[0] == request.request_id]
        outputs = {i: alone[rid, i][0][: len(alone[rid, i][0]) // 2] for rid, i in samples}
        moved.append(replace(request, outputs=outputs))
    for (rid, i), (tokens, _, _, reason, error) in serve(make_core(), moved).items():
        before = len(alone[rid, i][0]) // 2
        assert (tokens, reason, error) == (alone[rid, i][0][before:], *alone[rid, i][3:])
    whole = next(key for key in alone if key[0].startswith("schema") and alone[key][3] == "stop")
    request = next(r for r in batch if r.request_id == whole[0])
    complete = replace(request, outputs={whole[1]: alone[whole][0]})
    [(tokens, text, _, reason, _)] = serve(make_core(), [complete]).values()
    assert (tokens, text, reason) == ((), "", "stop")
    broken = replace(request, outputs={whole[1]: (40, 41)})
    [(_, _, _, reason, error)] = serve(make_core(), [broken]).values()
    assert reason == "error" and isinstance(error, GrammarError)


def one(make_core, spec, core=None, **params):
    request = Request(
        request_id="one",
        prompt_token_ids=[5, 6, 7],
        params=SamplingParams(**{"max_tokens": 60, "structured_outputs": spec, **params}),
        seed=1,
    )
    [entry] = serve(core or make_core(), [request]).values()
    return entry


def test_open_grammar_ends_no_earlier_than_requested(make_core):
    spec = GRAMMARS["open"][0]
    plain = one(make_core, spec)
    assert plain[3] == "stop" and len(plain[0]) < 20
    assert len(one(make_core, spec, min_tokens=30)[0]) > 30
    assert one(make_core, spec, ignore_eos=True)[3] == "length"


def test_complete_grammar_ends_the_output_despite_other_parameters(make_core):
    for more in ({"min_tokens": 50}, {"ignore_eos": True}, {"stop": ("e",), "min_tokens": 9}):
        entry = one(make_core, GRAMMARS["choice"][0], **more)
        assert entry[3] == "stop" and GRAMMARS["choice"][1](entry[1])


def test_eos_is_allowed_before_min_tokens_if_nothing_else_is(make_core, monkeypatch):
    """Covers a vocabulary that cannot spell the grammar's continuation."""
    fill = MaskPool.fill

    def only_the_end(self, work, masks):
        failed = fill(self, work, masks)
        for _, row, _ in work:
            if masks[row, EOS >> 5] >> (EOS & 31) & 1:
                masks[row] = 0
                masks[row, EOS >> 5] = np.array(1 << (EOS & 31), np.uint32).view(np.int32)
        return failed

    monkeypatch.setattr(MaskPool, "fill", only_the_end)
    entry = one(make_core, GRAMMARS["open"][0], ignore_eos=True, min_tokens=20)
    assert (entry[1], entry[3]) == ("x", "stop")


def test_stop_string_does_not_truncate_structured_output(make_core):
    free = one(make_core, GRAMMARS["schema"][0])
    assert one(make_core, GRAMMARS["schema"][0], stop=('"', "}"), stop_token_ids=free[0]) == free
    assert is_person(free[1])


def test_last_token_may_complete_the_output(make_core):
    tokens = one(make_core, GRAMMARS["schema"][0])[0]
    assert one(make_core, GRAMMARS["schema"][0], max_tokens=len(tokens))[3] == "stop"
    assert one(make_core, GRAMMARS["schema"][0], max_tokens=len(tokens) - 1)[3] == "length"


def test_eos_is_not_part_of_the_text_but_a_grammars_last_token_is(make_core):
    entry = one(make_core, GRAMMARS["open"][0], skip_special_tokens=False)
    assert entry[0][-1] == EOS and "</s>" not in entry[1]
    entry = one(make_core, GRAMMARS["schema"][0])
    assert entry[0][-1] != EOS and entry[1].endswith("}")


@pytest.mark.parametrize("where", ["fill", "accept", "drafts"])
def test_failing_matcher_costs_only_its_request(make_core, monkeypatch, where):
    batch = requests(30, seed=6)
    alone = serve(make_core(), batch, at_once=1)
    victims = {key[0] for key in alone if key[0].startswith("schema")}
    core = make_core(seed=2 if where == "drafts" else None, outputs=alone)
    calls = {"masks": 0}
    if where == "accept":
        accept = Matcher.accept

        def failing(self, token_ids):
            if core.constraints and any(
                held.matcher is self and seq.request_id in victims and seq.num_output > 3
                for seq, held in core.constraints.held.items()
            ):
                raise GrammarError("planted")
            accept(self, token_ids)

        monkeypatch.setattr(Matcher, "accept", failing)
    else:
        masks = Constraints.masks

        def failing_masks(self, plan, seqs):
            filled, failed = masks(self, plan, seqs)
            culprits = [s for s in seqs if s.request_id in victims and s.num_output > 3]
            failed += [(s, GrammarError("planted")) for s in culprits]
            calls["masks"] += 1
            return filled, failed

        monkeypatch.setattr(Constraints, "masks", failing_masks)
    found = serve(core, batch)
    assert set(found) == set(alone)
    for key, entry in found.items():
        if key[0] in victims and len(alone[key][0]) > 8:
            assert entry[3] == "error" and isinstance(entry[4], GrammarError)
        elif key[0] not in victims:
            assert entry == alone[key]


@pytest.mark.parametrize("drafting", [False, True])
def test_request_with_costly_masks_is_isolated(make_core, drafting):
    batch = requests(30, seed=6)
    alone = serve(make_core(), batch, at_once=1)
    victims = {key[0] for key in alone if key[0].startswith("schema")}
    core = make_core(seed=2 if drafting else None, outputs=alone)
    add = Constraints.add

    def charged(self, seq, grammar, tokens):
        added = add(self, seq, grammar, tokens)
        if added and seq.request_id in victims:
            self.held[seq].charge.spent_s += 10.0
        return added

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Constraints, "add", charged)
        found = serve(core, batch)
    assert victims and set(found) == set(alone)
    for key, entry in found.items():
        if key[0] in victims:
            assert entry[3] == "error" and isinstance(entry[4], GrammarLimitError)
        else:
            assert entry == alone[key]


def test_samples_of_a_request_share_a_mask_budget(make_core):
    """On a clock where each mask and each token takes 20 ms."""

    def tokens_until_the_end(n):
        ticks, core = itertools.count(), make_core()
        clock = lambda: 0.02 * next(ticks)  # noqa: E731
        core.constraints.clock = clock
        params = SamplingParams(
            n=n, max_tokens=100, structured_outputs=GRAMMARS["open"][0], ignore_eos=True
        )
        request = Request(request_id="one", prompt_token_ids=[5, 6, 7], params=params, seed=1)
        entries = serve(core, [request]).values()
        assert all(isinstance(entry[4], GrammarLimitError) for entry in entries)
        return [len(entry[0]) for entry in entries]

    [alone] = tokens_until_the_end(1)
    assert 10 < alone < 30  # 500 ms, and 10 of the 40 ms that each token takes
    assert max(tokens_until_the_end(4)) < alone


@pytest.mark.parametrize("asked", [{"structured_outputs": GRAMMARS["schema"][0]}, LISTS[1]])
def test_device_that_ignores_masks_is_detected(make_core, asked):
    """The other tests must be able to fail."""

    class Careless:
        def __init__(self, device):
            self._device = device
            self.read, self.reset = device.read, device.reset

        def dispatch(self, plan):
            masks = None if plan.masks is None else plan.masks | -1
            return self._device.dispatch(replace(plan, masks=masks))

    core = make_core()
    core.device = Careless(core.device)
    entry = one(make_core, None, core=core, **asked)
    assert entry[3] == "error" and isinstance(entry[4], GrammarError)


@pytest.mark.parametrize(
    ("asked", "causes"),
    [
        ({"structured_outputs": GRAMMARS["choice"][0], "allowed_token_ids": LETTERS},
         "allowed_token_ids and the grammar"),
        ({"structured_outputs": GrammarSpec.regex("abc|abd"), "bad_words": ["bc", "bd"]},
         "bad_words and the grammar"),
        ({"structured_outputs": GrammarSpec.regex("a{9}"), "allowed_token_ids": LETTERS[:1],
          "bad_words": ["aa"]}, "allowed_token_ids and bad_words and the grammar"),
        ({"allowed_token_ids": LETTERS[:2], "bad_words": ["aa", "ab", "ba", "bb"]},
         "allowed_token_ids and bad_words"),
        ({"allowed_token_ids": [EOS], "min_tokens": 3}, "allowed_token_ids and min_tokens"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("drafts", [None, 7])
def test_output_without_allowed_tokens_is_an_error(make_core, asked, causes, drafts):
    spec = asked.get("structured_outputs")
    more = {name: value for name, value in asked.items() if name != "structured_outputs"}
    core = make_core(seed=drafts, outputs={("one", 0): ([*LETTERS[:2] * 20],)} if drafts else None)
    entry = one(make_core, spec, core=core, **more)
    assert entry[3] == "error" and isinstance(entry[4], RequestError)
    assert str(entry[4]).startswith(f"{causes} leave no token") and entry[4].param in more
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    other = Request(request_id="other", prompt_token_ids=[5], params=params)
    assert next(iter(serve(core, [other]).values()))[3] == "length", "it costs nobody else anything"


def test_disallowed_eos_is_never_sampled(make_core):
    def often_ending():
        core = make_core()
        core.device._eos_token_id, core.device._eos_threshold = EOS, 2**30  # one in four
        return core

    ends = one(make_core, None, core=often_ending(), allowed_token_ids=(*LETTERS, EOS))
    assert ends[3] == "stop" and set(ends[1]) <= set("abcd")
    endless = one(make_core, None, core=often_ending(), allowed_token_ids=LETTERS)
    assert endless[3] == "length" and len(endless[0]) == 60


@pytest.mark.parametrize(("asked", "waits"), [(LISTS[0], False), (LISTS[2], True)])
def test_allowed_tokens_run_one_step_ahead_and_bad_words_do_not(make_core, asked, waits):
    core, unread, depths = make_core(), [], []
    device = core.device

    class Watched:
        reset = device.reset

        def dispatch(self, plan):
            depths.append(len(unread))
            unread.append(plan)
            return device.dispatch(plan)

        def read(self, pending):
            unread.pop(0)
            return device.read(pending)

    core.device = Watched()
    one(make_core, None, core=core, ignore_eos=True, **asked)
    assert (max(depths) == 0) is waits


def test_stop_string_ends_an_output_with_token_lists(make_core):
    free = one(make_core, None, allowed_token_ids=LETTERS)
    stop = free[1][5:8]
    cut = one(make_core, None, allowed_token_ids=LETTERS, stop=(stop,))
    assert (cut[1], cut[3]) == (free[1][: free[1].index(stop)], "stop")


def test_step_without_a_grammar_has_no_masks(make_core):
    core, seen = make_core(), []
    dispatch = core.device.dispatch
    core.device.dispatch = lambda plan: (seen.append(plan.masks), dispatch(plan))[1]
    plain = SamplingParams(max_tokens=20, ignore_eos=True)
    bound = SamplingParams(max_tokens=20, structured_outputs=GRAMMARS["choice"][0])
    for i, params in enumerate((plain, bound, plain)):
        core.add(Request(request_id=str(i), prompt_token_ids=[3] * 9, params=params))
    while core.has_work:
        core.tick()
    assert 0 < sum(masks is not None for masks in seen) < 8
    assert len(seen) >= 20


@pytest.mark.parametrize(("num_free", "num_bound"), [(7, 1), (4, 4), (0, 8)])
def test_few_masks_do_not_delay_others_and_many_are_awaited(make_core, num_free, num_bound):
    core, in_flight = make_core(prefix_cache=False), []
    device, unread = core.device, []

    class Watched:
        reset = device.reset

        def dispatch(self, plan):
            in_flight.append(len(unread))
            unread.append(plan)
            return device.dispatch(plan)

        def read(self, pending):
            unread.pop(0)
            return device.read(pending)

    core.device = Watched()
    free = SamplingParams(max_tokens=40, ignore_eos=True)
    bound = replace(free, structured_outputs=GrammarSpec.regex("[a-c]{200}"))
    for i in range(num_free + num_bound):
        params = free if i < num_free else bound
        core.add(Request(request_id=str(i), prompt_token_ids=[i + 1], params=params))
    while core.has_work:
        core.tick()
    waited = in_flight.count(0)
    if num_bound == 1:  # it has the device to itself every second step
        assert waited <= 25 and len(in_flight) <= 65
    else:
        assert waited == len(in_flight) <= 42


# ---- the async engine ----------------------------------------------------------------------------


async def collect(stream) -> tuple[str, str | None, Exception | None]:
    text, reason, error = "", None, None
    async for deltas in stream:
        for delta in deltas:
            text += delta.text
            reason, error = delta.finish_reason, delta.error
    return text, reason, error


@pytest.fixture
async def engine():
    made = Engine.fake(check=True)
    made.start()
    yield made
    await made.stop()


async def test_engine_compiles_grammars_off_its_thread(engine):
    params = SamplingParams(max_tokens=80, structured_outputs=GRAMMARS["schema"][0])
    await engine.prepare(params)
    texts = await asyncio.gather(
        *[collect(engine.submit([5, i], params, request_id=f"r{i}")) for i in range(5)]
    )
    assert all(reason == "stop" and is_person(text) for text, reason, _ in texts)
    other = replace(params, structured_outputs=GRAMMARS["regex"][0])  # not prepared before
    text, reason, _ = await collect(engine.submit([5], other, request_id="r"))
    assert reason == "stop" and GRAMMARS["regex"][1](text)


@pytest.mark.slow
async def test_killed_engine_process_continues_in_every_grammar():
    jobs = [
        ([i, 7], SamplingParams(max_tokens=60, seed=i, structured_outputs=GRAMMARS[name][0]))
        for i, name in enumerate(["schema", "regex", "lark", "choice", "schema", "regex"])
    ]

    async def outcomes(engine, during):
        engine.start()
        for _, params in jobs:
            await engine.prepare(params)
        streams = [
            asyncio.ensure_future(collect(engine.submit(prompt, params, request_id=f"r{i}")))
            for i, (prompt, params) in enumerate(jobs)
        ]
        await during(engine)
        found = await asyncio.wait_for(asyncio.gather(*streams), 60)
        await engine.stop()
        return found

    async def nothing(engine):
        pass

    async def kill(engine):
        while engine.stats().generation_tokens < 30:
            await asyncio.sleep(0.01)
        os.kill(engine.pid, signal.SIGKILL)

    expected = await outcomes(Engine.fake(), nothing)
    engine = await asyncio.to_thread(EngineProcess.fake, step_time_s=0.02)
    assert await outcomes(engine, kill) == expected
    assert engine.num_restarts == 1
    assert all(reason == "stop" for _, reason, _ in expected)


async def test_uncompilable_grammar_ends_only_its_request(engine):
    wrong = SamplingParams(structured_outputs=GrammarSpec.json_schema({"not": {}}))
    with pytest.raises(RequestError, match="not supported: not"):
        await engine.prepare(wrong)
    wrong = SamplingParams(structured_outputs=GrammarSpec.regex("(?=a)"))
    _, reason, error = await collect(engine.submit([5], wrong, request_id="a"))
    assert reason == "error" and isinstance(error, RequestError)
    plain = SamplingParams(max_tokens=5, ignore_eos=True)
    assert (await collect(engine.submit([5], plain, request_id="b")))[1] == "length"


async def test_request_may_be_aborted_while_its_grammar_compiles(engine):
    params = SamplingParams(structured_outputs=GrammarSpec.regex("[a-z]{9}"))
    stream = engine.submit([5], params, request_id="a")
    stream.abort()
    assert (await collect(stream))[1] == "abort"
    assert not len(engine._preparation)
    await asyncio.sleep(0.2)
    assert engine.stats().num_running == engine.stats().num_waiting == 0
