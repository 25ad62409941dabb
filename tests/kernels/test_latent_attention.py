"""Latent attention's contract: the absorbed form against keys and values in float64."""

import itertools
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from forge_kernels.attention import QuantizedKV, ragged_paged_attention
from forge_kernels.attention.xla import GROUP, KV_TILE, Q_TILE, SHORT
from forge_kernels.latent_attention import api, latent_attention, write_latents

FORMS = [("reference", False), ("auto", False), ("auto", True)]  # implementation, uniform
H, P, E, R, V = 3, 16, 8, 24, 12  # heads, and numbers: plain, rotated, of a latent, of a value
ROWS, SEQS, POOL_TOKENS, MAX_CONTEXT = 240, GROUP + 6, 3584, 320
SCALE = 0.2

# Sequences as (rows, context).
BATCHES = {
    "decode": ((1, 1), (1, 5), (1, 8), (1, 130), (1, 17)),
    "decode, several groups": tuple((1, 1 + 5 * i) for i in range(GROUP + 3)),
    "verify rows": tuple((1 + i % SHORT, 20 + i) for i in range(GROUP + 5)),
    "whole prompts": ((5, 5), (Q_TILE, Q_TILE), (Q_TILE + 1, Q_TILE + 1), (SHORT + 1, SHORT + 1)),
    "chunks": ((7, 50), (16, 16), (100, KV_TILE + 100)),
    "mixed": ((1, 9), (1, 1), (1, 150), (4, 40), (3, 3), (70, 70), (20, 201), (1, 33)),
    "tile edges": ((1, KV_TILE), (1, KV_TILE + 1), (2, KV_TILE + 1), (Q_TILE, KV_TILE + 3)),
    "empty sequences between": ((1, 4), (0, 12), (1, 6), (0, 0), (9, 9), (0, 5)),
    "nothing at all": (),
}


@dataclass
class Arrays:
    q: np.ndarray  # f32[T, H, P + E]
    kv: np.ndarray  # f32[N, 1, 1, bs, R + E]; NaN wherever no sequence has a token
    key_up: np.ndarray  # f32[H, P, R]
    value_up: np.ndarray  # f32[H, V, R]
    block_tables: np.ndarray
    kv_lens: np.ndarray
    cu_q_lens: np.ndarray
    num_seqs: np.int32
    expected: np.ndarray  # f64[T, H, V]

    @property
    def inputs(self) -> tuple[jax.Array, ...]:
        names = ("q", "kv", "key_up", "value_up", "block_tables", "kv_lens", "cu_q_lens")
        return tuple(jnp.asarray(getattr(self, name)) for name in (*names, "num_seqs"))


