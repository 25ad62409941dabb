"""Attention in chunks: every implementation against a dense one in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from test_attention import BATCHES, BF16_ROUNDOFF, FORMS, TOLERANCE, Batch, attend, inputs, make

from forge_kernels.attention import chunked_batch, pattern_attention, ragged_paged_attention

CHUNK = 40
NAMES = ("decode, several groups", "verify rows", "chunks", "mixed", "tile edges")
NAMES += ("empty sequences between", "nothing at all")


def in_chunks(q, kv, *batch, chunk=CHUNK, **options):
    chunks = chunked_batch(*batch, chunk=chunk, tokens=len(q), block_size=kv.shape[3], **options)
    return q, kv, *chunks


@pytest.mark.parametrize(("implementation", "uniform"), FORMS)
def test_output_matches_dense_attention_within_chunks(implementation, uniform):
    for name in NAMES:
        arrays = make(BATCHES[name], chunk=CHUNK)  # NaN wherever no sequence has a token
        out = attend(in_chunks(*inputs(arrays)), implementation=implementation, uniform=uniform)
        np.testing.assert_allclose(out, arrays.expected, **TOLERANCE, err_msg=name)


def test_decode_steps_have_one_chunk_per_sequence():
    arrays = make(BATCHES["decode, several groups"], chunk=CHUNK)
    chunks = in_chunks(*inputs(arrays), max_q_len=1)
    assert chunks[2].shape == (len(arrays.kv_lens), CHUNK // 8)
    out = attend(chunks, implementation="xla", max_q_len=1)
    np.testing.assert_allclose(out, arrays.expected, **TOLERANCE)


def test_cpu_kernels_match_dense_attention_within_chunks(cpu_kernels):
    for name in NAMES:
        arrays = make(BATCHES[name].for_cpu(), chunk=CHUNK)
        q, kv, *batch = inputs(arrays)
        kv = lax.bitcast_convert_type(kv.astype(jnp.bfloat16), jnp.uint16)
        chunks = in_chunks(q.astype(jnp.bfloat16), kv, *batch)
        out = attend(chunks, implementation="cpu", kv_dtype="bfloat16")
        rows = arrays.cu_q_lens[arrays.num_seqs]
        expected, spread = arrays.expected[:rows], arrays.spread[:rows]
        tolerance = BF16_ROUNDOFF * (spread + np.abs(expected)) + 1e-5
        assert (np.abs(np.asarray(out, np.float32)[:rows] - expected) <= tolerance).all(), name


def test_patterns_match_dense_attention_within_chunks():
    arrays = make(BATCHES["no padding"], chunk=8)
    seen = []
    out = pattern_attention(
        *inputs(arrays),
        sm_scale=16**-0.5,
        chunk=8,
        tap=lambda weights: seen.append(weights) or weights,
    )
    np.testing.assert_allclose(out, arrays.expected, **TOLERANCE)
    assert seen[0].shape[2] == 16  # positions of the sequence, not of the chunk


def test_most_chunks_of_a_step_fit():
    """Each sequence has two rows, in two chunks."""
    batch = Batch(seqs=((2, 9),) * 6).exact()
    arrays = make(batch, chunk=8)
    chunks = in_chunks(*inputs(arrays), chunk=8)
    assert chunks[-1] == len(chunks[2]) == 12
    out = attend(chunks, implementation="xla")
    np.testing.assert_allclose(out, arrays.expected, **TOLERANCE)


def test_gradient_is_that_of_the_reference():
    q, kv, *batch = inputs(make(BATCHES["no padding"], chunk=8))
    kv = jnp.nan_to_num(kv)

    def loss(q, kv, implementation):
        chunks = in_chunks(q, kv, *batch, chunk=8)
        out = ragged_paged_attention(*chunks, sm_scale=0.25, implementation=implementation)
        return jnp.sum(out * jnp.linspace(0, 1, out.size).reshape(out.shape))

    found, want = (jax.grad(loss, (0, 1))(q, kv, name) for name in ("xla", "reference"))
    for got, expected in zip(found, want, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)


def test_chunk_in_the_middle_of_a_block_is_rejected():
    arrays = inputs(make(BATCHES["one row"]))
    with pytest.raises(
        ValueError, match="chunks of 12 tokens must be a multiple of the block size 8"
    ):
        in_chunks(*arrays, chunk=12)


def test_batch_within_one_chunk_is_unchanged():
    arrays = inputs(make(BATCHES["one row"]))
    for before, after in zip(arrays, in_chunks(*arrays, chunk=25), strict=True):
        assert before is after or (before == after).all()
