"""Single steps of a model over a paged KV cache, as the server runs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from forge_jax.errors import ConfigError
from forge_jax.models import KV, Leaves, Model
from forge_jax.models.kv import EIGHT_BITS, first_paged
from forge_jax.models.probe import Edit, Probe, new_probe
from forge_jax.research.inputs import check_rows, check_step, floats, integers, require_leaves
from forge_jax.research.loaded import LoadedModel
from forge_jax.step.kv_cache import kv_shape
from forge_kernels.attention import Implementation
from forge_kernels.embed import embed

Hidden = tuple[KV, jax.Array]
HiddenAndStream = tuple[KV, jax.Array, tuple[jax.Array, ...]]
HiddenAndTaps = tuple[KV, jax.Array, dict[str, jax.Array]]


def new_kv(
    model: LoadedModel | Model,
    num_blocks: int,
    block_size: int,
    dtype: DTypeLike | None = None,
    *,
    num_slots: int = 1,
) -> KV:
    """Return an empty KV cache: one array [num_blocks, 2, K, block_size, D] per layer.

    Layers may differ in K and D. A layer with per-sequence state has a dict of arrays
    [num_slots + 1, ...] instead, and a layer that shares another layer's cache has `()`.

    Args:
      model: the model, which defines the number of layers, K (key/value heads) and D (head size).
      num_blocks: blocks per layer.
      block_size: tokens per block.
      dtype: float32, the model's dtype (default), "fp8" or "int8". On CPU, 16-bit types are stored
        as their bits in uint16 arrays. An 8-bit cache is one `QuantizedKV` per layer: the elements,
        and one scale per token and head.
      num_slots: maximum number of sequences of a call, for models whose layers have state.

    Raises:
      ValueError: the dtype is not one of these, the model does not support it, or a size is not
        positive.
    """
    built = _built(model)
    for name, count in (
        ("num_blocks", num_blocks),
        ("block_size", block_size),
        ("num_slots", num_slots),
    ):
        if count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")
    try:
        return kv_shape(
            built.spec,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=_cache_dtype(built, dtype),
            platform=jax.default_backend(),
            num_slots=num_slots,
        ).empty()
    except ConfigError as error:  # its remedy is a flag
        raise ValueError(
            f"dtype: {built.spec.architecture} does not support a KV cache of {dtype}, because the "
            "cache has its own layout: use the model's dtype or float32"
        ) from error


def _cache_dtype(model: Model, dtype: DTypeLike | None) -> np.dtype:
    """Return the type of elements for `new_kv`.

    Raises:
      ValueError: no such type, or not one of a cache of this model.
    """
    wanted = EIGHT_BITS.get(dtype, dtype) if isinstance(dtype, str) else dtype
    try:
        found = jnp.dtype(model.dtype if wanted is None else wanted)
    except TypeError:
        found = None
    if found not in (model.dtype, jnp.float32, *EIGHT_BITS.values()) or found is None:
        plain = ", ".join(dict.fromkeys([str(model.dtype), "float32"]))
        raise ValueError(
            f"the KV cache of a {model.dtype} model must be {plain}, {' or '.join(EIGHT_BITS)}, "
            f"got {dtype if found is None else found}"
        )
    return found


@overload
def forward(
    model: LoadedModel | Model,
    leaves: Leaves,
    kv: KV,
    tokens: jax.Array | None,
    positions: jax.Array,
    slot_mapping: jax.Array,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: ArrayLike,
    *,
    inputs_embeds: jax.Array | None = None,
    implementation: Implementation = "auto",
    max_q_len: int | None = None,
    uniform: bool = False,
    state_slots: jax.Array | None = None,
    return_hidden_states: Literal[False] = False,
    taps: None = None,
    edit: Mapping[str, Edit] | None = None,
    checks: bool = False,
) -> Hidden: ...


@overload
def forward(
    model: LoadedModel | Model,
    leaves: Leaves,
    kv: KV,
    tokens: jax.Array | None,
    positions: jax.Array,
    slot_mapping: jax.Array,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: ArrayLike,
    *,
    inputs_embeds: jax.Array | None = None,
    implementation: Implementation = "auto",
    max_q_len: int | None = None,
    uniform: bool = False,
    state_slots: jax.Array | None = None,
    return_hidden_states: Literal[True],
    taps: None = None,
    edit: Mapping[str, Edit] | None = None,
    checks: bool = False,
) -> HiddenAndStream: ...


@overload
def forward(
    model: LoadedModel | Model,
    leaves: Leaves,
    kv: KV,
    tokens: jax.Array | None,
    positions: jax.Array,
    slot_mapping: jax.Array,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: ArrayLike,
    *,
    inputs_embeds: jax.Array | None = None,
    implementation: Implementation = "auto",
    max_q_len: int | None = None,
    uniform: bool = False,
    state_slots: jax.Array | None = None,
    return_hidden_states: Literal[False] = False,
    taps: Sequence[str],
    edit: Mapping[str, Edit] | None = None,
    checks: bool = False,
) -> HiddenAndTaps: ...


def forward(  # noqa: PLR0913
    model: LoadedModel | Model,
    leaves: Leaves,
    kv: KV,
    tokens: jax.Array | None,
    positions: jax.Array,
    slot_mapping: jax.Array,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: ArrayLike,
    *,
    inputs_embeds: jax.Array | None = None,
    implementation: Implementation = "auto",
    max_q_len: int | None = None,
    uniform: bool = False,
    state_slots: jax.Array | None = None,
    return_hidden_states: bool = False,
    taps: Sequence[str] | None = None,
    edit: Mapping[str, Edit] | None = None,
    checks: bool = False,
) -> Hidden | HiddenAndStream | HiddenAndTaps:
    """Run one step of the model and return (kv, hidden).

    Rows of several sequences are concatenated. A decode and a prompt chunk differ only in
    `cu_q_lens`.

    Args:
      model: the model, as `load` returns it. Its own weights are ignored in favor of `leaves`.
      leaves: the weights, for example `LoadedModel.leaves`.
      kv: the KV cache, as `new_kv` returns it.
      tokens: i32[T], the new tokens, or None with `inputs_embeds`.
      positions: i32[T], the position of each token in its sequence.
      slot_mapping: i32[T], `block * block_size + offset` of each token. `num_blocks * block_size`
        writes nothing.
      block_tables: i32[S, max_blocks], the blocks of each sequence, enough for `kv_lens`.
      kv_lens: i32[S], tokens of each sequence, including the new ones.
      cu_q_lens: i32[S + 1], the offset of each sequence's first token, then the total.
      num_seqs: i32[], the number of sequences, at most S.
      inputs_embeds: float[T, d] in place of tokens, as `LoadedModel.embed` returns.
      implementation: the attention kernel. "auto" selects one for the platform. All have gradients.
      max_q_len: upper bound of the new tokens of a sequence. Default: T.
      uniform: compute every row of attention in the same way, as `--deterministic` does.
      state_slots: i32[S], the slot of each sequence in layers with state. Default: its index. Only
        for models with such layers.
      return_hidden_states: also return the residual stream. Excludes `taps`.
      taps: names of activations to return, or patterns such as "layers.*.attn.pattern". See
        `LoadedModel.tap_names`.
      edit: functions that replace activations, by name or pattern.
      checks: in a compiled function, check the values of the arguments with
        `jax.experimental.checkify`. Otherwise, only known values are checked.

    Returns:
      (kv, hidden): hidden is dtype[T, d] after the final norm. With `return_hidden_states`,
      (kv, hidden, stream): stream is the embedding and each layer's output, dtype[T, d] each. With
      `taps`, (kv, hidden, activations by name): activations have the axes [T, ...]. Patterns of
      attention are f32[T, H, C] for the C tokens of a block table.

    Raises:
      ValueError: an argument is wrong, or a name in `taps` or `edit` does not exist.
      NotImplementedError: `kv` is not float32, and a gradient was requested with respect to `kv` or
        through layers that share a cache. Also if `taps` or `edit` name a pattern of attention.
    """
    built = _built(model)
    if inputs_embeds is not None:
        inputs_embeds = floats("inputs_embeds", inputs_embeds)
    arrays: dict[str, Any] = {
        "tokens": tokens,
        "inputs_embeds": inputs_embeds,
        "positions": positions,
        "slot_mapping": slot_mapping,
        "block_tables": block_tables,
        "kv_lens": kv_lens,
        "cu_q_lens": cu_q_lens,
        "num_seqs": num_seqs,
        "state_slots": state_slots,
    }
    check_step(built, leaves, kv, arrays, least=0, most=max_q_len, checks=checks)
    probe = _step_probe(taps, edit, inputs_embeds, return_hidden_states=return_hidden_states)
    step = built.forward(
        leaves,
        kv,
        _no_tokens(positions) if tokens is None else tokens,
        positions,
        slot_mapping,
        block_tables,
        kv_lens,
        cu_q_lens,
        integers("num_seqs", num_seqs),
        implementation=implementation,
        max_q_len=max_q_len,
        uniform=uniform,
        return_hidden_states=return_hidden_states,
        state_slots=state_slots,
        probe=probe,
    )
    taken = {} if probe is None else probe.finish(built.spec.architecture)
    return step if taps is None else (*step, taken)


def logits(model: LoadedModel | Model, leaves: Leaves, hidden: jax.Array) -> jax.Array:
    """Return logits f32[B, V] for hidden states dtype[B, d] after the final norm.

    Raises:
      ValueError: `hidden` or `leaves` has another shape.
    """
    built = _built(model)
    require_leaves(built, leaves)
    check_rows(built, "hidden", hidden, ("B",))
    return built.logits(leaves, hidden)


def decode_step(
    model: LoadedModel | Model,
    leaves: Leaves,
    kv: KV,
    tokens: jax.Array | None,
    cu_q_lens: jax.Array,
    kv_lens: jax.Array,
    block_tables: jax.Array,
    *,
    inputs_embeds: jax.Array | None = None,
    implementation: Implementation = "auto",
    checks: bool = False,
) -> tuple[KV, jax.Array, jax.Array]:
    """Run one greedy step of S sequences and return each one's next token.

    A sequence's new tokens may be one token (decode), a whole prompt, or a chunk of one. Positions
    and cache slots follow from the lengths. Pure and jittable: `jax.jit(partial(decode_step,
    model))`.

    Args:
      model: the architecture. Its own weights are ignored in favor of `leaves`.
      leaves: the weights, for example `LoadedModel.leaves`.
      kv: the KV cache, as `new_kv` returns it.
      tokens: i32[T], the sequences' new tokens, concatenated. T may exceed their number (padding).
        None with `inputs_embeds`.
      cu_q_lens: i32[S + 1], the offset of each sequence's first token. The last entry is at most T.
      kv_lens: i32[S], tokens of each sequence, including the new ones.
      block_tables: i32[S, max_blocks], the KV cache blocks of each sequence, enough for `kv_lens`.
      inputs_embeds: float[T, d] in place of tokens, as `LoadedModel.embed` returns.
      implementation: the attention kernel; "auto" selects one for the platform.
      checks: in a compiled function, check the values of the arguments with
        `jax.experimental.checkify`. Otherwise, only known values are checked.

    Returns:
      (kv, next tokens i32[S], logits f32[S, V] of each sequence's last token).

    Raises:
      ValueError: an argument is wrong.
    """
    built = _built(model)
    if inputs_embeds is not None:
        inputs_embeds = floats("inputs_embeds", inputs_embeds)
    arrays: dict[str, Any] = {
        "tokens": tokens,
        "inputs_embeds": inputs_embeds,
        "cu_q_lens": cu_q_lens,
        "kv_lens": kv_lens,
        "block_tables": block_tables,
    }
    check_step(built, leaves, kv, arrays, least=1, checks=checks)
    probe = new_probe(inputs_embeds=inputs_embeds)
    given = inputs_embeds if tokens is None else tokens
    assert given is not None
    rows, seqs = given.shape[0], kv_lens.shape[0]
    blocks, _, _, block_size, _ = first_paged(kv).shape
    row = jnp.arange(rows)  # pyright: ignore[reportUnknownMemberType]
    seq = jnp.minimum(jnp.sum(cu_q_lens[None, 1:] <= row[:, None], axis=1), seqs - 1)
    positions = kv_lens[seq] - cu_q_lens[seq + 1] + row
    slots = block_tables[seq, positions // block_size] * block_size + positions % block_size
    exists = row < cu_q_lens[-1]
    kv, hidden = built.forward(
        leaves,
        kv,
        _no_tokens(positions) if tokens is None else tokens,
        jnp.where(exists, positions, 0),
        jnp.where(exists, slots, blocks * block_size),
        block_tables,
        kv_lens,
        cu_q_lens,
        jnp.int32(seqs),
        implementation=implementation,
        probe=probe,
    )
    if probe is not None:
        probe.finish(built.spec.architecture)
    scores = built.logits(leaves, embed(hidden, cu_q_lens[1:] - 1))
    return kv, jnp.argmax(scores, axis=-1).astype(jnp.int32), scores


def _step_probe(
    taps: Sequence[str] | None,
    edit: Mapping[str, Edit] | None,
    inputs_embeds: jax.Array | None,
    *,
    return_hidden_states: bool,
) -> Probe | None:
    """Return the probe of a step, or None.

    Raises:
      ValueError: there are taps and hidden states, or as in `new_probe`.
    """
    if return_hidden_states and taps is not None:
        raise ValueError(
            "return_hidden_states cannot be used with taps: add 'embed' and 'layers.*.resid' to "
            "taps instead"
        )
    return new_probe(taps, edit, inputs_embeds=inputs_embeds)


def _no_tokens(positions: jax.Array) -> jax.Array:
    """Return token ids that the model does not read, i32[T]."""
    return jnp.zeros_like(positions)  # pyright: ignore[reportUnknownMemberType]


def _built(model: LoadedModel | Model) -> Model:
    return model.model if isinstance(model, LoadedModel) else model
