"""The sampler against float64 numpy oracles."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from forge_kernels.sampling import (
    api,
    apply_penalties,
    filter_threshold,
    gumbel,
    sample,
    suppress,
    token_logprobs,
)
from forge_kernels.sampling.api import CHUNK, IN_PROMPT
from forge_kernels.sampling.search import by_bits, by_digits, from_order_key, order_key


def kept_by_oracle(scaled: np.ndarray, top_k: int, top_p: float, min_p: float) -> set[int]:
    """Return the kept tokens by definition, by sorting one row in float64."""
    order = np.argsort(-scaled, kind="stable")
    if top_k > 0:
        order = order[:top_k]
    p = np.exp(scaled[order].astype(np.float64) - scaled.max())
    p /= p.sum()
    if top_p < 1:
        order = order[: int(np.searchsorted(np.cumsum(p), top_p - 1e-9)) + 1]
    if min_p > 0:
        order = [i for i in order if np.exp(np.float64(scaled[i] - scaled.max())) >= min_p]
    return set(order)


@pytest.mark.parametrize("vocab_size", [97, 1000, 8193])
def test_filters_match_their_definition(vocab_size):
    rng = np.random.default_rng(vocab_size)
    settings = [
        (0, 1.0, 0.0), (1, 1.0, 0.0), (7, 1.0, 0.0), (0, 0.1, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.2),
        (50, 0.8, 0.0), (40, 0.95, 0.05), (10**6, 0.5, 0.0), (3, 0.999, 0.5),
    ]  # fmt: skip
    scaled = rng.normal(size=(len(settings), vocab_size)).astype(np.float32) * 3
    k, p, m = (np.array(column) for column in zip(*settings, strict=True))
    lowest = filter_threshold(
        jnp.array(scaled),
        top_k=jnp.array(k, jnp.int32),
        top_p=jnp.array(p, jnp.float32),
        min_p=jnp.array(m, jnp.float32),
    )
    for row, setting in enumerate(settings):
        kept = set(np.flatnonzero(scaled[row] >= np.asarray(lowest)[row]))
        assert kept == kept_by_oracle(scaled[row], *setting), setting


@pytest.mark.parametrize("search", [by_bits, by_digits])
@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_threshold_search_finds_the_largest_key(search, dtype):
    rng = np.random.default_rng(0)
    rows, width = 40, 301
    key = rng.integers(0, 2**32, (rows, width), dtype=np.uint32)
    key[10:20] = rng.integers(2**31 - 2, 2**31 + 2, (10, width))  # ties
    key[20:25, :150], key[20:25, 150:] = 0, 2**32 - 1
    key[25] = 7
    # Integers, so that sums are exact in any order.
    weight = rng.integers(0, 5, (rows, width)).astype(dtype)
    wanted = rng.integers(0, 700, rows).astype(dtype)
    wanted[:3] = (0, 1, 10**6)
    found = np.asarray(jax.jit(search)(key, weight, wanted))
    for row in range(rows):
        enough = [t for t in key[row] if weight[row, key[row] >= t].sum() >= wanted[row]]
        largest = 2**32 - 1 if wanted[row] == 0 else max(enough, default=0)
        assert found[row] == largest, row


def test_keys_have_the_order_of_their_floats():
    tiny = np.float32(1e-45)
    floats = np.array([-np.inf, -3e38, -1, -tiny, -0.0, 0.0, tiny, 1, 3e38, np.inf], np.float32)
    key = np.asarray(order_key(jnp.array(floats)))
    assert (np.diff(key.astype(np.int64)) > 0).all() and key[0] > 0
    np.testing.assert_array_equal(from_order_key(jnp.array(key)), floats)
    assert np.isneginf(from_order_key(jnp.zeros(1, jnp.uint32)))[0]


def edge_rows(vocab_size: int) -> np.ndarray:
    rng = np.random.default_rng(vocab_size)
    rows = (rng.normal(size=(7, vocab_size)) * 3).astype(np.float32)
    rows[1] = rng.integers(-2, 3, vocab_size)  # ties
    rows[2] = 0.25
    rows[3, 1::2] = -np.inf
    rows[4] = -np.inf
    rows[4, vocab_size // 2] = -3.0
    rows[5] = rng.permutation(vocab_size) * np.float32(-1e-7)  # all but equal
    rows[6] *= 30
    return rows


def kept_for_certain(scaled: np.ndarray, top_k: int, top_p: float) -> tuple[set[int], set[int]]:
    """Return the tokens that must and that may be kept; float32 sums decide. Ties stay together."""
    order = np.sort(scaled)[::-1]
    by_k = order[min(top_k, len(scaled)) - 1] if top_k > 0 else -np.inf
    mass = np.exp(scaled.astype(np.float64) - order[0])
    mass[scaled < by_k] = 0
    above = np.array([mass[scaled > x].sum() for x in scaled]) / mass.sum()
    must, may = ((scaled >= by_k) & (above < top_p + slack) for slack in (-1e-6, 1e-6))
    if top_p == 1:
        must = may = scaled >= by_k
    best = scaled == order[0]
    return set(np.flatnonzero(must | best)), set(np.flatnonzero(may | best))


@pytest.mark.parametrize("search", [by_bits, by_digits])
@pytest.mark.parametrize("vocab_size", [1, 2, 97, 1001])
def test_filters_handle_edge_cases(search, vocab_size, monkeypatch):
    monkeypatch.setattr(api, "largest_key", search)
    almost = float(np.nextafter(np.float32(1), np.float32(0)))
    settings = [
        (k, p)
        for k in (0, 1, 2, vocab_size - 1, vocab_size, vocab_size + 1)
        for p in (1.0, almost, 0.7, 1e-3, 1e-30)
    ]
    rows = edge_rows(vocab_size)
    scaled = np.tile(rows, (len(settings), 1))
    k, p = (np.repeat(column, len(rows)) for column in zip(*settings, strict=True))
    lowest = np.asarray(
        jax.jit(filter_threshold)(
            jnp.array(scaled),
            top_k=jnp.array(k, jnp.int32),
            top_p=jnp.array(p, jnp.float32),
            min_p=jnp.zeros(len(k), jnp.float32),
        )
    )
    assert not np.isnan(lowest).any()
    for i, row in enumerate(scaled):
        kept = set(np.flatnonzero(row >= lowest[i]))
        must, may = kept_for_certain(row, k[i], np.float32(p[i]))
        assert must <= kept <= may, (i % len(rows), k[i], p[i])


@pytest.mark.full_compile
@pytest.mark.parametrize("search", [by_bits, by_digits])
def test_threshold_bits_are_independent_of_the_other_rows(search, monkeypatch):
    monkeypatch.setattr(api, "largest_key", search)
    rng = np.random.default_rng(0)
    find = jax.jit(filter_threshold)
    scaled = (rng.normal(size=(8, 1001)) * 3).astype(np.float32)
    k = np.array([0, 5, 0, 50, 0, 0, 700, 0], np.int32)
    p = np.array([1, 1, 0.9, 0.8, 0.5, 1, 0.99, 1], np.float32)

    def thresholds(order: list[int], scaled: np.ndarray) -> np.ndarray:
        arguments = (jnp.array(column[order]) for column in (scaled, k, p))
        logits, top_k, top_p = arguments
        return np.asarray(find(logits, top_k=top_k, top_p=top_p, min_p=jnp.zeros(8)))

    together = thresholds(list(range(8)), scaled)
    others = (rng.normal(size=(8, 1001)) * 9).astype(np.float32)
    others[1] = np.nan
    for row in range(8):
        mixed = others.copy()
        mixed[row] = scaled[row]
        place = (row + 3) % 8
        order = [i if i not in (row, place) else row + place - i for i in range(8)]
        assert thresholds(order, mixed)[place] == together[row]


def test_greedy_rows_take_the_first_best_token():
    logits = np.random.default_rng(0).normal(size=(6, 300)).astype(np.float32)
    logits[:3, [17, 200]] = 9.0
    temperature = jnp.array([0, 0, 1, 0, 1, 0], jnp.float32)
    for filters in (True, False):
        tokens = np.asarray(
            sample(
                jnp.array(logits),
                temperature=temperature,
                top_k=jnp.full(6, 4 if filters else 0),
                top_p=jnp.full(6, 0.1 if filters else 1.0),
                min_p=jnp.zeros(6),
                seed=jnp.ones((6, 2), jnp.uint32),
                position=jnp.arange(6),
                any_filter=filters,
            )
        )
        greedy = np.asarray(temperature) == 0
        np.testing.assert_array_equal(tokens[greedy], logits.argmax(1)[greedy])
    assert tokens[0] == 17


def test_filters_never_keep_a_forbidden_token():
    logits = jnp.array([[1.0, -jnp.inf, 0.0, -jnp.inf]])
    lowest = filter_threshold(
        logits, top_k=jnp.array([4]), top_p=jnp.array([0.99]), min_p=jnp.array([0.0])
    )
    tokens = [
        int(draw(logits[0], position=i, top_k=4, top_p=0.99)) for i in range(64)
    ]  # fmt: skip
    assert set(tokens) == {0, 2} and not np.isnan(float(lowest[0]))


jitted_sample = jax.jit(sample)


def draw(row, *, seed=0, position=0, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    return jitted_sample(
        row[None],
        temperature=jnp.array([temperature], jnp.float32),
        top_k=jnp.array([top_k], jnp.int32),
        top_p=jnp.array([top_p], jnp.float32),
        min_p=jnp.array([min_p], jnp.float32),
        seed=jnp.array([[seed, 7]], jnp.uint32),
        position=jnp.array([position], jnp.int32),
    )[0]


def draws(logits: np.ndarray, count: int, *, seed: int = 1) -> np.ndarray:
    rows = jnp.broadcast_to(jnp.array(logits, jnp.float32), (count, len(logits)))
    ones, zeros = jnp.ones(count, jnp.float32), jnp.zeros(count, jnp.float32)
    seeds = jnp.full((count, 2), seed, jnp.uint32)
    return np.asarray(
        jax.jit(sample)(
            rows,
            temperature=ones,
            top_k=zeros.astype(jnp.int32),
            top_p=ones,
            min_p=zeros,
            seed=seeds,
            position=jnp.arange(count),
        )
    )


def p_value(tokens: np.ndarray, probabilities: np.ndarray) -> float:
    observed = np.bincount(tokens, minlength=len(probabilities))
    return float(stats.chisquare(observed, probabilities * len(tokens)).pvalue)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_samples_follow_the_softmax(seed):
    logits = np.random.default_rng(seed).normal(size=37) * 1.5
    p = np.exp(logits - logits.max())
    p /= p.sum()
    tokens = draws(logits, 200_000, seed=seed)
    assert p_value(tokens, p) > 1e-6
    # The test detects a distribution that is off by 6% in one token.
    wrong = p.copy()
    wrong[np.argmax(p)] *= 1.06
    assert p_value(tokens, wrong / wrong.sum()) < 1e-6


def test_noise_depends_only_on_seed_and_position():
    seeds = jnp.array([[1, 2], [1, 2], [1, 3], [2, 2]], jnp.uint32)
    position = jnp.array([5, 6, 5, 5])
    noise = np.asarray(gumbel(seeds, position, 1000))
    again = np.asarray(gumbel(seeds[::-1], position[::-1], 1000))[::-1]
    np.testing.assert_array_equal(noise, again)
    for a in range(4):
        for b in range(a):
            assert abs(np.corrcoef(noise[a], noise[b])[0, 1]) < 0.15
    assert np.isfinite(noise).all()


def test_noise_of_neighboring_positions_and_tokens_is_independent():
    noise = np.asarray(gumbel(jnp.ones((512, 2), jnp.uint32), jnp.arange(512), 512))
    for shifted in (np.roll(noise, 1, axis=0), np.roll(noise, 1, axis=1)):
        assert abs(np.corrcoef(noise.ravel(), shifted.ravel())[0, 1]) < 0.01
    # Every position and every token sees the whole distribution, not one arc of it.
    for axis in (0, 1):
        z = (noise.mean(axis=axis) - 0.5772) / (1.2825 / 512**0.5)
        assert stats.kstest(z, stats.norm.cdf).pvalue > 1e-6


@pytest.mark.parametrize("implementation", ["xla", "cpu"])
def test_row_is_independent_of_its_neighbors(implementation, request):
    if implementation == "cpu":
        request.getfixturevalue("cpu_kernels")
    choose = jax.jit(partial(sample, implementation=implementation))
    logits = np.random.default_rng(0).normal(size=(8, 500)).astype(np.float32)
    arguments = {
        "temperature": jnp.array([0, 1, 0.5, 1, 2, 1, 1, 0.1], jnp.float32),
        "top_k": jnp.array([0, 5, 0, 0, 50, 0, 0, 0], jnp.int32),
        "top_p": jnp.array([1, 1, 0.5, 1, 0.9, 1, 1, 1], jnp.float32),
        "min_p": jnp.array([0, 0, 0, 0.1, 0, 0, 0, 0], jnp.float32),
        "seed": jnp.arange(16, dtype=jnp.uint32).reshape(8, 2),
        "position": jnp.arange(8),
    }
    together = np.asarray(choose(jnp.array(logits), **arguments))
    poisoned = logits.copy()
    poisoned[3] = np.nan
    beside_nan = np.asarray(choose(jnp.array(poisoned), **arguments))
    for row in range(8):
        alone = choose(jnp.array(logits[row : row + 1]),
                       **{k: v[row : row + 1] for k, v in arguments.items()})  # fmt: skip
        assert together[row] == alone[0]
        assert row == 3 or beside_nan[row] == together[row]
    assert together[0] == logits[0].argmax()


def random_settings(rows: int, rng: np.random.Generator) -> dict[str, jax.Array]:
    """Return settings in which half of the rows filter and a tenth are greedy."""
    filters = rng.random(rows) < 0.5
    return {
        "temperature": jnp.array(
            np.where(rng.random(rows) < 0.1, 0, rng.uniform(0.3, 2, rows)), jnp.float32
        ),
        "top_k": jnp.array(np.where(filters, rng.integers(0, 60, rows), 0), jnp.int32),
        "top_p": jnp.array(
            np.where(filters, rng.choice([0.05, 0.5, 0.9, 1.0], rows), 1), jnp.float32
        ),
        "min_p": jnp.array(np.where(filters, rng.choice([0, 0, 0.1, 1.0], rows), 0), jnp.float32),
        "seed": jnp.array(rng.integers(0, 2**32, (rows, 2)), jnp.uint32),
        "position": jnp.array(rng.integers(0, 10**6, rows), jnp.int32),
    }


def check_cpu(vocab_sizes: tuple[int, ...]) -> None:
    """Check that the kernel's tokens equal those of the plain form, except near ties.

    The kernel's logarithms and sums differ in the last place, which decides between two tokens
    about once in a million rows. A wrong bit in the noise or a wrong threshold changes most rows.
    """
    rng = np.random.default_rng(0)
    by_kernel = jax.jit(partial(sample, implementation="cpu"))
    for vocab_size in vocab_sizes:
        rows = 400 if vocab_size < 5000 else 60
        logits = (rng.normal(size=(rows, vocab_size)) * 3).astype(np.float32)
        logits[1::7, 1::2] = -np.inf
        settings = random_settings(rows, rng)
        tokens = np.asarray(by_kernel(jnp.array(logits), **settings))
        assert tokens.dtype == np.int32
        wrong = np.flatnonzero(tokens != np.asarray(jax.jit(sample)(jnp.array(logits), **settings)))
        assert len(wrong) <= 1, f"vocabulary of {vocab_size}: rows {wrong[:5]} of {rows} differ"


@pytest.mark.slow
def test_cpu_kernel_samples_the_same_tokens(cpu_kernels):
    check_cpu((1, 15, 97, 1000, 8193, 20_001))


def test_cpu_kernel_handles_edge_cases(cpu_kernels):
    rows, V = 6, 40
    logits = np.zeros((rows, V), np.float32)
    logits[0, [5, 37]] = 1  # a tie, which takes the first
    logits[1] = -np.inf
    logits[2] = np.nan
    logits[3, 39] = np.inf
    logits[4] = np.random.default_rng(0).normal(size=V)
    settings = {
        "temperature": jnp.array([0, 0, 1, 0, 1, 1], jnp.float32),
        "top_k": jnp.array([0, 0, 3, 0, 1, 0], jnp.int32),
        "top_p": jnp.array([1, 1, 0.5, 1, 1, 1e-30], jnp.float32),
        "min_p": jnp.zeros(rows),
        "seed": jnp.ones((rows, 2), jnp.uint32),
        "position": jnp.zeros(rows, jnp.int32),
    }
    by_kernel = jax.jit(partial(sample, implementation="cpu"))
    tokens = np.asarray(by_kernel(jnp.array(logits), **settings))
    assert tokens[0] == 5 and tokens[1] == 0 and tokens[3] == 39
    assert tokens[4] == logits[4].argmax()
    assert ((tokens >= 0) & (tokens < V)).all()
    clean = np.where(np.isfinite(logits), logits, 0)
    clean[3, 39] = np.inf
    again = np.asarray(by_kernel(jnp.array(clean), **settings))
    np.testing.assert_array_equal(again[[0, 3, 4, 5]], tokens[[0, 3, 4, 5]])
    some = np.asarray(by_kernel(jnp.array(logits), **settings, num_rows=jnp.int32(4)))
    np.testing.assert_array_equal(some, [*tokens[:4], 0, 0])


def test_penalties_follow_their_formulas():
    logits = np.random.default_rng(0).normal(size=(2, 6)).astype(np.float32)
    counts = np.array([[0, 1, 3, IN_PROMPT, IN_PROMPT + 2, 0]] * 2)
    out = apply_penalties(
        jnp.array(logits),
        jnp.array(counts, jnp.int32),
        presence=jnp.array([0.5, 0.0]),
        frequency=jnp.array([0.25, 0.0]),
        repetition=jnp.array([1.3, 1.0]),
    )
    expected = logits[0].astype(np.float64)
    appeared = counts[0] != 0
    expected = np.where(appeared, np.where(expected > 0, expected / 1.3, expected * 1.3), expected)
    n = np.array([0, 1, 3, 0, 2, 0])
    expected = expected - 0.25 * n - 0.5 * (n > 0)
    np.testing.assert_allclose(np.asarray(out)[0], expected, rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(out)[1], logits[1])


def test_suppressed_tokens_disappear_only_from_active_rows():
    logits = jnp.zeros((2, 5))
    out = np.asarray(suppress(logits, jnp.array([[1, 5, 9], [1, 2, 5]]), jnp.array([True, False])))
    assert np.isneginf(out[0]).tolist() == [False, True, False, False, False]
    assert np.isfinite(out[1]).all()


def test_logprobs_are_the_log_softmax():
    logits = np.random.default_rng(0).normal(size=(3, 100)).astype(np.float32)
    chosen = np.array([5, 0, 99])
    logprob, rank, ids, top = token_logprobs(jnp.array(logits), jnp.array(chosen), 20)
    exact = logits - np.log(np.exp(logits.astype(np.float64)).sum(1, keepdims=True))
    np.testing.assert_allclose(logprob, exact[np.arange(3), chosen], atol=1e-5)
    np.testing.assert_array_equal(ids, np.argsort(-logits, axis=1)[:, :20])
    order = np.argsort(-logits, axis=1).tolist()
    assert rank.tolist() == [1 + row.index(c) for row, c in zip(order, chosen, strict=True)]
    np.testing.assert_allclose(top, -np.sort(-exact, axis=1)[:, :20], atol=1e-5)


@pytest.mark.parametrize("vocab_size", [20, 20 * CHUNK + 1, 40 * CHUNK, 3001])
def test_most_likely_tokens_have_the_order_of_a_stable_sort(vocab_size):
    rng = np.random.default_rng(vocab_size)
    logits = rng.normal(size=(6, vocab_size)).astype(np.float32)
    logits[1] = rng.integers(-2, 3, vocab_size)  # ties within chunks and across them
    logits[2] = 0.5
    logits[3] = -np.inf
    logits[3, [1, vocab_size - 1]] = 2.0
    logits[4] = np.arange(vocab_size)  # all in the last chunk
    logits[5, ::CHUNK] = 7.0  # one in each chunk
    _, rank, ids, top = token_logprobs(jnp.array(logits), jnp.zeros(6, jnp.int32), 20)
    best = np.argsort(-logits, axis=1, kind="stable")[:, :20]
    np.testing.assert_array_equal(ids, best)
    assert ids.dtype == rank.dtype == jnp.int32
    np.testing.assert_array_equal(rank, 1 + (logits > logits[:, :1]).sum(axis=1))
    assert (np.diff(np.asarray(top)[[0, 1, 2, 4, 5]], axis=1) <= 0).all()
