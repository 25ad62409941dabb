"""The serving step: `step(leaves, kv*, slots*, meta, masks) -> (kv, slots, out)`; `*` is donated.

Pure, built once per `StepShape`, and compiled before the first request. Each sequence's data is in
its slot, and the data of this step is in `meta`. The last token that a slot sampled is fed back on
the device. The host therefore dispatches step t + 1 without the value of token t.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from forge_jax.config import Verification
from forge_jax.models.kv import KV, first_paged
from forge_jax.models.lora import Lora
from forge_jax.models.probe import Probe
from forge_jax.models.steering import SteeringShape
from forge_jax.sampling_params import MAX_LOGPROBS
from forge_jax.step import inputs as meta_bits
from forge_jax.step.draft_probs import Proposed
from forge_jax.step.inputs import StepInputs, StepShape
from forge_jax.step.slots import PADDING, Column, Slots, float_column
from forge_kernels import sampling
from forge_kernels.attention import Implementation
from forge_kernels.embed import embed

if TYPE_CHECKING:
    from forge_jax.models.decoder import Model

Sampler = Literal["xla", "cpu"]

# Flags of steps that change logits before the temperature.
CHANGE = meta_bits.BIAS | meta_bits.PENALTIES | meta_bits.MIN_TOKENS | meta_bits.MASKS

# Rows whose processed logits a CPU computes at once. This takes several arrays of [rows, V].
ROWS_AT_ONCE = 8


class Pooled(NamedTuple):
    """The additional results of a step with `StepShape.pools`."""

    sums: jax.Array  # f32[num_slots, d], running sum of each slot, donated
    row_sums: jax.Array  # f32[R, d], this sum at the row's token
    rows: jax.Array  # f32[R, d], the row's hidden state


class StepOut(NamedTuple):
    """The results of a step. The host always reads `packed`, and the rest only if requested."""

    # i32[2R + S]: sampled tokens, faults (0 or 1), accepted drafts per seq
    packed: jax.Array
    logprob: jax.Array  # f32[R], of the row's target, or of its sampled token
    rank: jax.Array  # i32[R], of the same token
    top_ids: jax.Array  # i32[R, 20]
    top_logprobs: jax.Array  # f32[R, 20]
    activations: tuple[jax.Array, ...] = ()  # dtype[T, ...] of each name


def make_step(
    model: Model,
    shape: StepShape,
    block_size: int,
    *,
    implementation: Implementation = "auto",
    sampler: Sampler = "xla",
    verification: Verification = "coupled",
    uniform: bool = False,
    steering: SteeringShape | None = None,
    activations: tuple[str, ...] = (),
) -> Callable[..., Any]:
    """Return the step function of one shape. Jit it with `donate_argnums=(1, 2)`.

    If the slots have adapters, their stacks follow the weights in `leaves`. The stack of steering
    vectors is the last leaf.

    If `model` is a stage other than the last, the step returns `(kv, slots, stream)`. `stream`,
    dtype[T, d], is the last argument of the next stage's step.

    Args:
      implementation: the attention implementation.
      sampler: the sampling implementation.
      verification: how drafts are verified. For rejection, the step takes the draft model's
        distributions as one more argument. If that is missing, draft tokens (found in text) have
        probability 1.
      uniform: compute every row in the same way.
      steering: the steering vectors that the slots select. None: steering is off.
      activations: names of the activations to return.
    """

    def step(
        leaves: tuple[jax.Array, ...],
        kv: KV,
        slots: Slots,
        packed: jax.Array,  # i32[shape.width]
        masks: jax.Array,  # i32[R, mask_width(V)], read only if the MASKS flag is set
        proposed: Proposed | None = None,
        sums: jax.Array | None = None,  # f32[num_slots, d]*, only if the shape pools
        stream: jax.Array | None = None,  # dtype[T, d], from the stage before
    ) -> Any:
        m: StepInputs = shape.split(packed)
        with jax.named_scope("inputs"):
            slots = _take_blocks(slots, m)
            batch = _batch(shape, m, slots, block_size, first_paged(kv).shape[0] * block_size)
            leaves, probe = _split_steering(leaves, slots, shape, m, steering, activations)
            leaves, lora = _split_adapters(leaves, slots, batch, len(model.leaves))
        kv, hidden = model.forward(
            leaves,
            kv,
            batch.tokens,
            batch.positions,
            batch.slot_mapping,
            batch.tables,
            batch.kv_lens,
            m.cu_q_lens,
            m.header[0],
            implementation=implementation,
            max_q_len=shape.max_q_len,
            uniform=uniform,
            lora=lora,
            state_slots=m.slot,
            probe=probe,
            skip_padding=True,
            stream=stream,
        )
        if model.stage is not None and not model.stage.is_last:
            return kv, slots, hidden
        pooled = None if sums is None else _pool(shape, m, hidden, sums)
        hidden = jax.named_scope("rows")(embed)(hidden, m.row_token)
        rows = model.logits(leaves, hidden, m.header[2])  # f32[R, V]
        drafts = _drafts(shape, m, batch.tokens, proposed, verification)
        slots, out = _sample_rows(shape, slots, m, rows, masks, batch, sampler, drafts)
        out = _with_activations(out, probe, model, activations)
        return (kv, slots, out) if pooled is None else (kv, slots, out, pooled)

    step.__name__ = shape.name.replace("[", "_").replace("]", "")
    return step


def make_take_tokens(shape: StepShape) -> Callable[[Slots, jax.Array, jax.Array], Slots]:
    """Return the function by which the first of several stages feeds sampled tokens back.

    Its arguments are the slots, which it returns with the last tokens of sequences that sampled,
    the step's input, and its `StepOut.packed`.
    """

    def take_tokens(slots: Slots, packed: jax.Array, out: jax.Array) -> Slots:
        sampled, accepted = out[: shape.num_rows], out[2 * shape.num_rows :]
        return slots._replace(
            last_token=_last_tokens(shape, slots, shape.split(packed), sampled, accepted)
        )

    return take_tokens


class _Batch(NamedTuple):
    """The tokens of a step and their cache slots."""

    tokens: jax.Array  # i32[T]
    positions: jax.Array  # i32[T]
    slot_mapping: jax.Array  # i32[T]
    slot: jax.Array  # i32[T]
    tables: jax.Array  # i32[S, max_blocks]
    kv_lens: jax.Array  # i32[S]


def _take_blocks(slots: Slots, m: StepInputs) -> Slots:
    """Write the step's new blocks to the block tables."""
    tables = slots.block_tables
    flat = tables.reshape(-1).at[m.table_index]
    flat = flat.set(m.table_block, mode="drop", unique_indices=True)
    return slots._replace(block_tables=flat.reshape(tables.shape))


