"""The draft model: its computations, its cache, and the engine with it.

tests/engine/test_speculation.py shows that outputs keep their bits.
"""

from __future__ import annotations

import logging
import random
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forge_jax import LLM, SamplingParams
from forge_jax.config import EngineConfig
from forge_jax.engine import builder as assemble
from forge_jax.engine.core import EngineCore
from forge_jax.engine.fake import assemble_fake
from forge_jax.engine.sizes import Residents, Sizes
from forge_jax.errors import ConfigError
from forge_jax.models.kv import keys_and_values
from forge_jax.schedule.lifecycle import Status
from forge_jax.schedule.request import Request, Sequence
from forge_jax.speculate.draft import ModelDrafter
from forge_jax.speculate.draft_model import DraftModel, DraftModelOptions
from forge_jax.speculate.draft_step import Row, draft_shapes, pack_params
from forge_jax.step.kv_cache import KVShape
from forge_jax.testing import core_of, drafts_always_pay, failing_steps, random_leaves, tiny_model

BLOCK, K, VOCAB, MAX_LEN = 8, 4, 64, 128


# ---- the host's part, on a device that checks every mistake --------------------------------------


def follow(prefix: int, token: int) -> int:
    """Return what the keys and values of a token represent: all tokens up to it."""
    return hash((prefix, token))


def guess(prefix: int) -> int:
    return prefix % VOCAB


def expected_draft(tokens: list[int], length: int) -> list[int]:
    prefix = 0
    for token in tokens:
        prefix = follow(prefix, token)
    drafts = []
    for _ in range(length):
        drafts.append(guess(prefix))
        prefix = follow(prefix, drafts[-1])
    return drafts


