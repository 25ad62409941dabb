"""From logits to tokens. Every function works row by row: a row's result depends on that row only.

Nothing here sorts the vocabulary: thresholds are found by bisection over the bits of the floats
(32 passes), which on a CPU is some hundred times cheaper than a sort.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from forge_kernels.sampling.cpu_ffi import cpu_sample
from forge_kernels.sampling.noise import gumbel

IN_PROMPT = 1 << 30  # this bit of a count says that the token stands in the prompt


def apply_penalties(
    logits: jax.Array,
    counts: jax.Array,
    *,
    presence: jax.Array,
    frequency: jax.Array,
    repetition: jax.Array,
) -> jax.Array:
    """Repetition penalty over prompt and output (arXiv:1909.05858), then OpenAI's over the output.

    Args:
      logits: f32[R, V].
      counts: i32[R, V], how often each token stands in the output, plus `IN_PROMPT`.
      presence, frequency, repetition: f32[R]; 0, 0 and 1 change nothing.
    """
    in_output = counts & (IN_PROMPT - 1)
    scale = repetition[:, None]
    repeated = jnp.where(logits > 0, logits / scale, logits * scale)
    logits = jnp.where(counts != 0, repeated, logits)
    logits = logits - frequency[:, None] * in_output.astype(jnp.float32)
    return logits - presence[:, None] * (in_output > 0).astype(jnp.float32)


def suppress(logits: jax.Array, token_ids: jax.Array, active: jax.Array) -> jax.Array:
    """Forbids `token_ids: i32[R, K]` (out of range: none) in rows that are `active: bool[R]`."""
    vocab_size = logits.shape[1]
    ids = jnp.where(active[:, None], token_ids, vocab_size)
    rows = jnp.arange(logits.shape[0])[:, None]
    return logits.at[rows, ids].set(-jnp.inf, mode="drop")


def filter_threshold(
    scaled: jax.Array, *, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array
) -> jax.Array:
    """The smallest scaled logit that top-k, then top-p, then min-p leave standing.

    Tokens that tie with the last one kept are kept too.

    Args:
      scaled: f32[R, V], logits over temperature.
      top_k: i32[R], below 1 for off.
      top_p, min_p: f32[R], 1 and 0 for off.

    Returns:
      f32[R].
    """
    vocab_size = scaled.shape[1]
    key = _order_key(scaled)
    k = jnp.where(top_k < 1, vocab_size, jnp.minimum(top_k, vocab_size))
    highest = scaled.max(axis=1)
    mass = jnp.exp(scaled - highest[:, None])

    by_k = _bisect(lambda t: (key >= t[:, None]).sum(axis=1, dtype=jnp.int32) >= k, k.shape)
    mass = jnp.where(key >= by_k[:, None], mass, 0.0)
    wanted = jnp.where(top_p < 1.0, top_p, 0.0) * mass.sum(axis=1)
    by_p = _bisect(lambda t: jnp.where(key >= t[:, None], mass, 0.0).sum(axis=1) >= wanted, k.shape)
    # A top_p that underflows is met by no mass at all: the likeliest token always stays.
    by_p = jnp.where(top_p < 1.0, jnp.minimum(by_p, _order_key(highest)), jnp.uint32(0))
    by_min_p = jnp.where(min_p > 0.0, highest + jnp.log(min_p), -jnp.inf)
    return jnp.maximum(_from_order_key(jnp.maximum(by_k, by_p)), by_min_p)


def sample(
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
    implementation: Literal["xla", "cpu"] = "xla",
) -> jax.Array:
    """One token per row: the argmax at temperature 0, else Gumbel-max over the filtered logits.

    Args:
      logits: f32[R, V], after penalties and bias.
      temperature, top_p, min_p: f32[R]; top_k: i32[R].
      seed: u32[R, 2]; position: i32[R], the absolute position of the sampled token.
      any_random, any_filter: bool[], false where no row needs that work.
      num_rows: i32[], a promise that rows from there on are not needed.
      implementation: `cpu` is the C++ kernels', where they have been loaded. It draws from the same
        random bits; its logarithms may differ in the last place.

    Returns:
      i32[R].
    """
    if implementation == "cpu":
        count = jnp.full((), logits.shape[0], jnp.int32) if num_rows is None else num_rows
        return cpu_sample(
            logits,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            position=position,
            num_rows=count,
        )
    greedy = jnp.argmax(logits, axis=1).astype(jnp.int32)

    def draw(logits: jax.Array) -> jax.Array:
        scaled = logits / jnp.where(temperature > 0, temperature, 1.0)[:, None]

        def threshold(scaled: jax.Array) -> jax.Array:
            return filter_threshold(scaled, top_k=top_k, top_p=top_p, min_p=min_p)

        def nothing(scaled: jax.Array) -> jax.Array:
            return jnp.full(scaled.shape[:1], -jnp.inf, jnp.float32)

        lowest = jax.lax.cond(any_filter, threshold, nothing, scaled)
        noisy = scaled + gumbel(seed, position, logits.shape[1])
        noisy = jnp.where(scaled >= lowest[:, None], noisy, -jnp.inf)
        drawn = jnp.argmax(noisy, axis=1).astype(jnp.int32)
        return jnp.where(temperature > 0, drawn, greedy)

    return jax.lax.cond(any_random, draw, lambda _: greedy, logits)


def token_logprobs(
    logits: jax.Array, token_ids: jax.Array, num_top: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Logprob of one token per row, and the `num_top` likeliest tokens, best first.

    Args:
      logits: f32[R, V]; token_ids: i32[R].

    Returns:
      (f32[R], i32[R, num_top], f32[R, num_top]).
    """
    log_z = jax.nn.logsumexp(logits, axis=1)
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=1)[:, 0]
    top, ids = jax.lax.top_k(logits, num_top)
    return chosen - log_z, ids.astype(jnp.int32), top - log_z[:, None]


def _order_key(x: jax.Array) -> jax.Array:
    """u32 that compare as the floats do."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31, ~bits, bits | jnp.uint32(0x80000000))


def _from_order_key(key: jax.Array) -> jax.Array:
    bits = jnp.where(key >> 31, key & jnp.uint32(0x7FFFFFFF), ~key)
    x = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(key == 0, -jnp.inf, x)


def _bisect(holds, shape: tuple[int, ...]) -> jax.Array:
    """The largest u32 for which `holds` (true at 0, monotone), row by row."""

    def body(i: jax.Array, found: jax.Array) -> jax.Array:
        candidate = found | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(holds(candidate), candidate, found)

    return jax.lax.fori_loop(0, 32, body, jnp.zeros(shape, jnp.uint32))
