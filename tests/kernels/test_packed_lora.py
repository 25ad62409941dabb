"""Adapters by the C++ kernels. `forge_kernels.lora.lora` is the reference.

The functions named check_* also run in `cpu_child.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forge_kernels.lora import lora, pack_adapter, packed_lora

pytestmark = pytest.mark.usefixtures("cpu_kernels")

CASES = {  # rows, inputs, outputs, rank, places
    "one row": (1, 64, 96, 8, 2),
    "tails": (40, 99, 70, 5, 3),
    "whole panels": (130, 576, 320, 32, 4),
    "two panels of ranks": (33, 64, 33, 40, 1),
}


def packed_case(rows, inputs, outputs, rank, places, layers=2):
    """Return x, a and b of all layers, each packed, and the place of each row."""
    rng = np.random.default_rng([rows, inputs])

    def random(*shape):
        return rng.normal(size=shape).astype(jnp.bfloat16)

    a, b = random(layers, places, rank, inputs), random(layers, places, outputs, rank)
    pairs = [list(map(pack_adapter, *of_layer)) for of_layer in zip(a, b, strict=True)]
    packed = [jnp.asarray([[pair[i] for pair in layer] for layer in pairs]) for i in range(2)]
    place = jnp.asarray(rng.integers(0, places + 1, rows), jnp.int32)
    return jnp.asarray(random(rows, inputs)), (a, b.swapaxes(1, 2)), packed, place


def check(case):
    """Compare with plain adapters."""
    rows, inputs, outputs, rank, places = case
    x, plain, packed, place = packed_case(rows, inputs, outputs, rank, places)
    for layer in range(2):
        got = packed_lora(x, *packed, place, layer=layer, outputs=outputs)
        assert got.dtype == jnp.bfloat16 and not np.asarray(got)[place == 0].any()
        got = np.asarray(got, np.float32)
        want = lora(x, *(jnp.asarray(each[layer]) for each in plain), place)
        want = np.asarray(want, np.float32)
        np.testing.assert_allclose(got, want, rtol=0, atol=0.01 * np.abs(want).max())


def check_bits():
    """Check that a row's bits depend only on its values and its adapter.

    They must not depend on other rows, on the row's index, or on the rows in use.
    """
    x, _, packed, place = packed_case(70, 64, 96, 8, 3)
    place = place.at[:4].set(jnp.asarray([1, 2, 3, 0]))
    run = jax.jit(lambda *arrays, rows=None: packed_lora(
        *arrays, layer=1, outputs=96, num_rows=rows
    ))  # fmt: skip
    together = np.asarray(run(x, *packed, place))
    assert together[place != 0].any(axis=1).all()
    for row in range(4):
        alone = jnp.full_like(x, jnp.nan).at[9].set(x[row])
        one = run(alone, *packed, jnp.zeros_like(place).at[9].set(place[row]))
        np.testing.assert_array_equal(np.asarray(one)[9], together[row])
        assert not np.asarray(one)[:9].any()
    some = np.asarray(run(x, *packed, place, rows=jnp.int32(33)))
    np.testing.assert_array_equal(some[:33], together[:33])
    assert not some[33:].any()


@pytest.mark.parametrize("name", CASES)
def test_products_match_plain_adapters(name):
    check(CASES[name])


def test_bits_of_a_row_depend_only_on_its_own_adapter():
    check_bits()


def test_gradients_match_plain_adapters():
    x, (a, b), packed, place = packed_case(12, 32, 48, 4, 2)

    def loss(product):
        return lambda x: jnp.sum(jnp.square(product(x).astype(jnp.float32)))

    got = jax.grad(loss(lambda x: packed_lora(x, *packed, place, layer=1, outputs=48)))(x)
    want = jax.grad(loss(lambda x: lora(x, jnp.asarray(a[1]), jnp.asarray(b[1]), place)))(x)
    assert np.asarray(want, np.float32).any()
    close = {"rtol": 0.02, "atol": 0.02 * float(jnp.abs(want).max())}
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), **close)


def test_wrong_shapes_and_types_are_rejected():
    x, _, packed, place = packed_case(3, 64, 96, 8, 2)
    with pytest.raises(ValueError, match="shapes do not match"):
        packed_lora(x, *packed, place, layer=0, outputs=200)
    with pytest.raises(ValueError, match="shapes do not match"):
        packed_lora(x, *packed, place[:2], layer=0, outputs=96)
    with pytest.raises(TypeError, match="multiply bfloat16, got float32"):
        packed_lora(x.astype(jnp.float32), *packed, place, layer=0, outputs=96)
