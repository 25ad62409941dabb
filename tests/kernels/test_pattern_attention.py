"""`pattern_attention`: NaN and infinities affect only the rows that see them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forge_kernels.attention import pattern_attention, ragged_paged_attention

H, K, D, BLOCK = 4, 2, 8, 4
# Two sequences, of six new tokens after two cached ones and of three tokens. Two rows of padding.
BATCH = (
    jnp.array([[2, 0], [1, 3]]),
    jnp.array([8, 3]),
    jnp.array([0, 6, 9]),
    jnp.array(2),
)
ROWS, BAD = 11, 5  # BAD: a position of the first sequence
FIRST = BAD - 2  # its row
CLEAN = [*range(FIRST), *range(6, 9)]  # rows that do not see it
OPTIONS = [
    {},
    {"soft_cap": 5.0},
    {"window": 3},
    {"sinks": jnp.linspace(-1.0, 1.0, H)},
    {"max_q_len": 6},
    {"tap": lambda weights: weights},
    {"tap": lambda weights: 1.0 * weights},
]
IDS = ["plain", "soft_cap", "window", "sinks", "max_q_len", "tap", "edit"]


def inputs():
    keys = jax.random.split(jax.random.key(0))
    q = jax.random.normal(keys[0], (ROWS, H, D))
    return q, jax.random.normal(keys[1], (4, 2, K, BLOCK, D))


def spoiled(q, kv, number, where):
    """Return the inputs with `number` in the query, key or value of the token at BAD."""
    if where == "query":
        return q.at[FIRST, :, 1].set(number), kv
    plane = ["key", "value"].index(where)
    return q, kv.at[0, plane, :, BAD % BLOCK, 1].set(number)


def attend(q, kv, **options):
    return pattern_attention(q, kv, *BATCH, sm_scale=D**-0.5, **options)


@pytest.mark.parametrize("options", OPTIONS, ids=IDS)
def test_results_are_those_of_paged_attention(options):
    options = {name: each for name, each in options.items() if name != "tap"}
    q, kv = inputs()
    expected = ragged_paged_attention(
        q, kv, *BATCH, sm_scale=D**-0.5, implementation="reference", **options
    )
    np.testing.assert_allclose(attend(q, kv, **options), expected, atol=1e-5)


@pytest.mark.parametrize("options", OPTIONS, ids=IDS)
@pytest.mark.parametrize(
    ("where", "number"), [("query", np.inf), ("key", np.nan), ("value", np.nan), ("value", np.inf)]
)
def test_undefined_numbers_affect_only_rows_that_see_them(options, where, number):
    q, kv = inputs()
    call = partial(attend, **options)
    expected, found = call(q, kv), call(*spoiled(q, kv, number, where))
    np.testing.assert_array_equal(found[jnp.array(CLEAN)], expected[jnp.array(CLEAN)])
    assert not np.isfinite(found[FIRST]).any() and not found[9:].any()
    assert np.isfinite(found[FIRST + 1 : 6]).all() == (where == "query")


@pytest.mark.parametrize("options", OPTIONS, ids=IDS)
@pytest.mark.parametrize("where", ["query", "key", "value"])
def test_gradients_of_other_rows_exclude_undefined_numbers(options, where):
    def loss(q, kv):
        return jnp.sum(jnp.sin(attend(q, kv, **options))[jnp.array(CLEAN)])

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
    expected, found = gradient(*inputs()), gradient(*spoiled(*inputs(), np.nan, where))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_queries_of_padding_do_not_reach_gradients():
    q, kv = inputs()

    def loss(q, kv):
        return jnp.sum(attend(q, kv)[:9])

    found = jax.grad(loss, argnums=1)(q.at[9:].set(np.nan), kv)
    np.testing.assert_array_equal(found, jax.grad(loss, argnums=1)(q, kv))


@pytest.mark.parametrize("where", ["query", "key"])
def test_pattern_of_a_row_with_undefined_scores_is_nan(where):
    patterns = []
    attend(*spoiled(*inputs(), np.nan, where), tap=lambda x: patterns.append(x) or x)
    (pattern,) = patterns
    assert np.isnan(pattern[FIRST]).all() and np.isfinite(pattern[jnp.array(CLEAN)]).all()
    assert not pattern[9:].any()


def test_edited_pattern_replaces_undefined_weights_and_reads_values():
    q, kv = inputs()
    weights = jnp.broadcast_to(jnp.where(jnp.arange(8) < 5, 0.2, 0.0), (ROWS, H, 8))
    even = partial(attend, tap=lambda _: weights)
    expected = even(q, kv)
    np.testing.assert_array_equal(even(*spoiled(q, kv, np.nan, "key")), expected)
    later = partial(attend, tap=lambda x: x.at[0, :, BAD].set(0.5))  # a key that row 0 cannot see
    found = later(*spoiled(q, kv, np.nan, "value"))
    assert np.isnan(found[0]).all() and np.isfinite(found[1:FIRST]).all()
