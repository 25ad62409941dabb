"""One call of a model on whole sequences: the served modules over a temporary cache.

Attention computes all scores in float32 (`pattern_attention`), and experts are computed in full, so
the call is differentiable with respect to weights and embeddings.

Letters: B sequences, T tokens of each, d hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp

from forge_jax.models import KV, Leaves, Model
from forge_jax.models.probe import Edit, Probe, new_probe
from forge_jax.step.kv_cache import kv_shape

Taken = dict[str, jax.Array]


def dense_call(
    model: Model,
    leaves: Leaves,
    tokens: jax.Array | None,
    inputs_embeds: jax.Array | None,
    lengths: jax.Array | None,
    taps: tuple[str, ...],
    edit: Mapping[str, Edit],
) -> tuple[jax.Array, Taken]:
    """Return (logits, activations by name) of one sequence or of a batch.

    The call is compiled once per shape. With `edit`, it runs operation by operation, unless the
    caller compiles it, because new functions would compile it again in each call.

    Args:
      model: the model.
      leaves: its weights.
      tokens: i32[T] or i32[B, T], or None.
      inputs_embeds: float[T, d] or float[B, T, d], or None.
      lengths: i32[B], or None.
      taps: patterns of the activations to return.
      edit: functions by pattern.

    Raises:
      ValueError: a pattern matches no activation.
    """
    if edit:
        return _call(model, leaves, tokens, inputs_embeds, lengths, taps, edit)
    return _compiled(model, leaves, tokens, inputs_embeds, lengths, taps)


@partial(jax.jit, static_argnames=("model", "taps"))
def _compiled(
    model: Model,
    leaves: Leaves,
    tokens: jax.Array | None,
    inputs_embeds: jax.Array | None,
    lengths: jax.Array | None,
    taps: tuple[str, ...],
) -> tuple[jax.Array, Taken]:
    return _call(model, leaves, tokens, inputs_embeds, lengths, taps, {})


def _call(
    model: Model,
    leaves: Leaves,
    tokens: jax.Array | None,
    inputs_embeds: jax.Array | None,
    lengths: jax.Array | None,
    taps: tuple[str, ...],
    edit: Mapping[str, Edit],
) -> tuple[jax.Array, Taken]:
    if inputs_embeds is not None:
        lead, rows = inputs_embeds.shape[:-1], inputs_embeds.reshape(-1, inputs_embeds.shape[-1])
        ids = jnp.zeros(lead, jnp.int32)
        if lengths is not None:  # padding may be NaN, and has no gradient
            rows = jnp.where(_in_use(lengths, *lead).reshape(-1, 1), rows, 0.0)
    else:
        assert tokens is not None
        lead, rows, ids = tokens.shape, None, tokens
    probe = new_probe(taps, edit, inputs_embeds=rows, full_attention=True, lead=lead)
    assert probe is not None
    batch = lead if len(lead) == 2 else (1, *lead)
    logits = dense_logits(model, leaves, ids.reshape(batch), lengths, probe)
    return logits.reshape(*lead, -1), probe.finish(model.spec.architecture)


def dense_logits(
    model: Model,
    leaves: Leaves,
    tokens: jax.Array,
    lengths: jax.Array | None,
    probe: Probe,
) -> jax.Array:
    """Return f32[B, T, V]. A row depends on the rows of its sequence up to itself.

    Args:
      model: the model.
      leaves: its weights.
      tokens: i32[B, T]; any ids if the probe has embeddings.
      lengths: i32[B]. Rows from there on are zero. None: all rows are in use.
      probe: a probe with `full_attention`.
    """
    batch, length = tokens.shape
    rows = batch * length
    if lengths is not None:  # padding may have any ids
        tokens = jnp.where(_in_use(lengths, batch, length), tokens, 0)
    row = jnp.arange(rows, dtype=jnp.int32)
    _, hidden = model.forward(
        leaves,
        _empty_kv(model, batch, length),
        tokens.reshape(-1),
        row % length,
        row,  # each sequence has one block, whose slots are its positions
        jnp.arange(batch, dtype=jnp.int32)[:, None],
        jnp.full(batch, length, jnp.int32),
        jnp.arange(batch + 1, dtype=jnp.int32) * length,
        jnp.int32(batch),
        implementation="reference",
        max_q_len=length,
        probe=probe,
    )
    scores = model.logits(leaves, hidden).reshape(batch, length, -1)
    if lengths is None:
        return scores
    return jnp.where(_in_use(lengths, batch, length)[..., None], scores, 0.0)


def _in_use(lengths: jax.Array, batch: int, length: int) -> jax.Array:
    """Return bool[B, T], True for the tokens of the sequences. lengths: i32[B]."""
    return jnp.arange(length)[None] < jnp.asarray(lengths).reshape(batch, 1)


def _empty_kv(model: Model, batch: int, length: int) -> KV:
    """Return a float32 cache, which is differentiable and exact for every dtype of a model."""
    return kv_shape(
        model.spec,
        num_blocks=batch,
        block_size=length,
        dtype=jnp.float32,
        platform=jax.default_backend(),
        num_slots=batch,
    ).empty()