def make(seqs: tuple[tuple[int, int], ...], block_size: int = 8, dtype: str = "float32") -> Arrays:
    rng = np.random.default_rng(0)
    blocks = POOL_TOKENS // block_size

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(jnp.dtype(dtype)).astype(np.float32)

    q, kv = normal(ROWS, H, P + E), np.full((blocks, 1, 1, block_size, R + E), np.nan, np.float32)
    key_up, value_up = normal(H, P, R) / 4, normal(H, V, R) / 4
    order = rng.permutation(blocks)
    tables = rng.integers(0, blocks, (SEQS, -(-MAX_CONTEXT // block_size))).astype(np.int32)
    kv_lens, cu_q_lens = np.full(SEQS, 77, np.int32), np.full(SEQS + 1, ROWS, np.int32)
    cu_q_lens[: len(seqs) + 1] = np.cumsum([0, *(rows for rows, _ in seqs)])
    q[cu_q_lens[len(seqs)] :] = np.nan
    expected = np.zeros((ROWS, H, V))
    for s, (rows, context) in enumerate(seqs):
        kv_lens[s] = context
        mine, order = np.split(order, [-(-context // block_size)])
        tables[s, : len(mine)] = mine
        vectors = normal(context, R + E)
        for position in range(context):
            kv[mine[position // block_size], 0, 0, position % block_size] = vectors[position]
        latents, shared = np.split(vectors.astype(np.float64), [R], axis=1)
        keys = np.concatenate(
            [
                np.einsum("cr,hpr->hcp", latents, key_up),
                np.broadcast_to(shared, (H, context, E)),
            ],
            axis=2,
        )
        values = np.einsum("cr,hvr->hcv", latents, value_up)
        for row in range(rows):
            seen = context - rows + row + 1
            at = cu_q_lens[s] + row
            scores = SCALE * np.einsum("hd,hcd->hc", q[at], keys[:, :seen])
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            expected[at] = np.einsum("hc,hcv->hv", weights, values[:, :seen])
    num_seqs = np.int32(len(seqs))
    return Arrays(q, kv, key_up, value_up, tables, kv_lens, cu_q_lens, num_seqs, expected)


@partial(jax.jit, static_argnames=("implementation", "kv_dtype", "max_q_len", "uniform"))
def attend(arrays, **options):
    return latent_attention(*arrays, sm_scale=SCALE, **options)


@pytest.mark.parametrize(("implementation", "uniform"), FORMS)
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.quick_cases(6)
def test_absorbed_form_matches_keys_and_values(name, implementation, uniform):
    arrays = make(BATCHES[name])
    out = attend(arrays.inputs, implementation=implementation, uniform=uniform)
    np.testing.assert_allclose(out, arrays.expected, atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("block_size", [16, 24, 2 * KV_TILE])
@pytest.mark.quick_cases(1)
def test_blocks_have_any_size(block_size):
    arrays = make(BATCHES["mixed"], block_size)
    np.testing.assert_allclose(attend(arrays.inputs), arrays.expected, atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize(("implementation", "uniform"), FORMS)
@pytest.mark.quick_cases(1)
def test_bfloat16_latents_may_be_stored_as_bits(implementation, uniform):
    arrays = make(BATCHES["mixed"], dtype="bfloat16")
    q, kv, key_up, value_up, *rest = arrays.inputs
    bits = lax.bitcast_convert_type(kv.astype(jnp.bfloat16), jnp.uint16)
    q, key_up, value_up = (x.astype(jnp.bfloat16) for x in (q, key_up, value_up))
    out = attend(
        (q, bits, key_up, value_up, *rest),
        kv_dtype="bfloat16",
        implementation=implementation,
        uniform=uniform,
    )
    assert out.dtype == jnp.bfloat16
    error = np.linalg.norm(np.asarray(out.astype(jnp.float32)) - arrays.expected)
    assert 1e-4 < error / np.linalg.norm(arrays.expected) < 0.02


def test_max_q_len_hint_does_not_change_the_output():
    for name, most in (("decode, several groups", 1), ("verify rows", SHORT)):
        arrays = make(BATCHES[name])
        np.testing.assert_array_equal(attend(arrays.inputs, max_q_len=most), attend(arrays.inputs))


def differing_schedules(**options) -> list[str]:
    """Return the schedules of a sequence's last rows that give other bits than one step."""
    context = 150
    arrays = make(((context, context), *((1, 90 + i) for i in range(9))))

    def last_rows(rows: int, beside: int) -> np.ndarray:
        index = [*range(1, beside + 1), 0]
        a = make(())
        a.kv = arrays.kv
        a.block_tables[: len(index)] = arrays.block_tables[index]
        a.kv_lens[: len(index)] = arrays.kv_lens[index]
        a.cu_q_lens = np.full(SEQS + 1, beside + rows, np.int32)
        a.cu_q_lens[: len(index)] = np.arange(len(index))
        a.num_seqs = np.int32(len(index))
        a.key_up, a.value_up = arrays.key_up, arrays.value_up
        a.q[:beside] = arrays.q[context : context + beside]
        mine = slice(beside, beside + rows)
        a.q[mine] = arrays.q[context - rows : context]
        return np.asarray(attend(a.inputs, **options))[mine]

    whole = last_rows(context, 0)
    return [
        f"{rows} rows beside {beside} sequences"
        for rows, beside in itertools.product((1, 2, 7, 33, 70), (0, 1, 9))
        if not np.array_equal(last_rows(rows, beside), whole[context - rows :])
    ]


@pytest.mark.full_compile
def test_uniform_row_has_the_same_bits_on_every_schedule():
    assert differing_schedules(uniform=True) == []


@pytest.mark.full_compile
def test_results_that_depend_on_other_sequences_are_found(monkeypatch):
    def dependent(arrays, **options):
        out = latent_attention(*arrays, sm_scale=SCALE, **options)
        return out * (1 + 2.0**-20 * float(arrays[-1]))

    monkeypatch.setitem(globals(), "attend", dependent)
    found = differing_schedules(uniform=True)
    assert "7 rows beside 9 sequences" in found and "7 rows beside 0 sequences" not in found


@pytest.mark.parametrize("fault", ["rotated keys first", "no rotated keys", "keys as values"])
@pytest.mark.quick_cases(1)
def test_suite_detects_a_planted_fault(fault, monkeypatch):
    def faulty(q, kv, *batch, **options):
        if fault == "no rotated keys":
            q = q.at[..., R:].set(0.0)
        if fault == "rotated keys first":
            q = jnp.roll(q, E, axis=-1)
        out = ragged_paged_attention(q, kv, *batch, **options)
        return jnp.roll(out, -E, axis=-1) if fault == "keys as values" else out

    monkeypatch.setattr(api, "ragged_paged_attention", faulty)
    arrays = make(BATCHES["mixed"])
    out = jax.jit(partial(latent_attention, sm_scale=SCALE))(*arrays.inputs)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        np.testing.assert_allclose(out, arrays.expected, atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_vectors_are_written_to_their_slots(kv_dtype):
    vectors = jnp.arange(3 * (R + E), dtype=jnp.float32).reshape(3, -1)
    slots = jnp.asarray([9, 24, 2], jnp.int32)  # the second is past the end of 3 blocks
    storage = jnp.uint16 if kv_dtype == "bfloat16" else jnp.float32
    kv = write_latents(jnp.zeros((3, 1, 1, 8, R + E), storage), vectors, slots, kv_dtype=kv_dtype)
    found = lax.bitcast_convert_type(kv, jnp.bfloat16) if storage == jnp.uint16 else kv
    want = np.zeros((24, R + E), np.float32)
    want[[9, 2]] = np.asarray(vectors[jnp.asarray([0, 2])].astype(kv_dtype), np.float32)
    np.testing.assert_array_equal(np.asarray(found, np.float32).reshape(24, -1), want)


def test_gradient_is_that_of_finite_differences():
    arrays = make(((2, 5), (3, 3)))
    q, kv, *rest = arrays.inputs

    def total(q: jax.Array, kv: jax.Array, implementation: api.Implementation) -> jax.Array:
        out = latent_attention(q, kv, *rest, sm_scale=SCALE, implementation=implementation)
        return jnp.sum(out[:5] ** 2)

    slope = jax.grad(total)(q, kv, "reference")[:5]
    step = jnp.zeros_like(q).at[3].set(jnp.linspace(-1, 1, H * (P + E)).reshape(H, -1))
    ends = [total(jnp.where(jnp.isnan(q), q, q + h * step), kv, "reference") for h in (1e-2, -1e-2)]
    np.testing.assert_allclose((slope * step[:5]).sum(), (ends[0] - ends[1]) / 2e-2, rtol=1e-2)
    np.testing.assert_allclose(jax.grad(total)(q, kv, "auto")[:5], slope, rtol=1e-4, atol=1e-4)


def test_mismatched_arguments_are_rejected():
    q, kv, key_up, value_up, *rest = make(BATCHES["decode"]).inputs
    call = partial(latent_attention, sm_scale=SCALE)
    with pytest.raises(ValueError, match=r"kv \[N, 1, 1, bs, R \+ E\]"):
        call(q, jnp.concatenate([kv, kv], axis=1), key_up, value_up, *rest)
    with pytest.raises(ValueError, match="do not fit each other"):
        call(q, kv, key_up[:, 1:], value_up, *rest)
    with pytest.raises(ValueError, match="do not fit each other"):
        call(q, kv, key_up, value_up[1:], *rest)
    with pytest.raises(TypeError, match="must have one type"):
        call(q, kv, key_up.astype(jnp.bfloat16), value_up, *rest)
    quantized: Any = QuantizedKV(kv.astype(jnp.int8), jnp.ones(kv.shape[:-1]))
    with pytest.raises(TypeError, match="does not support a cache of 8 bits"):
        call(q, quantized, key_up, value_up, *rest)
    for implementation in ("cpu", "mosaic"):
        with pytest.raises(TypeError, match="does not support a cache with one plane"):
            ragged_paged_attention(
                jnp.zeros((ROWS, H, R + E)),
                kv,
                *rest,
                sm_scale=SCALE,
                implementation=implementation,
            )
