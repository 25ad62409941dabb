"""Rejection sampling of drafts against known distributions, by chi-square.

Every check runs twice: on the real code, and on a variant with a plausible mistake. Seeds are
fixed, so the results are deterministic.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from test_sampling import kept_by_oracle

from forge_kernels.sampling import (
    Drafts,
    certain,
    gumbel,
    proposal,
    propose,
    rejection,
    sample,
)
from forge_kernels.sampling.noise import ACCEPTANCE, DRAFT, uniform

FINE, WRONG = 1e-4, 1e-12  # p-values: correct results are above FINE, wrong ones below WRONG
PLAIN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
SETTINGS = [
    PLAIN,
    PLAIN | {"temperature": 0.6},
    PLAIN | {"temperature": 1.7, "top_k": 6},
    PLAIN | {"top_p": 0.8},
    PLAIN | {"temperature": 1.3, "min_p": 0.15},
    PLAIN | {"temperature": 1.2, "top_k": 9, "top_p": 0.9, "min_p": 0.02},
]


def target_of(logits: np.ndarray, setting: dict[str, Any]) -> np.ndarray:
    """Return f64[V]: the sampled distribution, by definition."""
    scaled = (logits / np.float32(setting["temperature"])).astype(np.float32)
    filters = (setting[name] for name in ("top_k", "top_p", "min_p"))
    kept = list(kept_by_oracle(scaled, *filters))
    p = np.zeros(len(scaled))
    p[kept] = np.exp(scaled[kept].astype(np.float64) - scaled.max())
    return p / p.sum()


def rows_of(settings: list[dict[str, Any]], each: int) -> dict[str, jax.Array]:
    """Return the sampler's arguments for `each` rows of every setting, each with its own seed."""
    made = {
        name: jnp.array(np.repeat([setting[name] for setting in settings], each), dtype)
        for name, dtype in zip(
            PLAIN, (jnp.float32, jnp.int32, jnp.float32, jnp.float32), strict=True
        )
    }
    number = np.arange(len(settings) * each)
    return made | {"seed": jnp.array(np.stack([number, number % 7], axis=1), jnp.uint32)}


def freshly_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return an empty `jax.jit`, so that a test's replacements are traced."""
    return jax.jit(lambda *args, **kwargs: function(*args, **kwargs))