class FakeDraftModel:
    """A draft model whose cache stores the tokens that each position represents."""

    def __init__(self, num_blocks: int, *, context: int = MAX_LEN, extend_tokens: int = 24):
        self.kv_shape = SimpleNamespace(num_blocks=num_blocks, block_size=BLOCK)
        self.max_draft_tokens, self.context = K, context
        self.extend_tokens, self.extend_rows = extend_tokens, 3
        self.can_draft, self.proposes = True, False
        self.computed = []  # tokens of each `extend`
        self.reset()

    def reset(self):
        self._kv = {}

    def extend(self, rows):
        assert 0 < len(rows) <= self.extend_rows
        self.computed.append(sum(len(row.token_ids) for row in rows))
        assert self.computed[-1] <= self.extend_tokens
        for row in rows:
            self._compute(row, row.token_ids, row.start)

    def draft(self, rows):
        blocks = [block for row in rows for block in row.blocks]
        assert len(set(blocks)) == len(blocks), "a block belongs to two"
        drafts = np.full((len(rows), K), -1, np.int32)
        for row, drafted in zip(rows, drafts, strict=True):
            assert 1 <= len(row.token_ids) <= 2
            assert row.end <= min(len(row.blocks) * BLOCK, self.context)
            position = row.start + len(row.token_ids)
            prefix = self._compute(row, row.token_ids, row.start)
            for j in range(K):
                drafted[j] = guess(prefix)
                if position + j >= row.end:
                    break
                if j < K - 1:
                    prefix = self._compute(row, [drafted[j]], position + j)
        return drafts, np.full((len(rows), K), 0.5, np.float32)

    def _compute(self, row, tokens, start):
        place = [(row.blocks[p // BLOCK], p % BLOCK) for p in range(start + len(tokens))]
        stored = [
            self._kv[at] for at in place[:start]
        ]  # a KeyError means that it was never written
        for (before, _), (prefix, token) in pairwise([(0, 0), *stored]):
            assert prefix == follow(before, token), "the cache holds a mixture"
        prefix = stored[-1][0] if stored else 0
        for at, token in zip(place[start:], tokens, strict=True):
            prefix = follow(prefix, int(token))
            self._kv[at] = (prefix, int(token))
        return prefix


def make_seq(
    name: str,
    prompt_len: int,
    rng: random.Random,
    max_len: int = MAX_LEN,
    temperature: float = 1.0,
) -> Sequence:
    prompt = [rng.randrange(VOCAB) for _ in range(prompt_len)]
    params = SamplingParams(temperature=temperature)
    request = Request(request_id=name, prompt_token_ids=prompt, params=params)
    return Sequence(
        request=request,
        index=0,
        seed=1,
        stop_ids=frozenset(),
        max_tokens=max_len - prompt_len,
        tokens=prompt,
        status=Status.DECODING,
    )


def check(drafter: ModelDrafter) -> None:
    drafter._pool.check()
    held = [block for computed in drafter._computed.values() for block in computed.blocks]
    assert len(set(held)) == len(held) == drafter._pool.num_used


@pytest.mark.parametrize("num_blocks", [12, 40, 200])
@pytest.mark.parametrize("seed", range(4))
def test_drafts_follow_the_current_tokens_after_any_rollback(num_blocks, seed):
    rng = random.Random(seed)
    model = FakeDraftModel(num_blocks)
    drafter = ModelDrafter(model)  # type: ignore[arg-type]
    seqs: list[Sequence] = []
    asked = drafted = 0
    for tick in range(400):
        if len(seqs) < 6 and rng.random() < 0.2:
            seqs.append(make_seq(f"s{tick}", rng.choice((1, 2, 7, 8, 9, 50)), rng))
        for seq in seqs.copy():
            fate = rng.random()
            if fate < 0.02 or len(seq.tokens) >= MAX_LEN - 2:
                seqs.remove(seq)
                seq.status = Status.FINISHED
                drafter.end(seq)
            elif fate < 0.06:
                seq.status = Status.QUEUED if seq.running else Status.DECODING
        running = [seq for seq in seqs if seq.running]
        if rng.random() < 0.02:
            drafter.reset()
        if rng.random() < 0.3:  # a step without drafts
            for seq in running:
                seq.tokens.append(
                    rng.choice((rng.randrange(VOCAB), expected_draft(seq.tokens, 1)[0]))
                )
            continue
        drafts = drafter.propose(running)
        check(drafter)
        for seq, draft in zip(running, drafts, strict=True):
            asked += 1
            drafted += bool(draft.token_ids)
            assert list(draft.token_ids) == expected_draft(seq.tokens, len(draft.token_ids))
            assert len(draft.confidence) == len(draft.token_ids)
            assert len(draft.token_ids) <= seq.max_len - len(seq.tokens) - 1
            accepted = rng.randint(0, len(draft.token_ids)) if rng.random() < 0.5 else K
            seq.tokens += draft.token_ids[:accepted]
            right = rng.random() < 0.3  # the token after them is the expected one
            seq.tokens.append(expected_draft(seq.tokens, 1)[0] if right else rng.randrange(VOCAB))
    assert drafted > (0.9 if num_blocks == 200 else 0.2) * 0.7 * asked
    for seq in seqs:
        drafter.end(seq)
    assert drafter._pool.num_used == 0 and not drafter._computed


def test_check_detects_a_cache_that_is_not_rolled_back(monkeypatch):
    monkeypatch.setattr(
        "forge_jax.speculate.draft._Computed.align",
        lambda self: self.tokens.__delitem__(slice(len(self.seq.tokens) - 1, None)),
    )
    rng = random.Random(1)
    drafter = ModelDrafter(FakeDraftModel(40))  # type: ignore[arg-type]
    seq = make_seq("s", 9, rng)
    drafter.propose([seq])
    seq.tokens += [(token + 1) % VOCAB for token in expected_draft(seq.tokens, 3)]
    [draft] = drafter.propose([seq])
    assert list(draft.token_ids) != expected_draft(seq.tokens, len(draft.token_ids))


def test_long_prompt_is_prefilled_in_bounded_calls_before_drafting():
    model = FakeDraftModel(100, extend_tokens=24)
    drafter = ModelDrafter(model)  # type: ignore[arg-type]
    long, short = make_seq("long", 60, random.Random(1)), make_seq("short", 2, random.Random(2))
    lengths = [[len(d.token_ids) for d in drafter.propose([long, short])] for _ in range(3)]
    assert lengths == [[0, K], [0, K], [K, K]]
    assert model.computed == [24, 24, 11]


def test_preempted_sequence_keeps_its_cache_until_blocks_are_needed():
    model = FakeDraftModel(9, extend_tokens=200)
    drafter = ModelDrafter(model)  # type: ignore[arg-type]
    first, second = make_seq("a", 30, random.Random(1)), make_seq("b", 40, random.Random(2))
    assert drafter.propose([first])[0].token_ids
    first.status = Status.QUEUED
    first.tokens.append(3)  # not yet known at the preemption
    first.status = Status.DECODING
    assert drafter.propose([first])[0].token_ids
    assert model.computed == [29]  # nothing recomputed
    assert not drafter.propose([first, second])[1].token_ids  # no room for both
    first.status = Status.QUEUED
    assert drafter.propose([second])[0].token_ids
    assert not drafter._computed[first.key].blocks
    check(drafter)


def test_drafting_stops_beyond_the_draft_models_context_and_logs_once(caplog):
    drafter = ModelDrafter(FakeDraftModel(100, context=32))  # type: ignore[arg-type]
    seqs = [make_seq(f"s{i}", 30, random.Random(i)) for i in range(3)]
    lengths = [len(drafter.propose(seqs)[0].token_ids)]
    for _ in range(4):
        for seq in seqs:
            seq.tokens.append(1)
        lengths.append(len(drafter.propose(seqs)[0].token_ids))
    assert lengths[0] == 0  # two of three prompts fit into the first call
    assert lengths[1:] == [2, 1, 0, 0]
    assert caplog.text.count("draft model's context of 32 tokens") == 1
    assert drafter._pool.num_used == 0
    assert drafter.predict_confidence(seqs) == [()] * 3


def test_predicted_confidence_follows_past_confidence():
    model = FakeDraftModel(100)
    drafter = ModelDrafter(model)  # type: ignore[arg-type]
    seq = make_seq("s", 9, random.Random(1))
    assert drafter.predict_confidence([seq]) == [[0.9] * K]
    for _ in range(100):
        drafter.propose([seq])
    [foreseen] = drafter.predict_confidence([seq])
    assert foreseen == pytest.approx([0.5] * K, abs=0.01)
    seq.tokens += [1] * (MAX_LEN - len(seq.tokens) - 3)
    assert len(drafter.predict_confidence([seq])[0]) == 2
    model.can_draft = False
    assert drafter.predict_confidence([seq]) == [()] and not drafter.propose([seq])[0].token_ids


def test_rejection_confidence_is_independent_of_the_draw():
    """Otherwise the number of verified drafts would depend on it and favor likely draws."""
    rng = np.random.default_rng(1)
    told, first = defaultdict(list), []
    for draw in range(3):
        model = FakeDraftModel(100)
        model.proposes = True
        drafter = ModelDrafter(model)  # type: ignore[arg-type]
        seqs = {
            temperature: make_seq(str(temperature), 9, random.Random(1), temperature=temperature)
            for temperature in (0.0, 0.8)
        }
        for known in range(3):
            # The confidence after the first draft depends on it; that after the text does not.
            after = rng if known == draw == 2 else np.random.default_rng(known)
            values = np.concatenate([[[0.25 + known / 8]] * 2, after.random((2, K - 1))], axis=1)
            model.draft = lambda rows, v=values: (np.zeros((2, K), np.int32), v)
            drafts = dict(zip(seqs, drafter.propose([*seqs.values()]), strict=True))
        told[0.0].append(drafts[0.0].confidence)
        told[0.8].append(drafts[0.8].confidence)
        first.append(drafts[0.8].confidence[0])
    assert told[0.8][0] == told[0.8][1] == told[0.8][2]
    assert told[0.0][0] == told[0.0][1] != told[0.0][2]  # nothing is drawn at temperature 0
    assert first == [0.5] * 3


# ---- the device's part ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made() -> tuple[DraftModel, tuple[jax.Array, ...]]:
    model = tiny_model(vocab_size=VOCAB, max_position_embeddings=MAX_LEN)
    spec = model.spec
    draft_model = DraftModel(
        model,
        DraftModelOptions(
            shapes=draft_shapes(
                max_num_seqs=6, max_num_batched_tokens=32, max_rows=64, max_blocks=MAX_LEN // BLOCK
            ),
            kv_shape=KVShape(
                layouts=keys_and_values(spec),
                num_blocks=2048,
                block_size=BLOCK,
                storage=np.dtype("float32"),
            ),
            max_draft_tokens=K,
            device=jax.devices()[0],
        ),
    )
    leaves = random_leaves(model, seed=3)
    draft_model.compile()
    draft_model.start(leaves)
    draft_model.background.finish()
    return draft_model, leaves


def fill(model: DraftModel, value: float) -> None:
    model._kv = tuple(jax.device_put(np.full(kv.shape, value, kv.dtype)) for kv in model._kv)


def blocks_of(place: int) -> list[int]:
    """Return three blocks of a sequence, in any order."""
    return [(7 * (3 * place + i) + 3) % 40 for i in range(3)]


def naive_drafts(model: DraftModel, leaves, seqs: list[list[int]]) -> list[list[int]]:
    """Return greedy drafts, with full recomputation for each token."""
    size, layers, plain = 32, model.kv_shape.layers, model.model

    @jax.jit
    def next_token(tokens, count):
        kv = tuple(jnp.zeros(layer.shape) for layer in layers)
        at = jnp.arange(size)
        table = jnp.arange(MAX_LEN // BLOCK)[None]
        rows = count[None], jnp.stack([jnp.int32(0), count]), jnp.int32(1)
        _, hidden = plain.forward(
            leaves, kv, tokens, at, at, table, *rows, implementation="reference"
        )
        return plain.logits(leaves, hidden)[count - 1].argmax()

    drafts = []
    for tokens in seqs:
        tokens = list(tokens)
        for _ in range(K):
            padded = jnp.array(tokens + [0] * (size - len(tokens)), jnp.int32)
            tokens.append(int(next_token(padded, jnp.int32(len(tokens)))))
        drafts.append(tokens[-K:])
    return drafts


@pytest.mark.slow
def test_drafts_match_the_model_and_read_no_unwritten_cache(made):
    model, leaves = made
    rng = random.Random(4)
    seqs = [[rng.randrange(VOCAB) for _ in range(length)] for length in (9, 14, 17, 10, 3)]
    greedy = pack_params(1, SamplingParams(temperature=0))
    expected = naive_drafts(model, leaves, seqs)
    for empty in (0.0, np.nan):
        fill(model, empty)
        rows = []
        for place, tokens in enumerate(seqs):
            model.extend([Row(tokens[:-2], 0, blocks_of(place))])
            rows.append(Row(tokens[-2:], len(tokens) - 2, blocks_of(place), 3 * BLOCK, greedy))
        drafted, probabilities = model.draft(rows)
        assert drafted.tolist() == expected
        assert ((probabilities > 1 / VOCAB) & (probabilities <= 1)).all()
        # The last one alone, after some of its drafts were overwritten.
        again, _ = model.draft(
            [r._replace(token_ids=r.token_ids[1:], start=r.start + 1) for r in rows]
        )
        assert (again == drafted).all()


@pytest.mark.slow
def test_row_without_room_writes_nothing_and_the_rest_is_correct(made):
    model, _ = made
    fill(model, np.nan)
    greedy = pack_params(1, SamplingParams(temperature=0))
    tokens = [5] * (BLOCK - 2)
    row = Row(tokens[:-1], 0, [4], 0, greedy)
    model.extend([row])
    taken = Row(tokens[-1:], len(tokens) - 1, [4], BLOCK, greedy)
    short, probabilities = model.draft([taken])
    written = [np.isfinite(np.asarray(kv)).all(axis=(1, 2, 4)) for kv in model._kv]
    for layer in written:
        assert layer[4].all() and not np.delete(layer, 4, axis=0).any()
    assert np.isfinite(probabilities).all()
    block = [np.asarray(kv)[4] for kv in model._kv]
    model.extend([row._replace(blocks=[4, 9])])
    full, _ = model.draft([taken._replace(blocks=[4, 9], end=2 * BLOCK)])
    for before, kv in zip(block, model._kv, strict=True):
        np.testing.assert_allclose(before, np.asarray(kv)[4], rtol=1e-5)
    room = BLOCK - len(tokens) + 1  # one is not computed
    assert room == 3 and (short[0, :room] == full[0, :room]).all()


def test_excess_sequences_are_split_into_several_calls(made):
    model, _ = made
    random_params = [pack_params(i, SamplingParams(temperature=0.8, top_k=9)) for i in range(11)]
    rows = [Row([i], 0, [i], BLOCK, params) for i, params in enumerate(random_params)]
    fill(model, np.nan)
    together, values = model.draft(rows)
    apart = [model.draft([row]) for row in rows]
    assert (together == np.concatenate([tokens for tokens, _ in apart])).all()
    np.testing.assert_allclose(values, np.concatenate([v for _, v in apart]), rtol=1e-4)
    assert len({tuple(row) for row in together.tolist()}) > 5


def test_noise_changes_drafts_and_filters_hold(made):
    model, _ = made
    fill(model, np.nan)
    tokens, drafts = {}, {}
    for seed in range(30):
        for top_k in (0, 2):
            params = pack_params(seed, SamplingParams(temperature=2.0, top_k=top_k))
            drafted, _ = model.draft([Row([7], 0, [2], BLOCK, params)])
            tokens.setdefault(top_k, set()).add(int(drafted[0, 0]))
            drafts[seed, top_k] = drafted.tolist()
    assert len(tokens[0]) > 5 and len(tokens[2]) == 2


@pytest.mark.full_compile
def test_every_executable_updates_the_cache_in_place(made):
    model, _ = made
    kv_bytes = model.kv_shape.total_bytes
    for executable in model.compiled().values():
        memory = executable.memory_analysis()
        assert memory.alias_size_in_bytes == kv_bytes
        assert memory.temp_size_in_bytes < kv_bytes / 8


def test_executable_that_cannot_run_is_left_out(made, monkeypatch, caplog):
    model, leaves = made
    broken = DraftModel(model.model, model.options)
    broken.compile()
    monkeypatch.setattr(broken, "_call", lambda *_: 1 / 0)
    broken.start(leaves)
    broken.background.finish()
    assert broken.background.complete and not broken.can_draft
    assert "extend[32] cannot run and is skipped" in caplog.text
    assert "the draft model cannot run: speculation is off" in caplog.text


def test_deterministic_tier_has_one_shape_for_every_pass():
    shapes = draft_shapes(
        max_num_seqs=100, max_num_batched_tokens=64, max_rows=128, max_blocks=4, deterministic=True
    )
    [extend], [draft] = shapes
    for shape in (extend, draft):
        assert (shape.num_tokens, shape.num_seqs, shape.max_q_len) == (64, 64, 64)
    assert (draft.later_tokens, draft.num_rows) == (64, 64)


# ---- the engine ----------------------------------------------------------------------------------

OPTIONS = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "dtype": "float32",
    "deterministic": True,
    "speculation": "draft",
    "max_draft_tokens": 3,
}
SELF = OPTIONS | {"draft_model": "self", "draft_layers": 4}
PARAMS = SamplingParams(max_tokens=40, temperature=0.7, seed=4, ignore_eos=True)
PROMPTS = [[1, 403, 407], [5] * 50]


def always_verify(core: EngineCore) -> None:
    assert core.speculator is not None
    drafts_always_pay(core.speculator.policy)


def outputs(llm: LLM) -> list:
    found = llm.generate(PROMPTS, PARAMS, progress=False)
    return [output.outputs[0].token_ids for output in found]


@pytest.fixture(scope="module")
def llm(stories) -> LLM:
    llm = LLM(str(stories), **SELF)
    always_verify(core_of(llm))
    return llm


@pytest.mark.slow
def test_self_draft_shares_the_models_first_layers(llm, stories):
    core = core_of(llm)
    assert [len(tokens) for tokens in outputs(llm)] == [40, 40]
    stats = core.speculator.stats()
    assert 0.05 * stats.num_draft_tokens < stats.num_accepted_tokens < stats.num_draft_tokens
    drafter = core.speculator._drafter
    target = dict(zip(core.device.model.names, core.device.state.leaves, strict=True))
    model = drafter._model
    assert all(
        leaf is target[name] for name, leaf in zip(model.model.names, model._leaves, strict=True)
    )
    assert (
        drafter._pool.num_used == 0 and drafter._pool.num_blocks == core.scheduler.pool.num_blocks
    )
    assert llm._parts.compilations() == 0


def test_target_as_its_own_draft_model_is_always_accepted(stories):
    llm = LLM(str(stories), **OPTIONS, draft_model=str(stories))
    always_verify(core_of(llm))
    outputs(llm)
    stats = core_of(llm).speculator.stats()
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 40


@pytest.mark.slow
def test_drafter_exception_ends_drafting_but_no_request(llm, monkeypatch, caplog):
    expected = outputs(llm)
    broken = LLM(llm._parts.name, **SELF)
    always_verify(core_of(broken))
    calls = []

    def draft(self, rows):
        calls.append(rows)
        if len(calls) == 3:
            raise RuntimeError("injected")
        return original(self, rows)

    original = DraftModel.draft
    monkeypatch.setattr(DraftModel, "draft", draft)
    assert outputs(broken) == expected
    assert outputs(broken) == expected
    assert len(calls) == 3 and core_of(broken).speculator.has_failed
    assert [r.message for r in caplog.records if r.levelno >= logging.ERROR] == [
        "the drafter failed: speculation is off from now on"
    ]


def test_failed_steps_reset_the_draft_model(llm):
    expected, core = outputs(llm), core_of(llm)
    before, count = core.num_recoveries, iter(range(10**6))
    drafter = core.speculator._drafter
    resets, reset = [], drafter._model.reset
    drafter._model.reset = lambda: resets.append(reset())
    try:
        with failing_steps(core, lambda *_: next(count) % 19 == 18):
            assert outputs(llm) == expected
    finally:
        del drafter._model.reset
    assert len(resets) == core.num_recoveries - before > 2
    assert not core.speculator.has_failed and drafter._pool.num_used == 0


@pytest.mark.slow
def test_rejection_drafting_survives_failures_and_ends_alone(stories, monkeypatch):
    options = OPTIONS | {"deterministic": False, "draft_verification": "rejection"}
    llm = LLM(str(stories), **options, draft_model=str(stories))
    core = core_of(llm)
    llm._parts.finish_compiling()
    always_verify(core)
    assert [len(tokens) for tokens in outputs(llm)] == [40, 40]
    stats = core.speculator.stats()
    # It is the target, except for tokens beyond the most likely ones.
    assert 0.8 * stats.num_draft_tokens < stats.num_accepted_tokens
    assert stats.num_draft_tokens > 30 and llm._parts.compilations() == 0
    count = iter(range(10**6))
    with failing_steps(core, lambda *_: next(count) % 11 == 10):
        assert [len(tokens) for tokens in outputs(llm)] == [40, 40]
    assert core.num_recoveries > 1 and not core.speculator.has_failed
    monkeypatch.setattr(DraftModel, "draft", lambda *_: 1 / 0)
    assert [len(tokens) for tokens in outputs(llm)] == [40, 40]
    assert core.speculator.has_failed


def test_draft_model_counts_toward_the_memory(llm, stories, monkeypatch):
    device, draft_model = core_of(llm).device, core_of(llm).speculator._drafter._model
    needed = device.memory_bytes() + draft_model.kv_shape.total_bytes
    num_blocks = core_of(llm).scheduler.pool.num_blocks
    options = SELF | {"num_blocks": num_blocks}
    monkeypatch.setattr(assemble, "free_bytes", lambda device, shards: needed)
    assert core_of(LLM(str(stories), **options)).scheduler.pool.num_blocks == num_blocks
    monkeypatch.setattr(assemble, "free_bytes", lambda device, shards: needed - 1)
    with pytest.raises(ConfigError, match=r"at most [0-9]+ blocks fit"):
        LLM(str(stories), **options)


def test_both_caches_shrink_together():
    target, draft = (tiny_model(num_hidden_layers=layers) for layers in (4, 1))
    residents = Residents(
        config=EngineConfig(),
        model=target,
        device=jax.devices()[0],
        draft=assemble.Draft(model=draft, folder=Path(), implementation="auto"),
    )
    sizes = Sizes.choose(residents)
    smaller = sizes.smaller(EngineConfig(), 1 << 20)
    assert sizes.draft_bytes == draft.param_bytes + sizes.draft_kv.total_bytes
    assert smaller.draft_bytes == draft.param_bytes + smaller.draft_kv.total_bytes
    assert smaller.kv.num_blocks == smaller.draft_kv.num_blocks < sizes.kv.num_blocks
    saved = sizes.draft_bytes + sizes.kv.total_bytes - smaller.draft_bytes - smaller.kv.total_bytes
    assert saved >= 1 << 20


# ---- configuration -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculation": "draft"}, "requires draft_model"),
        ({"speculation": "draft", "draft_model": "self"}, 'self" requires draft_layers'),
        (
            {"speculation": "draft", "draft_model": "x", "draft_layers": 1},
            'draft_layers requires draft_model="self"',
        ),
        ({"speculation": "draft", "draft_model": "self", "draft_layers": 0}, "at least 1"),
        ({"speculation": "ngram", "draft_model": "x"}, 'draft_model requires speculation="draft"'),
        ({"draft_layers": 2}, 'draft_layers requires speculation="draft"'),
        ({"draft_verification": "rejection"}, "set speculation, or remove it"),
        (
            {"draft_verification": "rejection", "speculation": "ngram", "deterministic": True},
            'use draft_verification="coupled", or remove deterministic=True',
        ),
        ({"draft_verification": "both"}, "draft_verification must be one of coupled, rejection"),
    ],
)
def test_conflicting_options_are_rejected(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_options(**options)


def test_draft_model_must_match_the_model(stories):
    with pytest.raises(ConfigError, match=r"3072 tokens, but .*stories260k-hf has 512"):
        LLM(str(stories), **OPTIONS, draft_model="forge-tiny")
    with pytest.raises(ConfigError, match="from 1 to the model's 5, not 6"):
        LLM(str(stories), **OPTIONS, draft_model="self", draft_layers=6)


def test_fake_engine_has_no_draft_model():
    config = EngineConfig.from_options(**SELF)
    with pytest.raises(ConfigError, match="needs a draft model, but none is given"):
        assemble_fake(config, step_time_s=0.0, max_model_len=64, check=True)