def _batch(shape: StepShape, m: StepInputs, slots: Slots, block_size: int, num_kv: int) -> _Batch:
    """Find each token, its position and its index among the cache's `num_kv` token slots."""
    tables = slots.block_tables[m.slot]  # [S, max_blocks]
    kv_lens = m.start + m.cu_q_lens[1:] - m.cu_q_lens[:-1]
    valid = jnp.arange(shape.num_tokens) < m.header[1]
    seq = jnp.minimum(m.token_seq, shape.num_seqs - 1)
    slot = m.slot[seq]
    tokens = jnp.where(m.tokens < 0, slots.last_token[slot], m.tokens)
    positions = m.start[seq] + jnp.arange(shape.num_tokens) - m.cu_q_lens[seq]
    positions = jnp.where(valid, positions, 0)
    blocks = tables[seq, positions // block_size]
    slot_mapping = jnp.where(valid, blocks * block_size + positions % block_size, num_kv)
    # Without the barrier, XLA:GPU recomputes the slots from the tables in each layer's write.
    slot_mapping = jax.lax.optimization_barrier(slot_mapping)
    return _Batch(tokens, positions, slot_mapping, slot, tables, kv_lens)


def _with_taps(probe: Probe | None, activations: tuple[str, ...]) -> Probe | None:
    """Return the probe that also takes activations; None if there is nothing to do."""
    return replace(probe or Probe(), taps=activations) if activations else probe


def _with_activations(
    out: StepOut, probe: Probe | None, model: Model, activations: tuple[str, ...]
) -> StepOut:
    taken = {} if probe is None else probe.finish(model.spec.architecture)
    return out._replace(activations=tuple(taken[name] for name in activations))


def _split_steering(
    leaves: tuple[jax.Array, ...],
    slots: Slots,
    shape: StepShape,
    m: StepInputs,
    steering: SteeringShape | None,
    activations: tuple[str, ...],
) -> tuple[tuple[jax.Array, ...], Probe | None]:
    """Return the other leaves, and the probe that steers and takes activations, if any."""
    if steering is None or slots.steering is None:
        return leaves, _with_taps(None, activations)
    seq = jnp.minimum(m.token_seq, shape.num_seqs - 1)
    probe = steering.probe(leaves[-1], slots.steering[m.slot], seq)
    return leaves[:-1], _with_taps(probe, activations)


def _split_adapters(
    leaves: tuple[jax.Array, ...], slots: Slots, batch: _Batch, num_weights: int
) -> tuple[tuple[jax.Array, ...], Lora | None]:
    if slots.lora is None:
        return leaves, None
    return leaves[:num_weights], Lora(leaves[num_weights:], slots.lora[batch.slot])


@jax.named_scope("pool")
def _pool(
    shape: StepShape,
    m: StepInputs,
    hidden: jax.Array,  # dtype[T, d]
    sums: jax.Array,  # f32[num_slots, d]
) -> Pooled:
    """Add each sequence's hidden states to the sum of its earlier chunks.

    Tokens are added one by one, so the bits do not depend on how a prompt was cut. Rows without a
    sequence may contain anything, so a sequence's start value is selected, not multiplied.
    """
    seq = jnp.minimum(m.token_seq, shape.num_seqs - 1)
    begins = jnp.arange(shape.num_tokens) == m.cu_q_lens[seq]
    # Otherwise the norm's product and a sum may be fused into one operation, with one rounding.
    values = jax.lax.optimization_barrier(hidden.astype(jnp.float32))
    before = jnp.where((m.start[seq] > 0)[:, None], sums[m.slot[seq]], 0.0)

    def add(total: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        value, earlier, first = token
        total = jnp.where(first, earlier, total) + value
        return total, total

    zero = jnp.zeros(hidden.shape[1], jnp.float32)
    _, totals = jax.lax.scan(add, zero, (values, before, begins), unroll=16)
    runs = jnp.arange(shape.num_seqs) < m.header[0]
    last = jnp.maximum(m.cu_q_lens[1:] - 1, 0)
    to = jnp.where(runs, m.slot, PADDING)
    sums = sums.at[to].set(totals[last], mode="drop", unique_indices=True)
    return Pooled(sums, totals[m.row_token], hidden[m.row_token].astype(jnp.float32))


class _Rows(NamedTuple):
    """The rows whose logits are computed. Arrays are [R]."""

    valid: jax.Array  # bool
    seq: jax.Array
    slot: jax.Array
    in_seq: jax.Array  # index among its sequence's rows


@jax.named_scope("sample")
def _sample_rows(
    shape: StepShape,
    slots: Slots,
    m: StepInputs,
    logits: jax.Array,  # f32[R, V]
    masks: jax.Array,  # i32[R, mask_width(V)]
    batch: _Batch,
    sampler: Sampler,
    drafts: sampling.Drafts | None,  # for verification by rejection
) -> tuple[Slots, StepOut]:
    """Sample a token per row, count accepted drafts, and compute logprobs if any row needs them."""
    seq = jnp.minimum(m.row_seq, shape.num_seqs - 1)
    in_seq = jnp.arange(shape.num_rows) - m.cu_rows[seq]
    rows = _Rows(m.row_seq < shape.num_seqs, seq, m.slot[seq], in_seq)
    with jax.named_scope("fault"):
        fault = rows.valid & ~jnp.isfinite(logits).all(axis=1)
    given = _Given(shape, slots, m, batch, rows, logits, masks)
    sampled = _sample(given, sampler, drafts)
    sampled = jnp.where(rows.valid & ~fault, sampled, 0)
    scores = _logprobs(given, sampled, sampler)
    # The scores read the counts that `_feed_back` updates in place.
    sampled, scores = jax.lax.optimization_barrier((sampled, scores))
    accepted = _count_accepted(shape, m, batch, rows, sampled)
    slots = _feed_back(shape, slots, m, rows, sampled, accepted)
    packed = jnp.concatenate([sampled, fault.astype(jnp.int32), accepted])
    return slots, StepOut(packed, *scores)


class _Given(NamedTuple):
    """Everything that the distributions of a step's rows follow from."""

    shape: StepShape
    slots: Slots
    m: StepInputs
    batch: _Batch
    rows: _Rows
    logits: jax.Array  # f32[R, V]
    masks: jax.Array  # i32[R, mask_width(V)]

    def part(self, first: jax.Array, size: int) -> _Given:
        """Return `size` rows, from row `first` on."""
        m = self.m
        row_token, row_seq, row_target, rows, logits, masks = jax.tree.map(
            lambda x: _part(x, first, size),
            (m.row_token, m.row_seq, m.row_target, self.rows, self.logits, self.masks),
        )
        m = m._replace(row_token=row_token, row_seq=row_seq, row_target=row_target)
        return self._replace(m=m, rows=rows, logits=logits, masks=masks)

    @property
    def params(self) -> jax.Array:  # i32[R, NUM_COLUMNS]
        return self.slots.params[self.rows.slot]

    def filters(self) -> dict[str, jax.Array]:
        """Return temperature and filters of each row, as arguments of `sampling`."""
        params = self.params
        return {
            "temperature": float_column(params, Column.TEMPERATURE),
            "top_k": params[:, Column.TOP_K],
            "top_p": float_column(params, Column.TOP_P),
            "min_p": float_column(params, Column.MIN_P),
        }

    def changed(self) -> jax.Array:
        """Return the logits after bias, penalties, min_tokens and masks: f32[R, V]."""
        m, rows, flags = self.m, self.rows, self.m.header[3]
        # Drafts before a row are output if they are accepted. Scored tokens belong to the prompt.
        num_before = jnp.where(m.scoring[rows.seq] > 0, 0, rows.in_seq)
        num_output = m.num_output[rows.seq] + num_before
        before = _drafts_before(self.shape, m, self.batch.tokens, num_before)
        return jax.lax.cond(
            _has(flags, CHANGE),
            lambda: _process(
                self.slots,
                self.params,
                rows.slot,
                num_output,
                before,
                self.logits,
                self.masks,
                flags,
            ),
            lambda: self.logits,
        )


def _sample(given: _Given, sampler: Sampler, drafts: sampling.Drafts | None) -> jax.Array:  # i32[R]
    m, logits, params = given.m, given.logits, given.params
    flags = m.header[3]
    sample = partial(
        sampling.sample,
        **given.filters(),
        seed=params[:, :2].view(jnp.uint32),
        position=given.batch.positions[m.row_token] + 1,
        any_random=_has(flags, meta_bits.RANDOM),
        num_rows=m.header[2],
        drafts=drafts,
        implementation=sampler,
    )

    @jax.named_scope("changed")
    def sample_changed() -> jax.Array:
        return sample(given.changed(), any_filter=_has(flags, meta_bits.FILTER))

    if sampler == "cpu":  # traced once: a CPU's start time matters more than a copy of a few rows
        return sample_changed()
    # The common case is separate, because a branch that may change logits copies them.
    return jax.lax.cond(
        _has(flags, CHANGE | meta_bits.FILTER),
        sample_changed,
        lambda: sample(logits, any_filter=False),
    )


def _count_accepted(
    shape: StepShape, m: StepInputs, batch: _Batch, rows: _Rows, sampled: jax.Array
) -> jax.Array:  # i32[S]
    """Count each sequence's accepted drafts.

    Row j + 1 of a verified sequence was computed from draft j. It counts if each draft up to j
    equals the token that the row before it sampled. In rejection sampling, that token is the
    accepted draft.
    """
    num_rows = m.cu_rows[1:] - m.cu_rows[:-1]  # [S]
    drafted = batch.tokens[jnp.minimum(m.row_token + 1, shape.num_tokens - 1)]
    is_last = rows.in_seq == num_rows[rows.seq] - 1
    mismatch = rows.valid & ~is_last & (m.scoring[rows.seq] == 0) & (sampled != drafted)
    accepted = jnp.maximum(num_rows - 1, 0)
    at = jnp.where(mismatch, rows.seq, shape.num_seqs)
    return accepted.at[at].min(rows.in_seq, mode="drop")


def _feed_back(
    shape: StepShape,
    slots: Slots,
    m: StepInputs,
    rows: _Rows,
    sampled: jax.Array,
    accepted: jax.Array,
) -> Slots:
    """Store each sequence's last token for the next step, and count its output tokens."""
    samples = m.samples > 0
    last_token = _last_tokens(shape, slots, m, sampled, accepted)
    is_last = rows.in_seq == (m.cu_rows[1:] - m.cu_rows[:-1])[rows.seq] - 1
    emitted = rows.valid & samples[rows.seq] & (rows.in_seq <= accepted[rows.seq])
    emitted &= (m.scoring[rows.seq] == 0) | is_last
    at = jnp.where(emitted, rows.slot, PADDING)
    counts = slots.counts.at[at, sampled].add(1, mode="drop")
    return slots._replace(last_token=last_token, counts=counts)


def _last_tokens(
    shape: StepShape,
    slots: Slots,
    m: StepInputs,
    sampled: jax.Array,  # i32[R]
    accepted: jax.Array,  # i32[S]
) -> jax.Array:
    """Return `Slots.last_token` after the step."""
    last = sampled[jnp.minimum(m.cu_rows[:-1] + accepted, shape.num_rows - 1)]
    at = jnp.where(m.samples > 0, m.slot, PADDING)
    return slots.last_token.at[at].set(last, mode="drop", unique_indices=True)


def _logprobs(given: _Given, sampled: jax.Array, sampler: Sampler) -> tuple[jax.Array, ...]:
    """Score each row's target, or its sampled token, if any row needs it. Otherwise return 0.

    Sampled tokens of sequences with PROCESSED get the logprobs of the distribution that they were
    drawn from.
    """
    m, flags = given.m, given.m.header[3]
    wanted = jnp.where(m.row_target < 0, sampled, m.row_target)
    num_rows, vocab_size = given.logits.shape
    num_top = min(MAX_LOGPROBS, vocab_size)
    size = min(ROWS_AT_ONCE, num_rows) if sampler == "cpu" else num_rows

    def processed(logits: jax.Array) -> jax.Array:
        if size == num_rows:
            return _processed(given, sampled)

        def process(i: jax.Array, scored: jax.Array) -> jax.Array:
            first = jnp.minimum(i * size, num_rows - size)  # the last part may overlap with another
            part = _processed(given.part(first, size), _part(sampled, first, size))
            return jax.lax.dynamic_update_slice_in_dim(scored, part, first, axis=0)

        return jax.lax.fori_loop(0, (m.header[2] + size - 1) // size, process, logits)

    def logprobs(logits: jax.Array):
        # All rows at once: XLA may round the sums of another number of rows differently.
        scored = jax.lax.cond(
            _has(flags, meta_bits.PROCESSED), processed, lambda logits: logits, logits
        )
        return sampling.token_logprobs(scored, wanted, num_top)

    def nothing(_: jax.Array):
        top = (num_rows, num_top)
        rank = jnp.zeros(num_rows, jnp.int32)
        return jnp.zeros(num_rows), rank, jnp.zeros(top, jnp.int32), jnp.zeros(top)

    with jax.named_scope("logprobs"):
        return jax.lax.cond(_has(flags, meta_bits.LOGPROBS), logprobs, nothing, given.logits)


def _processed(given: _Given, sampled: jax.Array) -> jax.Array:
    """Return the logits whose logprobs are returned: f32[R, V]."""
    any_filter = _has(given.m.header[3], meta_bits.FILTER)
    scaled = sampling.processed_logits(
        given.changed(), sampled, **given.filters(), any_filter=any_filter
    )
    own = (given.params[:, Column.PROCESSED] > 0) & (given.m.row_target < 0)
    return jnp.where(own[:, None], scaled, given.logits)


def _part(x: jax.Array, first: jax.Array, size: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, first, size)


def _drafts(
    shape: StepShape,
    m: StepInputs,
    tokens: jax.Array,  # i32[T]
    proposed: Proposed | None,
    verification: Verification,
) -> sampling.Drafts | None:
    """Return the draft token that each row verifies: the next token, except for last rows.

    None if the step has no drafts, or their verification needs no probabilities.
    """
    if verification != "rejection" or not shape.max_drafts:
        return None
    seq = jnp.minimum(m.row_seq, shape.num_seqs - 1)
    token = tokens[jnp.minimum(m.row_token + 1, shape.num_tokens - 1)]
    verified = jnp.arange(shape.num_rows) + 1 < m.cu_rows[seq + 1]
    verified &= (m.row_seq < shape.num_seqs) & (m.scoring[seq] == 0)
    if proposed is None:
        return sampling.certain(token, verified)
    place = jnp.clip(jnp.arange(shape.num_rows) - m.cu_rows[seq], 0, shape.max_drafts - 1)
    slot = m.slot[seq]
    return sampling.Drafts(
        token, verified, proposed.token_ids[slot, place], proposed.probability[slot, place]
    )


def _drafts_before(
    shape: StepShape,
    m: StepInputs,
    tokens: jax.Array,  # i32[T]
    num_before: jax.Array,  # i32[R], drafts of the row's sequence up to the row's own token
) -> jax.Array:
    """Return i32[R, max_drafts]: drafts that count as a row's output, padded with PADDING."""
    back = jnp.arange(shape.max_drafts)[None]
    index = jnp.maximum(m.row_token[:, None] - back, 0)
    return jnp.where(back < num_before[:, None], tokens[index], PADDING)


def _process(
    slots: Slots,
    params: jax.Array,  # i32[R, NUM_COLUMNS]
    slot: jax.Array,  # i32[R]
    num_output: jax.Array,  # i32[R]
    before: jax.Array,  # i32[R, max_drafts], see `_drafts_before`
    logits: jax.Array,  # f32[R, V]
    masks: jax.Array,  # i32[R, mask_width(V)]
    flags: jax.Array,
) -> jax.Array:
    """Apply bias, penalties, min_tokens and masks, in this order, to the rows that need them."""
    rows = jnp.arange(logits.shape[0])[:, None]

    def bias(logits: jax.Array) -> jax.Array:
        biased = params[:, Column.BIASED] > 0
        ids = jnp.where(biased[:, None], slots.bias_ids[slot], PADDING)
        return logits.at[rows, ids].add(slots.bias[slot], mode="drop", unique_indices=True)

    def penalize(logits: jax.Array) -> jax.Array:
        penalized = params[:, Column.PENALIZED] > 0
        counts = slots.counts[slot].at[rows, before].add(1, mode="drop")
        return sampling.apply_penalties(
            logits,
            jnp.where(penalized[:, None], counts, 0),
            presence=float_column(params, Column.PRESENCE),
            frequency=float_column(params, Column.FREQUENCY),
            repetition=float_column(params, Column.REPETITION),
        )

    def hold(logits: jax.Array) -> jax.Array:
        stop_ids = params[:, Column.STOP_IDS :]
        return sampling.suppress(logits, stop_ids, num_output < params[:, Column.MIN_TOKENS])

    def mask(logits: jax.Array) -> jax.Array:
        return sampling.allow(logits, masks)

    def same(logits: jax.Array) -> jax.Array:
        return logits

    with jax.named_scope("bias"):
        logits = jax.lax.cond(_has(flags, meta_bits.BIAS), bias, same, logits)
    with jax.named_scope("penalties"):
        logits = jax.lax.cond(_has(flags, meta_bits.PENALTIES), penalize, same, logits)
    with jax.named_scope("min_tokens"):
        logits = jax.lax.cond(_has(flags, meta_bits.MIN_TOKENS), hold, same, logits)
    with jax.named_scope("masks"):
        return jax.lax.cond(_has(flags, meta_bits.MASKS), mask, same, logits)


def _has(flags: jax.Array, bit: int) -> jax.Array:
    return (flags & bit) != 0
