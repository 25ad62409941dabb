"""Chunked attention: a query attends only to keys in its own chunk of positions (Llama 4).

A chunk has the positions from a multiple of its size up to the next one. Attention in chunks is
thus ordinary causal attention to other sequences: every chunk of a sequence is one, with its own
blocks. All implementations therefore support it, and compute only the keys of the chunk.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

Batch = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


@partial(jax.jit, static_argnames=("chunk", "tokens", "block_size", "max_q_len"))
def chunked_batch(
    block_tables: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    chunk: int,
    tokens: int,
    block_size: int,
    max_q_len: int | None = None,
) -> Batch:
    """Return the batch whose sequences are the chunks that a step's rows are in.

    Args:
      block_tables, kv_lens, cu_q_lens, num_seqs: see `ragged_paged_attention`.
      chunk: the size of a chunk in tokens, a multiple of `block_size` unless one chunk holds all
        sequences.
      tokens: T.
      block_size: bs.
      max_q_len: an upper bound of the rows of a sequence. That of a chunk is also at most `chunk`.

    Returns:
      The same arguments for the chunks, in the order of the rows. At most two chunks per sequence
      and one per `chunk` rows are in use.

    Raises:
      ValueError: a chunk would start in the middle of a block.
    """
    seqs, max_blocks = block_tables.shape
    if chunk >= max_blocks * block_size:  # one chunk holds all sequences
        return block_tables, kv_lens, cu_q_lens, num_seqs
    if chunk % block_size:
        raise ValueError(
            f"chunks of {chunk} tokens must be a multiple of the block size {block_size}"
        )
    q_lens = jnp.where(jnp.arange(seqs) < num_seqs, jnp.diff(cu_q_lens), 0)
    starts = kv_lens - q_lens
    first = starts // chunk
    counts = jnp.where(q_lens > 0, -(-kv_lens // chunk) - first, 0)
    ends = jnp.cumsum(counts)

    index = jnp.arange(_most_chunks(seqs, tokens, chunk, max_q_len))
    seq = jnp.sum(ends[None, :] <= index[:, None], axis=1, dtype=jnp.int32)
    seq = jnp.minimum(seq, seqs - 1)
    number = first[seq] + index - (ends[seq] - counts[seq])
    begin = number * chunk
    lens = jnp.clip(kv_lens[seq] - begin, 0, chunk)
    rows = jnp.where(index < ends[-1], lens - jnp.maximum(starts[seq] - begin, 0), 0)
    row_ends = jnp.pad(jnp.cumsum(rows), (1, 0))

    blocks = chunk // block_size
    column = (number * blocks)[:, None] + jnp.arange(blocks)[None]
    tables = block_tables.at[seq[:, None], column].get(mode="clip")
    return tables, lens.astype(jnp.int32), row_ends.astype(jnp.int32), ends[-1].astype(jnp.int32)


def _most_chunks(seqs: int, tokens: int, chunk: int, max_q_len: int | None) -> int:
    """Return an upper bound of the chunks of a step: q rows are in 1 + ceil((q - 1) / chunk)."""
    most = min(seqs, tokens)
    longest = tokens if max_q_len is None else min(max_q_len, tokens)
    per_seq = 1 + -(-(longest - 1) // chunk)
    return min(tokens, most * per_seq, 2 * most + tokens // chunk)
