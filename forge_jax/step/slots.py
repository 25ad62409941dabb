"""Device state of the running sequences: one row per slot, from admission to finish.

A sequence keeps its slot while it runs, independent of the order of rows in a step. Admission
writes a whole row, so no cleanup is needed when a sequence leaves.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from forge_jax.models.steering import SteeringShape
from forge_jax.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from forge_jax.schedule.plan import Admission
from forge_kernels.sampling.api import IN_PROMPT

ADMISSIONS = 8  # rows per `admit`
MIN_TEMPERATURE = 1e-5  # a smaller value samples the same, but overflows the scaled logits
PADDING = 2**31 - 1  # an out-of-range index: a scatter with mode="drop" skips it


class Column(enum.IntEnum):
    """Columns of `Slots.params`. Float columns hold the bits of a float32."""

    SEED_LOW = 0
    SEED_HIGH = 1
    TEMPERATURE = 2  # float
    TOP_P = 3  # float
    MIN_P = 4  # float
    PRESENCE = 5  # float
    FREQUENCY = 6  # float
    REPETITION = 7  # float
    TOP_K = 8
    MIN_TOKENS = 9
    BIASED = 10
    PENALIZED = 11
    PROCESSED = 12  # 1 if logprobs are of the processed distribution
    STOP_IDS = 13  # and the following columns


MAX_END_TOKENS = 16  # per model
MAX_STOP_IDS = MAX_STOP_TOKEN_IDS + MAX_END_TOKENS
NUM_COLUMNS = Column.STOP_IDS + MAX_STOP_IDS


class Slots(NamedTuple):
    last_token: jax.Array  # i32[S]
    block_tables: jax.Array  # i32[S, max_blocks]
    params: jax.Array  # i32[S, NUM_COLUMNS]

    bias_ids: jax.Array  # i32[S, MAX_LOGIT_BIAS], only read if BIASED
    bias: jax.Array  # f32[S, MAX_LOGIT_BIAS]

    counts: jax.Array  # i32[S, V]: IN_PROMPT + count in the output, only read if PENALIZED
    lora: jax.Array | None = None  # i32[S], the adapter's slot, None if LoRA is off
    steering: jax.Array | None = None  # i32[S, columns], see `SteeringShape`, None if it is off


def slots_shape(
    num_slots: int,
    max_blocks: int,
    vocab_size: int,
    *,
    lora: bool = False,
    steering: SteeringShape | None = None,
) -> Slots:
    """Return the shapes of `Slots` as `ShapeDtypeStruct`s.

    `lora` adds the adapters' column, and `steering` the columns of steering vectors.
    """

    def i32(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    def f32(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    return Slots(
        last_token=i32(num_slots),
        block_tables=i32(num_slots, max_blocks),
        params=i32(num_slots, NUM_COLUMNS),
        bias_ids=i32(num_slots, MAX_LOGIT_BIAS),
        bias=f32(num_slots, MAX_LOGIT_BIAS),
        counts=i32(num_slots, vocab_size),
        lora=i32(num_slots) if lora else None,
        steering=None if steering is None else i32(num_slots, steering.columns),
    )


def admission_width(
    max_blocks: int, *, lora: bool = False, steering: SteeringShape | None = None
) -> int:
    return 1 + NUM_COLUMNS + max_blocks + (0 if steering is None else steering.columns) + lora


def pack_admissions(
    admissions: tuple[Admission, ...],
    max_blocks: int,
    *,
    lora: bool = False,
    steering: SteeringShape | None = None,
) -> np.ndarray:
    """Pack at most `ADMISSIONS` rows as i32[ADMISSIONS, 1 + NUM_COLUMNS + max_blocks].

    `steering` adds its columns, and `lora` one column after them.
    """
    assert len(admissions) <= ADMISSIONS
    width = admission_width(max_blocks, lora=lora, steering=steering)
    packed = np.zeros((ADMISSIONS, width), np.int32)
    packed[:, 0] = PADDING
    for row, admission in zip(packed, admissions, strict=False):
        p = admission.params
        row[0] = admission.slot
        columns = row[1 : 1 + NUM_COLUMNS]
        columns[:2] = np.array([admission.seed], np.uint64).view(np.int32)
        columns[Column.TEMPERATURE : Column.TOP_K] = np.array(
            [
                max(p.temperature, MIN_TEMPERATURE) if p.temperature else 0.0,
                p.top_p,
                p.min_p,
                p.presence_penalty,
                p.frequency_penalty,
                p.repetition_penalty,
            ],
            np.float32,
        ).view(np.int32)
        columns[Column.TOP_K] = max(p.top_k, 0)
        columns[Column.MIN_TOKENS] = p.held_tokens
        columns[Column.BIASED] = bool(p.logit_bias)
        columns[Column.PENALIZED] = p.penalized
        columns[Column.PROCESSED] = p.processed
        columns[Column.STOP_IDS :] = PADDING
        stop_ids = admission.stop_ids
        columns[Column.STOP_IDS : Column.STOP_IDS + len(stop_ids)] = stop_ids
        table = admission.block_table
        row[1 + NUM_COLUMNS : 1 + NUM_COLUMNS + len(table)] = table
        assert lora or not admission.lora, f"{admission.seq_key}: no room for an adapter"
        if lora:
            row[-1] = admission.lora
        vectors = p.steered_by
        assert steering or not vectors, f"{admission.seq_key}: no steering vectors are loaded"
        if steering is not None:
            first = 1 + NUM_COLUMNS + max_blocks
            row[first : first + steering.columns] = steering.row(vectors)
    return packed


def admit(slots: Slots, packed: jax.Array) -> Slots:
    """Write the rows of `packed` (see `pack_admissions`) to their slots. Donates `slots`."""
    index = packed[:, 0]

    def put(array: jax.Array, rows: jax.Array) -> jax.Array:
        return array.at[index].set(rows, mode="drop", unique_indices=True)

    params = packed[:, 1 : 1 + NUM_COLUMNS]
    tables = packed[:, 1 + NUM_COLUMNS :]
    if slots.lora is not None:
        tables, lora = tables[:, :-1], tables[:, -1]
        slots = slots._replace(lora=put(slots.lora, lora))
    if slots.steering is not None:
        max_blocks = slots.block_tables.shape[1]
        tables, rows = tables[:, :max_blocks], tables[:, max_blocks:]
        slots = slots._replace(steering=put(slots.steering, rows))
    return slots._replace(
        params=put(slots.params, params),
        block_tables=put(slots.block_tables, tables),
    )


def pack_history(admission: Admission, vocab_size: int) -> np.ndarray:
    """Pack the data that only penalties and logit_bias need: i32[1 + 2 * MAX_LOGIT_BIAS + V].

    The host counts the tokens, because those of a prefix cache hit never pass through a step.
    """
    packed = np.zeros(1 + 2 * MAX_LOGIT_BIAS + vocab_size, np.int32)
    packed[0] = admission.slot
    ids, values = np.split(packed[1 : 1 + 2 * MAX_LOGIT_BIAS], 2)
    bias = admission.params.logit_bias
    ids[:] = PADDING
    ids[: len(bias)] = list(bias)
    values[: len(bias)] = np.array(list(bias.values()), np.float32).view(np.int32)
    counts = packed[1 + 2 * MAX_LOGIT_BIAS :]
    tokens = np.asarray(admission.tokens, np.int64)
    counts[:] = np.bincount(tokens[admission.prompt_len :], minlength=vocab_size)
    counts[tokens[: admission.prompt_len]] += IN_PROMPT
    return packed


def set_history(slots: Slots, packed: jax.Array) -> Slots:
    """Write one slot's bias and counts (see `pack_history`). Donates `slots`."""
    slot = packed[0]
    ids = packed[1 : 1 + MAX_LOGIT_BIAS]
    values = packed[1 + MAX_LOGIT_BIAS : 1 + 2 * MAX_LOGIT_BIAS]
    counts = packed[1 + 2 * MAX_LOGIT_BIAS :]

    def put(array: jax.Array, row: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(array, row[None], (slot, jnp.int32(0)))

    return slots._replace(
        bias_ids=put(slots.bias_ids, ids),
        bias=put(slots.bias, jax.lax.bitcast_convert_type(values, jnp.float32)),
        counts=put(slots.counts, counts),
    )


def float_column(params: jax.Array, column: Column) -> jax.Array:
    """Return a float column: `params: i32[..., NUM_COLUMNS]` -> f32[...]."""
    return jax.lax.bitcast_convert_type(params[..., column], jnp.float32)
