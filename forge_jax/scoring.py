"""`score`: log-probabilities of given tokens, with the bits of the deterministic tier.

    llm = LLM("forge-tiny", deterministic=True)
    score = jax.jit(partial(forge_jax.score, llm.model, options=llm.score_options))
    logprobs = score(llm.leaves, tokens, lengths)

A trainer recomputes the log-probabilities of the tokens that an engine has sampled. `score` runs
the engine's operations in the engine's shapes, so the results are equal bit by bit. The ratio of
the two probabilities is then exactly 1.
"""

# JAX's annotations are partially unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from forge_jax.errors import ModelError
from forge_jax.models import KV, Leaves, Model
from forge_jax.models.kv import first_paged
from forge_jax.models.lora import Lora
from forge_jax.step.kv_cache import KVShape, kv_shape
from forge_jax.step.placement import Placement
from forge_kernels import sampling
from forge_kernels.attention import Implementation
from forge_kernels.embed import embed

if TYPE_CHECKING:
    from forge_jax.research import LoadedModel
    from forge_jax.step.options import CompilerOptions, RunnerOptions


@dataclass(frozen=True)
class ScoreOptions:
    """The shapes and choices of `score`, which determine its bits.

    `LLM.score_options` and `Engine.score_options` return those of an engine.

    Attributes:
      num_tokens: T, tokens per step.
      num_seqs: S, the maximum number of sequences of a step.
      num_rows: R, rows of logits that are computed together.
      kv: the KV cache of one shard. Its number of blocks is not used.
      max_blocks: blocks of the longest sequence.
      placement: the device, or the mesh that shares the model.
      implementation: the attention kernel.
    """

    num_tokens: int
    num_seqs: int
    num_rows: int
    kv: KVShape
    max_blocks: int
    placement: Placement
    implementation: Implementation = "auto"
    # Pass it to `jax.jit` as `compiler_options`. Empty on a CPU.
    compiler_options: CompilerOptions = dataclasses.field(
        default_factory=dict[str, str | bool | int], compare=False
    )

    @property
    def max_len(self) -> int:
        """Tokens of the longest sequence."""
        return self.max_blocks * self.kv.block_size

    @classmethod
    def of_engine(cls, options: RunnerOptions) -> ScoreOptions:
        """Return the options of an engine's largest step.

        Raises:
          ModelError: if the engine is not deterministic, because its bits depend on the schedule.
        """
        if not options.deterministic:
            raise ModelError(
                "score_options: the engine's log-probabilities depend on the schedule: "
                "create it with deterministic=True"
            )
        shape = options.shapes[-1]
        return cls(
            num_tokens=shape.num_tokens,
            num_seqs=shape.num_seqs,
            num_rows=shape.num_rows,
            kv=options.kv_shape,
            max_blocks=options.max_blocks,
            placement=options.placement,
            implementation=options.implementation,
            compiler_options=options.compiler_options,
        )

    @classmethod
    def default(cls, model: Model, max_len: int) -> ScoreOptions:
        """Return options for sequences of up to `max_len` tokens, without an engine."""
        device = jax.devices()[0]
        num_tokens, block_size = (64 if device.platform == "cpu" else 256), 16
        shape = kv_shape(
            model.spec,
            num_blocks=1,
            block_size=block_size,
            dtype=model.dtype,
            platform=device.platform,
        )
        return cls(
            num_tokens=num_tokens,
            num_seqs=num_tokens,
            num_rows=64,
            kv=shape,
            max_blocks=-(-max_len // block_size),
            placement=Placement(device),
        )


def score(
    model: LoadedModel | Model,
    leaves: Leaves,
    tokens: jax.Array,
    lengths: jax.Array | None = None,
    *,
    temperature: jax.Array | float | None = None,
    options: ScoreOptions | None = None,
) -> jax.Array:
    """Return the log-probability of each token, given the tokens before it.

    Pure and jittable. With the options and weights of a deterministic engine, the jitted function
    returns the bits of the engine's logprobs for these tokens.
    The gradient with respect to `leaves` is that of a dense forward pass in plain XLA
    (`implementation="reference"`). It requires weights that are plain floats, on one device.
    It holds the logits of `options.num_rows` tokens at a time.

    Args:
      model: the architecture. Its own weights are ignored in favor of `leaves`.
      leaves: the weights, for example `LLM.leaves`.
      tokens: i32[T] or i32[B, T], padded at the end with any token.
      lengths: i32[] or i32[B], tokens of each sequence without padding, up to T. Default: T.
      temperature: f32[] or f32[B], above 0. The result then equals the logprobs of
        `logprobs_mode="processed_logprobs"` with this temperature and no filters. Default: raw.
      options: shapes and kernels. Default: suitable ones for this device, which
        need not be an engine's.

    Returns:
      f32 of the shape of `tokens`: 0 for the first token and for padding.

    Raises:
      ValueError: `tokens` has another rank, or more tokens than `options.max_len`, or a
        `temperature` that is not a JAX array is not above 0.
      ModelError: a gradient is requested with respect to quantized or packed weights, or to those
        of `tensor_parallel`.
    """
    built = model if isinstance(model, Model) else model.model
    if tokens.ndim not in (1, 2):
        raise ValueError(f"tokens must be i32[T] or i32[B, T], not of shape {tokens.shape}")
    # The values of a JAX array may be unknown, because it is traced or not computed yet.
    known = temperature is not None and not isinstance(temperature, jax.Array)
    if known and not np.all(np.asarray(temperature) > 0):
        raise ValueError(f"temperature must be above 0, not {temperature}")
    if not tokens.size:
        return jnp.zeros(tokens.shape, jnp.float32)
    if options is None:
        options = ScoreOptions.default(built, tokens.shape[-1])
    rows = jnp.atleast_2d(tokens).astype(jnp.int32)
    batch, longest = rows.shape
    _check_length(longest, options)
    lengths = jnp.broadcast_to(longest if lengths is None else lengths, (batch,))
    scale = jnp.broadcast_to(1.0 if temperature is None else temperature, (batch,))
    # Division by a constant would become a multiplication, which rounds differently.
    scale = jax.lax.optimization_barrier(scale.astype(jnp.float32))
    leaves = tuple(map(jnp.asarray, leaves))  # a gradient cannot save NumPy's arrays
    scores: Any = _rows(built, options, _logprobs, leaves, rows, scale)
    scores = jnp.roll(scores, 1, axis=1)  # a row scores the token after its own
    place = jnp.arange(longest)[None]
    scores = jnp.where((place > 0) & (place < lengths[:, None]), scores, 0.0)
    return scores.reshape(tokens.shape)


def _check_length(longest: int, options: ScoreOptions) -> None:
    if longest > options.max_len:
        raise ValueError(
            f"tokens: {longest} per sequence, but the options allow {options.max_len}: "
            "raise max_model_len"
        )


def served_logits(
    model: Model, leaves: Leaves, tokens: jax.Array, options: ScoreOptions
) -> jax.Array:
    """Return the logits of each token, computed as `score` computes them.

    Pure, jittable and differentiable, with the conditions and errors of `score`. The logits of all
    tokens are in memory at the same time.

    Args:
      tokens: i32[B, T], padded at the end with any token.

    Returns:
      f32[B, T, V]: row t is the distribution of the token after t. Padding has any value.
    """
    _check_length(tokens.shape[-1], options)
    temperature = jnp.ones(len(tokens), jnp.float32)
    rows: Any = _rows(model, options, _all_logits, tuple(leaves), tokens, temperature)
    return rows


class ChunkedLogits:
    """Logits of one sequence at a time, computed as `score` computes them, chunk by chunk.

    The logits of `options.num_tokens` tokens are in memory at the same time. All sequences share
    one compiled step.

    Args:
      model: the architecture.
      leaves: the weights.
      options: shapes and kernels, for example `LLM.score_options`.
      max_len: tokens of the longest sequence.
      adapters: LoRA adapters, as in `LoraShape.stacks`.
      place: the adapter's slot; 0: none.

    Raises:
      ValueError: `max_len` exceeds `options.max_len`.
    """

    def __init__(
        self,
        model: Model,
        leaves: Leaves,
        options: ScoreOptions,
        max_len: int,
        adapters: tuple[jax.Array, ...] = (),
        place: int = 0,
    ):
        _check_length(max_len, options)
        placement = options.placement
        shard = dataclasses.replace(
            options.kv,
            num_blocks=-(-max_len // options.kv.block_size),
            num_slots=options.num_seqs,
        )
        empty = placement.whole_kv(model, shard).empty
        step = partial(_step, model, options, _all_logits, max_len, place=place)
        step = placement.shard_step(model, step, lora=bool(adapters))
        compiled = options.compiler_options
        self._leaves = (*leaves, *adapters)
        self._max_len = max_len
        self._num_tokens = options.num_tokens
        self._kv: KV = jax.jit(empty, out_shardings=placement.kv_sharding(model))()
        self._step = jax.jit(step, donate_argnums=1, compiler_options=compiled or None)

    def __call__(self, tokens: Sequence[int]) -> Iterator[np.ndarray]:
        """Yield the logits of consecutive tokens, f32[<= num_tokens, V]; in all, one row per token.

        Row t is the distribution of the token after t.

        Raises:
          ValueError: there are more than `max_len` tokens.
        """
        count = len(tokens)
        if count > self._max_len:
            raise ValueError(f"tokens: {count}, but max_len is {self._max_len}")
        padded = np.zeros((1, self._max_len), np.int32)
        padded[0, :count] = tokens
        temperature = np.ones(1, np.float32)
        for start in range(0, count, self._num_tokens):
            chunk = np.int32(start // self._num_tokens)
            self._kv, rows = self._step(self._leaves, self._kv, padded, temperature, chunk)
            yield np.asarray(rows)[: count - start]


# (logits f32[R, V], the next tokens i32[R], temperatures f32[R]) -> f32[R, ...]
type _Head = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _rows(
    model: Model,
    options: ScoreOptions,
    head: _Head,
    leaves: Leaves,
    tokens: jax.Array,  # i32[B, T]
    temperature: jax.Array,  # f32[B]
) -> jax.Array:  # f32[B, T, ...], with any value for the last token
    """Compute `head` of each token in steps, with as many sequences as one step has room for."""
    batch, longest = tokens.shape
    together = max(1, min(options.num_tokens // longest, options.num_seqs, batch))
    groups = -(-batch // together)
    padding = groups * together - batch
    tokens = jnp.pad(tokens, ((0, padding), (0, 0)))
    temperature = jnp.pad(temperature, (0, padding), constant_values=1.0)
    grouped = tokens.reshape(groups, together, longest)
    step = options.placement.shard_step(model, partial(_step, model, options, head, longest))
    num_chunks = -(-longest // options.num_tokens)

    def of_group(kv: KV, group: tuple[jax.Array, jax.Array]) -> tuple[KV, jax.Array]:
        def of_chunk(kv: KV, chunk: jax.Array) -> tuple[KV, jax.Array]:
            kv, rows = step(leaves, kv, *group, chunk)
            return kv, rows

        kv, rows = jax.lax.scan(of_chunk, kv, jnp.arange(num_chunks))
        return kv, rows

    blocks = together * -(-longest // options.kv.block_size)
    whole = options.placement.whole_kv(
        model, dataclasses.replace(options.kv, num_blocks=blocks, num_slots=options.num_seqs)
    )
    _, rows = jax.lax.scan(
        of_group, whole.empty(), (grouped, temperature.reshape(groups, together))
    )
    # [groups, chunks, T]: the rows of several sequences, or chunks of one.
    each = rows.shape[3:]
    rows = rows.reshape(groups, -1, *each)[:, : together * longest]
    return rows.reshape(groups * together, longest, *each)[:batch]


def _step(
    model: Model,
    options: ScoreOptions,
    head: _Head,
    longest: int,
    leaves: Leaves,
    kv: KV,
    tokens: jax.Array,  # i32[n, longest]
    temperature: jax.Array,  # f32[n]
    chunk: jax.Array,  # i32[]
    *,
    place: int = 0,
) -> tuple[KV, jax.Array]:
    """Compute a chunk of each sequence as the engine does. Return (kv, f32[T, ...]).

    If `place` is set, LoRA adapters follow the weights in `leaves`.
    """
    num_weights = len(model.leaves)
    adapters, leaves = leaves[num_weights:], leaves[:num_weights]
    n, size, most = len(tokens), options.num_tokens, options.num_seqs
    block_size = options.kv.block_size
    q_len = jnp.minimum(longest - chunk * size, size) if n == 1 else jnp.int32(longest)
    index = jnp.arange(size)
    seq = jnp.minimum(index // q_len, n - 1)
    exists = index < n * q_len
    positions = jnp.where(exists, chunk * size + index - seq * q_len, 0)
    after = jnp.minimum(positions + 1, longest - 1)
    of_seq = -(-longest // block_size)
    tables = jnp.arange(n)[:, None] * of_seq + jnp.arange(of_seq)[None]
    tables = jnp.pad(tables, ((0, most - n), (0, options.max_blocks - of_seq)))
    num_kv = first_paged(kv).shape[0] * block_size
    slot_mapping = tables[seq, positions // block_size] * block_size + positions % block_size
    slot_mapping = jnp.where(exists, slot_mapping, num_kv)
    runs = jnp.arange(most) < n
    kv, hidden = model.forward(
        leaves,
        kv,
        jnp.where(exists, tokens[seq, positions], 0),
        positions,
        jax.lax.optimization_barrier(slot_mapping),
        tables,
        jnp.where(runs, chunk * size + q_len, 0),
        jnp.minimum(jnp.arange(most + 1), n) * q_len,
        jnp.int32(n),
        implementation=options.implementation,
        max_q_len=size,
        uniform=True,
        state_slots=jnp.arange(most, dtype=jnp.int32),
        skip_padding=True,
        lora=Lora(adapters, jnp.full(size, place, jnp.int32)) if place else None,
    )
    groups = -(-size // options.num_rows)
    row = jnp.minimum(jnp.arange(groups * options.num_rows), size - 1)

    def of_rows(row: jax.Array) -> jax.Array:
        rows = model.logits(leaves, embed(hidden, row), jnp.int32(options.num_rows))
        return head(rows, tokens[seq[row], after[row]], temperature[seq[row]])

    rows = jax.lax.map(of_rows, row.reshape(groups, options.num_rows))
    return kv, rows.reshape(-1, *rows.shape[2:])[:size]


def _logprobs(
    logits: jax.Array,  # f32[R, V]
    wanted: jax.Array,  # i32[R]
    temperature: jax.Array,  # f32[R]
) -> jax.Array:  # f32[R]
    scaled = logits / temperature[:, None]
    return sampling.token_logprobs(scaled, wanted, 1)[0]


def _dense_logprobs(
    logits: jax.Array,  # f32[R, V]
    wanted: jax.Array,  # i32[R]
    temperature: jax.Array,  # f32[R]
) -> jax.Array:  # f32[R]
    logprobs = jax.nn.log_softmax(logits / temperature[:, None])
    return jnp.take_along_axis(logprobs, wanted[:, None], axis=1)[:, 0]


def _all_logits(logits: jax.Array, wanted: jax.Array, temperature: jax.Array) -> jax.Array:
    return logits


def _rows_forward(
    model: Model,
    options: ScoreOptions,
    head: _Head,
    leaves: Leaves,
    tokens: jax.Array,
    temperature: jax.Array,
) -> tuple[jax.Array, Any]:
    if model.shards > 1:
        raise ModelError(
            "score: gradients require a model on one device, but this one is divided among "
            f"{model.shards}: use tensor_parallel=1, or weights of `forge_jax.load`"
        )
    if any(not jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves) or model.formats:
        raise ModelError(
            f"score: gradients require plain float weights, but some are {sorted(model.formats)}: "
            'use dtype="float32" or kernels="xla", and gguf_weights="decoded"'
        )
    return _rows(model, options, head, leaves, tokens, temperature), (leaves, tokens, temperature)


def _rows_backward(
    model: Model, options: ScoreOptions, head: _Head, saved: Any, cotangent: jax.Array
) -> tuple[Any, None, jax.Array]:
    leaves, tokens, temperature = saved
    head = _dense_logprobs if head is _logprobs else head
    dense = partial(_dense_rows, model, options, head, tokens)
    _, pull = jax.vjp(dense, leaves, temperature)
    to_leaves, to_temperature = pull(cotangent)
    return to_leaves, None, to_temperature


_rows.defvjp(_rows_forward, _rows_backward)


def _dense_rows(
    model: Model,
    options: ScoreOptions,
    head: _Head,
    tokens: jax.Array,  # i32[B, T]
    leaves: Leaves,
    temperature: jax.Array,  # f32[B]
) -> jax.Array:  # f32[B, T, ...]
    """Compute all sequences in one differentiable step. Equal to `_rows` up to rounding."""
    batch, longest = tokens.shape
    block_size = options.kv.block_size
    blocks = -(-longest // block_size)
    shape = kv_shape(
        model.spec,
        num_blocks=batch * blocks,
        block_size=block_size,
        dtype=jnp.float32,
        platform=options.placement.device.platform,
        num_slots=batch,
    )
    tables = jnp.arange(batch * blocks).reshape(batch, blocks)
    position = jnp.arange(longest)
    slot_mapping = tables[:, position // block_size] * block_size + (position % block_size)[None]
    _, hidden = model.forward(
        leaves,
        shape.empty(),
        tokens.reshape(-1),
        jnp.tile(position, batch),
        slot_mapping.reshape(-1),
        tables,
        jnp.full(batch, longest),
        jnp.arange(batch + 1) * longest,
        jnp.int32(batch),
        implementation="reference",
    )
    # The logits of all rows at once would be f32[B * T, V], so each group computes its own twice.
    num_rows = min(options.num_rows, batch * longest)
    padding = -(batch * longest) % num_rows

    def grouped(rows: jax.Array, fill: float = 0) -> jax.Array:
        widths = ((0, padding), *((0, 0),) * (rows.ndim - 1))
        padded = jnp.pad(rows, widths, constant_values=fill)
        return padded.reshape(-1, num_rows, *rows.shape[1:])

    @jax.checkpoint
    def of_rows(rows: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        hidden, wanted, scale = rows
        return head(model.logits(leaves, hidden), wanted, scale)

    after = jnp.roll(tokens, -1, axis=1).reshape(-1)
    of_row = jnp.repeat(temperature, longest)
    rows = jax.lax.map(of_rows, (grouped(hidden), grouped(after), grouped(of_row, 1.0)))
    each = rows.shape[2:]
    rows = rows.reshape(-1, *each)[: batch * longest]
    return rows.reshape(batch, longest, *each)
