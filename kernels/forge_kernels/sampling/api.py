"""Sampling of tokens from logits. A row's result depends on that row only, in every function.

No function sorts the vocabulary. Thresholds are found by a search over the bits of the floats (see
`search`). On a CPU, this is about a hundred times cheaper than a sort.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

from forge_kernels.sampling.cpu_ffi import cpu_sample
from forge_kernels.sampling.noise import gumbel
from forge_kernels.sampling.rejection import Drafts, verify
from forge_kernels.sampling.search import from_order_key, largest_key, order_key

IN_PROMPT = 1 << 30  # the bit of a count that marks tokens in the prompt
CHUNK = 64  # tokens whose maximum is compared first


def apply_penalties(
    logits: jax.Array,
    counts: jax.Array,
    *,
    presence: jax.Array,
    frequency: jax.Array,
    repetition: jax.Array,
) -> jax.Array:
    """Apply the repetition penalty to prompt and output (arXiv:1909.05858), then OpenAI's.

    OpenAI's penalties apply to the output only.

    Args:
      logits: f32[R, V].
      counts: i32[R, V], how often each token is in the output, plus `IN_PROMPT`.
      presence, frequency, repetition: f32[R]; 0, 0 and 1 change nothing.
    """
    in_output = counts & (IN_PROMPT - 1)
    scale = repetition[:, None]
    repeated = jnp.where(logits > 0, logits / scale, logits * scale)
    logits = jnp.where(counts != 0, repeated, logits)
    logits = logits - frequency[:, None] * in_output.astype(jnp.float32)
    return logits - presence[:, None] * (in_output > 0).astype(jnp.float32)


def suppress(logits: jax.Array, token_ids: jax.Array, active: jax.Array) -> jax.Array:
    """Forbid `token_ids: i32[R, K]` (out of range: none) in rows that are `active: bool[R]`."""
    vocab_size = logits.shape[1]
    ids = jnp.where(active[:, None], token_ids, vocab_size)
    rows = jnp.arange(logits.shape[0])[:, None]
    return logits.at[rows, ids].min(-jnp.inf, mode="drop")


def allow(logits: jax.Array, masks: jax.Array) -> jax.Array:
    """Forbid each row's tokens whose bit is not set.

    Args:
      logits: f32[R, V].
      masks: i32[R, ceil(V / 32)]; token t is bit t % 32 of word t // 32.
    """
    bits = (masks[:, :, None] >> jnp.arange(32, dtype=jnp.int32)[None, None]) & 1
    allowed = bits.reshape(masks.shape[0], -1)[:, : logits.shape[1]] != 0
    return jnp.where(allowed, logits, -jnp.inf)


def filter_threshold(
    scaled: jax.Array, *, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array
) -> jax.Array:
    """Return the smallest scaled logit that passes top-k, then top-p, then min-p.

    Tokens that tie with the last one kept are also kept.

    Args:
      scaled: f32[R, V], logits over temperature.
      top_k: i32[R], below 1 for off.
      top_p, min_p: f32[R], 1 and 0 for off.

    Returns:
      f32[R].
    """
    key = order_key(scaled)
    highest = scaled.max(axis=1)
    limited = (top_k >= 1) & (top_k < scaled.shape[1])
    nucleus = top_p < 1.0

    def search_k() -> jax.Array:
        found = largest_key(key, jnp.ones((1, 1), jnp.int32), top_k)
        return jnp.where(limited, found, jnp.uint32(0))

    def search_p() -> jax.Array:
        mass = jnp.exp(scaled - highest[:, None])
        mass = jnp.where(key >= by_k[:, None], mass, 0.0)
        found = largest_key(key, mass, top_p * mass.sum(axis=1))
        # No mass reaches a top_p that underflows, but the most likely token always stays.
        return jnp.where(nucleus, jnp.minimum(found, order_key(highest)), jnp.uint32(0))

    everything = jnp.zeros(highest.shape, jnp.uint32)
    with jax.named_scope("top_k"):
        by_k = where_needed(limited.any(), search_k, everything)
    with jax.named_scope("top_p"):
        by_p = where_needed(nucleus.any(), search_p, everything)
    by_min_p = jnp.where(min_p > 0.0, highest + jnp.log(min_p), -jnp.inf)
    return jnp.maximum(from_order_key(jnp.maximum(by_k, by_p)), by_min_p)


def processed_logits(
    logits: jax.Array,
    sampled: jax.Array,
    *,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    any_filter: jax.Array | bool = True,
) -> jax.Array:
    """Return logits of the distribution that `sample` draws from: scaled, and -inf if filtered.

    Rows at temperature 0 are neither scaled nor filtered, because their token is the argmax.

    Args:
      logits: f32[R, V], after penalties and bias.
      sampled: i32[R], the token of each row. It is never filtered: another implementation of
        `sample` may have rounded the threshold differently.
      temperature, top_p, min_p: f32[R].
      top_k: i32[R].
      any_filter: bool[], false if no row has a filter.

    Returns:
      f32[R, V].
    """
    random = temperature > 0
    scaled = logits / jnp.where(random, temperature, 1.0)[:, None]

    def find() -> jax.Array:
        return filter_threshold(scaled, top_k=top_k, top_p=top_p, min_p=min_p)

    lowest = where_needed(any_filter, find, jnp.full(temperature.shape, -jnp.inf, jnp.float32))
    own = jnp.take_along_axis(scaled, sampled[:, None], axis=1)[:, 0]
    lowest = jnp.where(random, jnp.minimum(lowest, own), -jnp.inf)
    return jnp.where(scaled >= lowest[:, None], scaled, -jnp.inf)


def sample(  # noqa: PLR0913
    logits: jax.Array,
    *,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    seed: jax.Array,
    position: jax.Array,
    any_random: jax.Array | bool = True,
    any_filter: jax.Array | bool = True,
    num_rows: jax.Array | None = None,
    drafts: Drafts | None = None,
    implementation: Literal["xla", "cpu"] = "xla",
) -> jax.Array:
    """Sample one token per row: argmax at temperature 0, else Gumbel-max over the filtered logits.

    Args:
      logits: f32[R, V], after penalties and bias.
      temperature, top_p, min_p: f32[R]
      top_k: i32[R].
      seed: u32[R, 2].
      position: i32[R], the absolute position of the sampled token.
      any_random, any_filter: bool[], false if no row needs that work. Filters are not compiled if
        `any_filter` is the constant False.
      num_rows: i32[], a promise that the caller ignores rows from there on.
      drafts: drafts that rows verify by rejection, see `verify`. Such a row's token is its draft
        exactly if the draft is accepted. Rows at temperature 0 skip this, because they sample the
        same token anyway.
      implementation: `cpu` is the C++ kernels, if they are loaded. They draw from the same random
        bits, but logarithms may differ in the last place. They cannot verify: if any row does, XLA
        samples all rows.

    Returns:
      i32[R].
    """
    if drafts is not None:
        drafts = drafts._replace(verified=drafts.verified & (temperature > 0))

    def by_kernel() -> jax.Array:
        count = jnp.full((), logits.shape[0], jnp.int32) if num_rows is None else num_rows
        filters = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
        noise = {"seed": seed, "position": position}
        return cpu_sample(logits, temperature=temperature, num_rows=count, **filters, **noise)

    @jax.named_scope("random")
    def draw() -> jax.Array:
        random = (temperature > 0)[:, None]
        scaled = logits / jnp.where(random, temperature[:, None], 1.0)
        noisy = jnp.where(random, scaled + gumbel(seed, position, logits.shape[1]), scaled)
        if any_filter is not False:
            with jax.named_scope("filter"):
                lowest = threshold(scaled)
            noisy = jnp.where(scaled >= lowest[:, None], noisy, -jnp.inf)

        def choose() -> jax.Array:
            return jnp.argmax(noisy, axis=1).astype(jnp.int32)

        if drafts is None:
            return choose()
        by_rejection = partial(verify, scaled, noisy, drafts, seed, position)
        return jax.lax.cond(drafts.verified.any(), by_rejection, choose)

    def threshold(scaled: jax.Array) -> jax.Array:
        def find() -> jax.Array:
            return filter_threshold(scaled, top_k=top_k, top_p=top_p, min_p=min_p)

        return where_needed(any_filter, find, jnp.full(scaled.shape[:1], -jnp.inf, jnp.float32))

    @jax.named_scope("greedy")
    def greedy() -> jax.Array:
        return jnp.argmax(logits, axis=1).astype(jnp.int32)

    if implementation == "cpu":
        if drafts is None:
            return by_kernel()
        return jax.lax.cond(drafts.verified.any(), draw, by_kernel)
    return jax.lax.cond(any_random, draw, greedy)


def where_needed(
    needed: jax.Array | bool, work: Callable[[], jax.Array], otherwise: jax.Array
) -> jax.Array:
    """Return `work()` if it is needed, else `otherwise`.

    If XLA considers both sides of a condition cheap, it computes both, and it considers sums over a
    vocabulary cheap. It never does so if one side only passes on an operand that is not a constant.
    """
    otherwise = jax.lax.optimization_barrier(otherwise)
    return jax.lax.cond(needed, lambda _: work(), lambda given: given, otherwise)


def token_logprobs(
    logits: jax.Array, token_ids: jax.Array, num_top: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return logprob and rank of one token per row, and the `num_top` most likely tokens.

    The rank is one more than the number of more likely tokens. The most likely token is first.

    Args:
      logits: f32[R, V].
      token_ids: i32[R].
      num_top: the number of tokens.

    Returns:
      (f32[R], i32[R], i32[R, num_top], f32[R, num_top]).
    """
    log_z = jax.nn.logsumexp(logits, axis=1)
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=1)
    rank = 1 + (logits > chosen).sum(axis=1, dtype=jnp.int32)
    top, ids = likeliest(logits, num_top)
    return chosen[:, 0] - log_z, rank, ids, top - log_z[:, None]


def likeliest(logits: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Return `jax.lax.top_k` without a full sort on GPUs: one pass and two small sorts.

    The `count` best tokens are in the `count` chunks with the best maxima. Ties go to the lower
    index in both cases.
    """
    rows, vocab_size = logits.shape
    chunks = -(-vocab_size // CHUNK)
    if chunks <= count:
        top, ids = jax.lax.top_k(logits, count)
        return top, ids.astype(jnp.int32)
    padding = ((0, 0), (0, chunks * CHUNK - vocab_size))
    padded = jnp.pad(logits, padding, constant_values=-jnp.inf)
    _, chosen = jax.lax.top_k(padded.reshape(rows, chunks, CHUNK).max(axis=2), count)
    chosen = jnp.sort(chosen.astype(jnp.int32), axis=1)  # keeps tokens in their order
    within = jnp.arange(CHUNK, dtype=jnp.int32)[None, None]
    ids = (chosen[:, :, None] * CHUNK + within).reshape(rows, -1)
    row = jnp.arange(rows)[:, None]
    some = logits.at[row, ids].get(mode="fill", fill_value=-jnp.inf)
    top, place = jax.lax.top_k(some, count)
    return top, jnp.take_along_axis(ids, place, axis=1)
