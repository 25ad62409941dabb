"""Linear recurrences over ragged rows: NumPy's results, however tokens are divided into steps."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forge_kernels.recurrence import (
    DELTA_RULE,
    STATE_SPACE,
    Heads,
    RecurrentState,
    RecurrentWeights,
    gated_rms_norm,
    ragged_recurrence,
)

HEADS = Heads(keys=2, values=4, key_dim=8, value_dim=6)
TAPS, SLOTS = 4, 5  # and a slot for padding
FORMS = ["chunk", "token", "scan"]


def silu(x):
    return x / (1 + np.exp(-x))


def expected(rule, x, log_decay, beta, weights):
    """Return float64[n, H, Dv] of one sequence, token by token."""
    h, n, inner = HEADS, len(x), HEADS.values * HEADS.value_dim
    padded = np.concatenate([np.zeros((TAPS - 1, h.channels)), np.asarray(x, np.float64)])
    mixed = sum(padded[i : i + n] * weights.taps[:, i] for i in range(TAPS))
    if rule is STATE_SPACE:
        v, k, q = np.split(silu(mixed + weights.bias), (inner, (inner + h.channels) // 2), axis=1)
    else:
        q, k, v = np.split(silu(mixed), (h.keys * h.key_dim, 2 * h.keys * h.key_dim), axis=1)
    q, k = (y.reshape(n, h.keys, h.key_dim) for y in (q, k))
    if rule is DELTA_RULE:
        q, k = (y / np.sqrt((y * y).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
        q = q / h.key_dim**0.5
    q, k = (np.repeat(y, h.values // h.keys, axis=1) for y in (q, k))
    v = v.reshape(n, h.values, h.value_dim)
    state, out = np.zeros((h.values, h.key_dim, h.value_dim)), []
    for t in range(n):
        state = state * np.exp(log_decay[t])[:, None, None]
        known = np.einsum("hk,hkv->hv", k[t], state) if rule is DELTA_RULE else 0
        state = state + np.einsum("hk,hv->hkv", k[t], (v[t] - known) * beta[t][:, None])
        out.append(np.einsum("hk,hkv->hv", q[t], state))
    out = np.stack(out)
    return out if weights.skip is None else out + weights.skip[:, None] * v


class Sequences:
    """Random inputs of several sequences, and steps over parts of them."""

    def __init__(self, seed, length=200, pending=0, rule=DELTA_RULE, **options):
        self.random, self.rule = (random := np.random.default_rng(seed)), rule
        shapes = [(HEADS.channels, TAPS), (HEADS.channels,), (HEADS.values,)]
        weights = [random.normal(size=shape).astype(np.float32) for shape in shapes]
        self.weights = RecurrentWeights(*weights[: 3 if rule is STATE_SPACE else 1])
        self.inputs = [self.draw(length) for _ in range(SLOTS)]
        H, channels = HEADS.values, HEADS.channels
        shapes = [(H, HEADS.key_dim, HEADS.value_dim), (TAPS - 1, channels)]
        shapes += [(pending, channels), (pending, 2, H)]
        state, *rest = (jnp.full((SLOTS + 1, *shape), jnp.nan) for shape in shapes)
        self.state = RecurrentState(state, jnp.full(SLOTS + 1, 7), *rest)
        call = partial(ragged_recurrence, heads=HEADS, rule=rule, **options)
        self.call = jax.jit(call, static_argnames="max_q_len")

    def draw(self, length):
        random = self.random
        decay = -np.exp(random.normal(size=(length, HEADS.values)) * 2)
        beta = random.uniform(size=decay.shape)
        x = random.normal(size=(length, HEADS.channels))
        return [each.astype(np.float32) for each in (x, decay, beta)]

    def expected(self, s):
        return expected(self.rule, *self.inputs[s], self.weights)

    def step(self, parts, *, T=256, drafts=None, max_q_len=None):
        """Compute parts (sequence, first, last); return the outputs of each.

        `drafts` are the numbers of last tokens of each part that are random instead.
        """
        arrays = [np.full((T, *x.shape[1:]), np.nan, np.float32) for x in self.inputs[0]]
        slots = np.full(SLOTS + 2, SLOTS, np.int32)
        positions, cu = np.full(T, 999, np.int32), np.zeros(SLOTS + 3, np.int32)
        for i, (s, first, last) in enumerate(parts):
            begin, end = cu[i], cu[i] + last - first
            for whole, own in zip(arrays, self.inputs[s], strict=True):
                whole[begin:end] = own[first:last]
            for whole, own in zip(arrays, self.draw(T), strict=True):
                wrong = drafts[i] if drafts else 0
                whole[end - wrong : end] = own[:wrong]
            positions[begin:end] = range(first, last)
            slots[i], cu[i + 1 :] = s, end
        self.state, out = self.call(
            *arrays, self.weights, self.state, slots, positions, cu, len(parts), max_q_len=max_q_len
        )
        return [np.asarray(out[cu[i] : cu[i + 1]]) for i in range(len(parts))]


def close(found, want):
    atol = 3e-5 * max(1, np.abs(want).max(initial=0))
    np.testing.assert_allclose(found, want, atol=atol, rtol=1e-4)


@pytest.mark.parametrize("rule", [DELTA_RULE, STATE_SPACE], ids=["delta", "space"])
@pytest.mark.parametrize("form", FORMS)
def test_whole_sequences_match_numpy(form, rule):
    run = Sequences(0, form=form, rule=rule)
    lengths = (130, 1, 64, 5)
    found = run.step([(s, 0, length) for s, length in enumerate(lengths)])
    for s, length in enumerate(lengths):
        close(found[s], run.expected(s)[:length])


@pytest.mark.parametrize(
    ("pending", "rule"),
    [(0, DELTA_RULE), (1, DELTA_RULE), (4, DELTA_RULE), (4, STATE_SPACE)],
    ids=["delta-0", "delta-1", "delta-4", "space-4"],
)
@pytest.mark.parametrize("form", FORMS)
def test_any_schedule_of_chunks_and_rejected_drafts_matches_numpy(form, pending, rule):
    run = Sequences(1, pending=pending, form=form, rule=rule)
    random, at = np.random.default_rng(2), dict.fromkeys(range(SLOTS), 0)
    want = [run.expected(s) for s in at]
    for _ in range(40):
        chosen = random.permutation(SLOTS)[: random.integers(1, SLOTS + 1)]
        parts, drafts = [], []
        for s in chosen.tolist():
            if random.uniform() < 0.08:  # ends; the next sequence takes its slot
                at[s] = 0
            rows = int(random.choice([1, 1, 2, 3, 4, 5, 40]))
            rows = min(rows, 200 - at[s])
            if rows:
                parts.append((s, at[s], at[s] + rows))
                drafts.append(int(random.integers(0, rows)) if rows <= pending else 0)
        found = run.step(parts, drafts=drafts)
        for (s, first, last), wrong, out in zip(parts, drafts, found, strict=True):
            at[s] = last - wrong
            close(out[: last - wrong - first], want[s][first : last - wrong])


def test_decode_steps_match_numpy():
    run = Sequences(3, pending=2, form="chunk")
    run.step([(s, 0, 9) for s in range(3)])
    for t in range(9, 15):
        found = run.step([(s, t, t + 1) for s in range(3)], T=8, max_q_len=1)
        for s in range(3):
            close(found[s], run.expected(s)[t : t + 1])


@pytest.mark.full_compile
@pytest.mark.parametrize(
    ("pending", "rule"),
    [(0, DELTA_RULE), (3, DELTA_RULE), (3, STATE_SPACE)],
    ids=["delta-0", "delta-3", "space-3"],
)
def test_bits_of_the_token_form_depend_on_the_sequence_alone(pending, rule):
    alone, shared = (Sequences(4, pending=pending, form="token", rule=rule) for _ in range(2))
    want = np.concatenate([alone.step([(0, t, t + 1)], T=4, max_q_len=1)[0] for t in range(40)])
    found = [shared.step([(1, 0, 9), (0, 0, 17)])[1]]
    found.append(shared.step([(0, 17, 20), (1, 9, 10), (2, 0, 30)], T=48)[0])
    if pending:
        shared.step([(0, 20, 23)], drafts=[3])  # rejected
    found.append(shared.step([(1, 10, 40), (0, 20, 40)])[1])
    np.testing.assert_array_equal(np.concatenate(found), want)


def test_chunks_with_strong_decay_and_equal_keys_stay_finite():
    run = Sequences(5, form="chunk")
    x, decay, beta = run.inputs[0]
    x[:], decay[:], beta[:] = x[:1], -80.0, 1.0
    run.inputs[1] = [x, np.zeros_like(decay), beta]
    found = run.step([(0, 0, 100), (1, 0, 100)])
    close(found[0], run.expected(0)[:100])
    close(found[1], run.expected(1)[:100])


@pytest.mark.parametrize(
    ("form", "rule"), [*((form, DELTA_RULE) for form in FORMS), ("token", STATE_SPACE)],
    ids=[*FORMS, "space-token"],
)  # fmt: skip
def test_derivative_is_that_of_finite_differences(form, rule):
    run = Sequences(6, length=12, rule=rule)
    x, decay, beta = (jnp.asarray(each) for each in run.inputs[0])
    state = jax.tree.map(jnp.zeros_like, run.state)
    i32 = partial(jnp.asarray, dtype=jnp.int32)

    def loss(x):
        _, out = ragged_recurrence(
            x, decay, beta, run.weights, state, i32([0]), jnp.arange(12), i32([0, 12]), i32(1),
            heads=HEADS, form=form, rule=rule,
        )  # fmt: skip
        return (out**2).sum()

    direction = jnp.asarray(np.random.default_rng(7).normal(size=x.shape), jnp.float32)
    slope = (loss(x + 1e-2 * direction) - loss(x - 1e-2 * direction)) / 2e-2
    np.testing.assert_allclose((jax.grad(loss)(x) * direction).sum(), slope, rtol=2e-3)


@pytest.mark.quick_compile
def test_derivative_ignores_padding():
    """It is that of the scan, whatever the form."""
    run, n = Sequences(9, length=12), 7
    state = jax.tree.map(jnp.zeros_like, run.state)
    i32 = partial(jnp.asarray, dtype=jnp.int32)

    def loss(arrays, padding):
        *rows, taps = arrays
        _, out = ragged_recurrence(
            *(x.at[n:].set(padding) for x in rows), RecurrentWeights(taps), state, i32([0, SLOTS]),
            jnp.arange(12), i32([0, n, n]), i32(1), heads=HEADS, form="token",
        )  # fmt: skip
        return (out[:n] ** 2).sum()

    slopes = jax.jit(jax.grad(loss))
    arrays = [jnp.asarray(x) for x in (*run.inputs[0], run.weights.taps)]
    want = slopes(arrays, 0.0)
    assert all(np.any(each) for each in want)
    for found, alone in zip(slopes(arrays, jnp.nan), want, strict=True):
        np.testing.assert_array_equal(found, alone)


def test_gated_norm_matches_numpy():
    random = np.random.default_rng(8)
    x, gate = random.normal(size=(2, 5, 4, 6)).astype(np.float32)
    weight = random.normal(size=6).astype(np.float32)
    want = weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * silu(gate)
    np.testing.assert_allclose(gated_rms_norm(x, gate, weight, 1e-5), want, atol=1e-5)