def draw(
    p_logits: jax.Array,  # f32[R, V]
    q_logits: jax.Array,  # f32[R, V]
    rows: dict[str, jax.Array],
    known: jax.Array,  # i32[R]
    ahead: int,
    support: int = 64,
    any_filter: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Return (i32[R], i32[R]): drafts `ahead` of the known tokens, and the target's verdict."""
    rows = rows | {"any_filter": any_filter}
    drawn = propose(q_logits, support=support, known=known, ahead=jnp.int32(ahead), **rows)
    drafts = Drafts(drawn.token, jnp.ones(len(known), bool), drawn.token_ids, drawn.probability)
    return drawn.token, sample(p_logits, position=known + 1 + ahead, drafts=drafts, **rows)


jitted_sample = jax.jit(sample)
jitted_propose = jax.jit(partial(propose, support=64))


def p_value(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Return the p-value of counts; 0 if an impossible outcome occurred."""
    possible = probabilities > 0
    if counts[~possible].any():
        return 0.0
    expected = probabilities[possible] / probabilities.sum() * counts.sum()
    # Cells with small expected counts are merged.
    few = expected < 10
    counts, merged = counts[possible], expected
    if few.any():
        counts = np.append(counts[~few], counts[few].sum())
        merged = np.append(expected[~few], expected[few].sum())
    return float(stats.chisquare(counts, merged).pvalue) if len(counts) > 1 else 1.0


# ---- n-gram drafts -----------------------------------------------------------------------------


def outcomes_of_certain_drafts(settings: list[dict[str, Any]], each: int = 60_000) -> np.ndarray:
    """Return i64[settings, V, V]: how often each draft led to each token."""
    logits = certain_logits()
    V, count = len(logits), len(settings) * each
    token = np.arange(count) % V
    got = freshly_compiled(partial(sample, any_filter=len(settings) > 1))(
        jnp.broadcast_to(jnp.array(logits), (count, V)),
        position=jnp.full(count, 5),
        drafts=certain(jnp.array(token), jnp.ones(count, bool)),
        **rows_of(settings, each),
    )
    counts = np.zeros((len(settings), V, V), np.int64)
    np.add.at(counts, (np.arange(count) // each, token, np.asarray(got)), 1)
    return counts


def certain_logits() -> np.ndarray:
    return np.random.default_rng(3).normal(size=14).astype(np.float32)


@pytest.mark.slow
def test_certain_drafts_preserve_the_target_distribution():
    for setting, by_draft in zip(SETTINGS, outcomes_of_certain_drafts(SETTINGS), strict=True):
        p = target_of(certain_logits(), setting)
        for draft, counts in enumerate(by_draft):
            assert p_value(counts, p) > FINE, (setting, draft)


def share_the_noise(seed, position, purpose):
    """Decide acceptance with the noise of the first two tokens."""
    return jnp.exp(-2 * jnp.exp(-gumbel(seed, position, 2).max(axis=1)))


MISTAKES = {
    "always accepted": ("uniform", lambda seed, *_: jnp.zeros(len(seed))),
    "sampled from p instead of what is left": ("_log_part_left", lambda p, q: jnp.zeros_like(p)),
    "noise shared by acceptance and the rest": ("uniform", share_the_noise),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.quick_cases(1)
def test_mistake_with_certain_drafts_is_detected(mistake, monkeypatch):
    monkeypatch.setattr(rejection, *MISTAKES[mistake])
    p = target_of(certain_logits(), PLAIN)
    [counts] = outcomes_of_certain_drafts([PLAIN])
    assert p_value(counts.ravel(), np.tile(p, len(p))) < WRONG


# ---- drafts of a model -------------------------------------------------------------------------


def two_models(vocab_size: int, likeness: float = 0.6) -> tuple[np.ndarray, np.ndarray]:
    """Return f32[V] logits of a target and of a somewhat similar draft model.

    Tokens are in the draft model's order.
    """
    rng = np.random.default_rng(vocab_size)
    target, other = rng.normal(size=(2, vocab_size)) * 1.4
    draft = likeness * target + (1 - likeness) * other
    order = np.argsort(-draft)
    return target[order].astype(np.float32), draft[order].astype(np.float32)


def outcomes(
    settings: list[dict[str, Any]], vocab_size: int, support: int = 64, each: int = 60_000
) -> tuple[np.ndarray, np.ndarray]:
    """Return (i32[settings, N], i32[settings, N]): drafts and outputs."""
    count = len(settings) * each
    p, q = (jnp.broadcast_to(jnp.array(x), (count, vocab_size)) for x in two_models(vocab_size))
    filters = {"any_filter": len(settings) > 1}
    both = freshly_compiled(partial(draw, ahead=0, support=support, **filters))
    drafts, got = both(p, q, rows_of(settings, each), jnp.full(count, 9))
    return np.asarray(drafts).reshape(-1, each), np.asarray(got).reshape(-1, each)


def test_model_drafts_preserve_the_target_distribution():
    V = 23
    target, draft = two_models(V)
    for setting, drafts, got in zip(SETTINGS, *outcomes(SETTINGS, V), strict=True):
        p, q = target_of(target, setting), target_of(draft, setting)
        assert p_value(np.bincount(got, minlength=V), p) > FINE, setting
        assert p_value(np.bincount(drafts, minlength=V), q) > FINE, setting
        # The acceptance rate is optimal: the overlap of the distributions.
        common = np.minimum(p, q).sum()
        error = (common * (1 - common) / len(got)) ** 0.5
        assert abs((got == drafts).mean() - common) < 4 * error, setting


@pytest.mark.parametrize(("vocab_size", "support"), [(80, 64), (23, 5), (23, 1)])
@pytest.mark.slow
def test_drafts_from_a_few_tokens_preserve_the_distribution(vocab_size, support):
    [drafts], [got] = outcomes([PLAIN], vocab_size, support)
    assert len(np.unique(drafts)) <= support
    target = target_of(two_models(vocab_size)[0], PLAIN)
    assert p_value(np.bincount(got, minlength=vocab_size), target) > FINE


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.slow
def test_mistake_with_model_drafts_is_detected(mistake, monkeypatch):
    monkeypatch.setattr(rejection, *MISTAKES[mistake])
    _, [got] = outcomes([PLAIN], 23)
    target = target_of(two_models(23)[0], PLAIN)
    assert p_value(np.bincount(got, minlength=23), target) < WRONG


def test_drafts_that_reuse_the_targets_noise_are_detected(monkeypatch):
    def noise_of_samples(seed, known, count, purpose):
        return gumbel(seed, known + 1, count)

    monkeypatch.setattr(proposal, "gumbel", noise_of_samples)
    _, [got] = outcomes([PLAIN], 23)
    target = target_of(two_models(23)[0], PLAIN)
    assert p_value(np.bincount(got, minlength=23), target) < WRONG


def test_choosing_drafts_by_their_draw_biases_the_output():
    """The number of verified drafts must therefore not depend on the draw."""
    V, count = 23, 60_000
    target, draft = two_models(V)
    p, q = (jnp.broadcast_to(jnp.array(x), (count, V)) for x in (target, draft))
    rows, known = rows_of([PLAIN], count), jnp.full(count, 9)

    @jax.jit
    def choosy(p: jax.Array, q: jax.Array, rows: dict, known: jax.Array) -> jax.Array:
        drawn = propose(q, support=64, known=known, ahead=jnp.int32(0), any_filter=False, **rows)
        likely = drawn.probability[:, 2:3] <= jnp.where(
            drawn.token_ids == drawn.token[:, None], drawn.probability, 0.0
        )
        drafts = Drafts(drawn.token, likely.any(axis=1), drawn.token_ids, drawn.probability)
        return sample(p, position=known + 1, drafts=drafts, any_filter=False, **rows)

    counts = np.bincount(np.asarray(choosy(p, q, rows, known)), minlength=V)
    assert p_value(counts, target_of(target, PLAIN)) < WRONG


# ---- several tokens, over several steps ----------------------------------------------------------

V3, LENGTH, DRAFTS = 4, 3, 2


def chains() -> tuple[np.ndarray, np.ndarray]:
    """Return f32[V + 1, V] each: logits after each token, and at the beginning (the last row)."""
    rng = np.random.default_rng(8)
    target, other = rng.normal(size=(2, V3 + 1, V3)) * 1.2
    return target.astype(np.float32), (0.5 * target + 0.5 * other).astype(np.float32)


def sequences(count: int = 60_000, *, certain_drafts: bool = False) -> np.ndarray:
    """Return i32[N, LENGTH], by as many steps as needed, with `DRAFTS` verified in each."""
    target, draft = (jnp.array(chain) for chain in chains())
    rows = rows_of([PLAIN | {"temperature": 0.9}], count)
    choose = partial(sample, any_filter=False)

    @jax.jit
    def step(rows: dict, length: jax.Array, last: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Map i32[N], i32[N] to i32[N, 1 + DRAFTS], i32[N]: tokens, and how many of them count."""
        tokens, num_right, right, before = [], jnp.zeros(count, jnp.int32), True, last
        for ahead in range(DRAFTS):
            if certain_drafts:
                drafted = (before * 3 + length + ahead) % V3
                told = certain(drafted, jnp.ones(count, bool))
                got = choose(target[before], position=length + ahead, drafts=told, **rows)
            else:
                drafted, got = draw(target[before], draft[before], rows, length - 1, ahead)
            right &= got == drafted
            num_right += right.astype(jnp.int32)
            tokens.append(got)
            before = drafted
        tokens.append(choose(target[before], position=length + DRAFTS, **rows))
        return jnp.stack(tokens, axis=1), num_right + 1

    out = np.zeros((count, LENGTH + 1 + DRAFTS), np.int32)
    length, last = np.zeros(count, np.int32), np.full(count, V3, np.int32)
    row = np.arange(count)
    for _ in range(LENGTH):
        tokens, counted = map(np.asarray, step(rows, jnp.array(length), jnp.array(last)))
        for j in range(1 + DRAFTS):
            writes = (j < counted) & (length + j < LENGTH)
            out[row[writes], (length + j)[writes]] = tokens[writes, j]
        length = np.minimum(length + counted, LENGTH).astype(np.int32)
        last = out[row, length - 1]
    assert (length == LENGTH).all()
    return out[:, :LENGTH]


def joint() -> np.ndarray:
    """Return f64[V, V, V]."""
    p = np.exp(chains()[0].astype(np.float64) / 0.9)
    p /= p.sum(axis=1, keepdims=True)
    return p[V3][:, None, None] * p[:V3, :, None] * p[None, :V3, :]


def joint_counts(tokens: np.ndarray) -> np.ndarray:
    counts = np.zeros((V3,) * LENGTH, np.int64)
    np.add.at(counts, tuple(tokens.T), 1)
    return counts


@pytest.mark.parametrize("certain_drafts", [False, True])
@pytest.mark.slow
def test_sequences_follow_the_joint_target_distribution(certain_drafts):
    counts = joint_counts(sequences(certain_drafts=certain_drafts))
    assert p_value(counts.ravel(), joint().ravel()) > FINE
    for first in range(V3):  # the second, given the first
        conditional = joint()[first].sum(axis=1)
        assert p_value(counts[first].sum(axis=1), conditional) > FINE


@pytest.mark.slow
def test_noise_shared_between_positions_is_detected(monkeypatch):
    def same_everywhere(seed, position, purpose):
        return uniform(seed, jnp.zeros_like(position), purpose)

    monkeypatch.setattr(rejection, "uniform", same_everywhere)
    counts = joint_counts(sequences())
    assert p_value(counts.sum(axis=(1, 2)), joint().sum(axis=(1, 2))) > FINE
    assert p_value(counts.ravel(), joint().ravel()) < WRONG


# ---- rows ----------------------------------------------------------------------------------------


def mixed_rows() -> tuple[jax.Array, Drafts, dict[str, jax.Array]]:
    """Return 24 rows: all settings, greedy ones, half of them with drafts."""
    rng = np.random.default_rng(1)
    rows, V = 24, 150
    logits = jnp.array(rng.normal(size=(rows, V)) * 3, jnp.float32)
    settings = [*SETTINGS, PLAIN | {"temperature": 0.0}] * 4
    made = {
        name: jnp.array([s[name] for s in settings[:rows]], jnp.float32) for name in SETTINGS[0]
    }
    made |= {
        "top_k": made["top_k"].astype(jnp.int32),
        "seed": jnp.array(rng.integers(0, 2**32, (rows, 2)), jnp.uint32),
    }
    near = logits + jnp.array(rng.normal(size=(rows, V)), jnp.float32)
    drawn = jitted_propose(near, known=jnp.arange(rows), ahead=jnp.int32(0), **made)
    verified = jnp.arange(rows) % 2 == 0
    drafts = Drafts(drawn.token, verified, drawn.token_ids, drawn.probability)
    return logits, drafts, made | {"position": jnp.arange(rows) + 1}


@pytest.mark.slow
def test_rows_without_drafts_and_greedy_rows_sample_as_usual():
    logits, drafts, rows = mixed_rows()
    plain = np.asarray(jitted_sample(logits, **rows))
    got = np.asarray(jitted_sample(logits, drafts=drafts, **rows))
    as_ever = ~np.asarray(drafts.verified) | (np.asarray(rows["temperature"]) == 0)
    np.testing.assert_array_equal(got[as_ever], plain[as_ever])
    assert (got != plain).any()
    greedy = np.asarray(rows["temperature"]) == 0
    np.testing.assert_array_equal(got[greedy], np.asarray(logits).argmax(axis=1)[greedy])


def test_row_is_independent_of_its_neighbors():
    logits, drafts, rows = mixed_rows()
    choose = jitted_sample
    together = np.asarray(choose(logits, drafts=drafts, **rows))
    poisoned = np.asarray(choose(logits.at[4].set(jnp.nan), drafts=drafts, **rows))
    np.testing.assert_array_equal(np.delete(poisoned, 4), np.delete(together, 4))
    order = np.random.default_rng(0).permutation(len(together))
    moved = {name: value[order] for name, value in rows.items()}
    other = Drafts(*(value[order] for value in drafts))
    np.testing.assert_array_equal(choose(logits[order], drafts=other, **moved), together[order])


def test_cpu_kernel_samples_unverified_rows_and_xla_the_rest(cpu_kernels):
    logits, drafts, rows = mixed_rows()
    by_kernel = jax.jit(partial(sample, implementation="cpu"))
    none = drafts._replace(verified=jnp.zeros(len(logits), bool))
    for some in (drafts, none):
        expected = np.asarray(jitted_sample(logits, drafts=some, **rows))
        np.testing.assert_array_equal(by_kernel(logits, drafts=some, **rows), expected)
    text = by_kernel.lower(logits, drafts=none, **rows).as_text()
    assert "forge_sample" in text


@pytest.mark.parametrize("kind", ["certain", "drawn"])
@pytest.mark.quick_cases(1)
def test_forbidden_drafts_are_rejected_and_forced_ones_accepted(kind):
    V, count = 12, 400
    logits = np.random.default_rng(0).normal(size=(count, V)).astype(np.float32)
    logits[:200, 5] = -np.inf  # forbidden
    logits[200:, 5] = 99.0  # the only one
    rows = rows_of([PLAIN | {"top_k": 3}], count)
    alike = jnp.zeros((count, V)).at[:, 5].set(1.0)
    known = jnp.arange(count)
    drawn = jitted_propose(alike, known=known, ahead=jnp.int32(0), **rows)
    told = certain(jnp.full(count, 5), jnp.ones(count, bool))
    if kind == "drawn":
        told = Drafts(drawn.token, told.verified, drawn.token_ids, drawn.probability)
    got = np.asarray(jitted_sample(jnp.array(logits), position=known + 1, drafts=told, **rows))
    kept = np.argsort(-logits[:200], axis=1)[:, :3]
    assert (got[:200, None] == kept).any(axis=1).all()
    assert (got[200:] == 5).all()


@pytest.mark.slow
def test_target_as_its_own_draft_is_always_accepted():
    logits = jnp.array(np.random.default_rng(0).normal(size=(5000, 50)), jnp.float32)
    rows = rows_of([PLAIN | {"top_p": 0.9}], 5000)
    both = jax.jit(partial(draw, ahead=2, any_filter=True))
    drafts, got = both(logits, logits, rows, jnp.full(5000, 3))
    assert (drafts == got).all() and len(np.unique(got)) > 20


def test_proposal_sums_to_one_and_lists_each_token_once():
    logits, _, rows = mixed_rows()
    del rows["position"]
    known = jnp.full(len(logits), 7)
    drawn = jitted_propose(logits, known=known, ahead=jnp.int32(1), **rows)
    ids, q = np.asarray(drawn.token_ids), np.asarray(drawn.probability)
    assert ids.shape == q.shape == (len(logits), 64)
    assert all(len(set(row)) == 64 for row in ids.tolist())
    np.testing.assert_allclose(q.sum(axis=1), 1, rtol=1e-5)
    chosen = q[ids == np.asarray(drawn.token)[:, None]]
    assert len(chosen) == len(logits) and (chosen > 0).all()
    greedy = np.asarray(rows["temperature"]) == 0
    best = np.asarray(logits).argmax(axis=1)
    np.testing.assert_array_equal(np.asarray(drawn.token)[greedy], best[greedy])


def test_drafts_from_non_finite_logits_are_sound_or_certain():
    V = 90
    logits = np.random.default_rng(0).normal(size=(4, V)).astype(np.float32)
    logits[1, 7] = np.nan
    logits[2] = np.inf
    rows, known = rows_of([PLAIN], 4), jnp.full(4, 3)
    drawn = jitted_propose(jnp.array(logits), known=known, ahead=jnp.int32(0), **rows)
    ids, q, token = map(np.asarray, (drawn.token_ids, drawn.probability, drawn.token))
    np.testing.assert_allclose(q.sum(axis=1), 1, rtol=1e-5)
    assert not q[1, ids[1] == 7].any() and token[1] != 7
    assert q[2, 0] == 1 and ids[2, 0] == token[2] < V
    assert (ids[2, 1:] >= V).all()


@pytest.mark.slow
def test_noise_for_different_purposes_is_independent():
    count = 100_000
    seed = jnp.ones((count, 2), jnp.uint32)
    position = jnp.arange(count)
    noises = [
        uniform(seed, position, ACCEPTANCE),
        *(gumbel(seed, position, 3).T),
        *(gumbel(seed, position, 2, jnp.uint32(DRAFT)).T),
        *(gumbel(seed, position, 2, jnp.uint32(DRAFT + 1)).T),
    ]
    assert stats.kstest(np.asarray(noises[0]), "uniform").pvalue > FINE
    found = np.corrcoef(np.stack([np.argsort(np.argsort(noise)) for noise in noises]))
    np.fill_diagonal(found, 0)
    assert np.abs(found).max() < 5 / count**0.5
    # Not of the same purpose at the next position either.
    for noise in noises:
        assert abs(np.corrcoef(noise[1:], noise[:-1])[0, 1]) < 5 / count**0.5
