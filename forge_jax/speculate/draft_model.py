"""A draft model on the device: its weights, its KV cache and its executables.

`extend[T]` computes keys and values of tokens that are known. `draft[B]` takes in the last one or
two tokens of up to B sequences and generates from there, token after token on the device, with the
noise that the target's sampler has for the same sequence and position (Gumbel coupling: Daliri,
Musco and Suresh 2024, arXiv:2408.07978): a draft is then what the target samples as often as the
two distributions allow it to be without knowing each other, and always where they are the same.

For verification by rejection the noise is another, and what each draft was drawn from is left in
`DraftProbs` for the target's step. A draft's probability, for the policy that decides how many are
verified, is then that of the likeliest token: knowing the one drawn would let good draws through
and bias what is put out.

Nothing here knows requests or blocks in use: `draft.py` does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from forge_jax.step.draft_probs import SUPPORT, DraftProbs, Proposed
from forge_jax.step.executables import Executables, LateShapes
from forge_jax.step.kv_cache import KVShape
from forge_jax.step.runner import PATIENCE_S
from forge_jax.step.slots import MIN_TEMPERATURE, PADDING
from forge_kernels import sampling
from forge_kernels.attention import Implementation
from forge_kernels.embed import embed

if TYPE_CHECKING:
    from forge_jax.models.decoder import Model
    from forge_jax.sampling_params import SamplingParams
    from forge_jax.step.mesh import TensorMesh

log = logging.getLogger(__name__)

NUM_PARAMS = 6  # of a sequence's sampling: seed (2), temperature, top_p, min_p, top_k
RANDOM, FILTER = 1, 2  # bits of the header: work that at least one row needs


class Row(NamedTuple):
    """One sequence in a call."""

    token_ids: Seq[int]  # that have no keys and values yet; of `draft`, one or two
    start: int  # position of the first of them
    blocks: Seq[int]  # of the draft's KV cache, in order
    end: int = 0  # `draft`: positions below it have a block
    params: np.ndarray | None = None  # `draft`: i32[NUM_PARAMS], floats as their bits
    slot: int = PADDING  # `draft`: of the sequence in the target's steps


class DraftInputs(NamedTuple):
    """The segments of a call's packed array."""

    header: jax.Array  # i32[3]: num_seqs, num_tokens, flags
    tokens: jax.Array  # i32[T]
    token_seq: jax.Array  # i32[T]
    start: jax.Array  # i32[S]
    cu_q_lens: jax.Array  # i32[S + 1]
    end: jax.Array  # i32[S]
    params: jax.Array  # i32[S * NUM_PARAMS]
    tables: jax.Array  # i32[S * max_blocks]
    slot: jax.Array  # i32[S]; nothing where the shape does not propose


@dataclass(frozen=True, kw_only=True)
class DraftShape:
    """The static sizes of one executable."""

    name: str
    num_tokens: int  # T: taken in
    num_seqs: int  # S
    max_blocks: int
    max_q_len: int  # tokens of one sequence
    # Of `draft`: tokens of each later pass, and rows of logits of every pass; at least `num_seqs`.
    later_tokens: int = 0
    num_rows: int = 0
    proposes: bool = False  # for verification by rejection

    @cached_property
    def segments(self) -> tuple[slice, ...]:
        """Where each segment lies in the packed array, in the order of `DraftInputs`."""
        t, s = self.num_tokens, self.num_seqs
        slots = s * self.proposes
        lengths = (3, t, t, s, s + 1, s, s * NUM_PARAMS, s * self.max_blocks, slots)
        ends = tuple(accumulate(lengths))
        return tuple(slice(end - length, end) for end, length in zip(ends, lengths, strict=True))

    @property
    def width(self) -> int:
        return self.segments[-1].stop

    def split(self, packed):
        """Cuts the packed array (numpy or traced) into its segments, without a copy."""
        return DraftInputs(*[packed[segment] for segment in self.segments])

    def most(self, rows: Seq[Row]) -> int:
        """How many of the first rows fit."""
        lengths = accumulate(len(row.token_ids) for row in rows[: self.num_seqs])
        return sum(length <= self.num_tokens for length in lengths)

    def pack(self, rows: Seq[Row]) -> np.ndarray:
        """At most `num_seqs` rows, of at most `num_tokens` together -> i32[width]."""
        packed = np.zeros(self.width, np.int32)
        m, n = self.split(packed), len(rows)
        q_lens = np.array([len(row.token_ids) for row in rows], np.int32)
        num_tokens = int(q_lens.sum())
        assert n <= self.num_seqs and num_tokens <= self.num_tokens
        m.tokens[:num_tokens] = [token for row in rows for token in row.token_ids]
        m.token_seq[:num_tokens] = np.repeat(np.arange(n, dtype=np.int32), q_lens)
        m.cu_q_lens[1 : n + 1] = np.cumsum(q_lens)
        m.cu_q_lens[n + 1 :] = num_tokens
        tables = m.tables.reshape(self.num_seqs, self.max_blocks)
        params = m.params.reshape(self.num_seqs, NUM_PARAMS)
        m.slot[n:] = PADDING
        flags = 0
        for i, row in enumerate(rows):
            m.start[i], m.end[i] = row.start, row.end
            tables[i, : len(row.blocks)] = row.blocks
            if row.params is not None:
                params[i] = row.params
                flags |= _flags(row.params)
            if self.proposes:
                m.slot[i] = row.slot
        m.header[:] = n, num_tokens, flags
        return packed


def pack_params(seed: int, params: SamplingParams) -> np.ndarray:
    """i32[NUM_PARAMS] of a sequence; the values are those that its slot on the device has."""
    temperature = max(params.temperature, MIN_TEMPERATURE) if params.temperature else 0.0
    packed = np.zeros(NUM_PARAMS, np.int32)
    packed[:2] = np.array([seed], np.uint64).view(np.int32)
    floats = [temperature, params.top_p, params.min_p]
    packed[2:5] = np.array(floats, np.float32).view(np.int32)
    packed[5] = max(params.top_k, 0)
    return packed


def _flags(params: np.ndarray) -> int:
    temperature, top_p, min_p = params[2:5].view(np.float32)
    if temperature <= 0.0:
        return 0
    return RANDOM | FILTER * bool(params[5] > 0 or top_p < 1.0 or min_p > 0.0)


def make_extend(
    model: Model,
    shape: DraftShape,
    block_size: int,
    *,
    implementation: Implementation = "auto",
    uniform: bool = False,
) -> Callable[..., tuple[tuple[jax.Array, ...], None]]:
    """(leaves, kv*, packed) -> (kv, nothing): with keys and values of all tokens of the rows."""

    def extend(
        leaves: tuple[jax.Array, ...],
        kv: tuple[jax.Array, ...],  # per layer dtype[N, 2, K, bs, D]
        packed: jax.Array,  # i32[shape.width]
    ) -> tuple[tuple[jax.Array, ...], None]:
        m = shape.split(packed)
        kv, _ = _take_in(model, leaves, kv, shape, m, block_size, implementation, uniform)
        return kv, None

    extend.__name__ = shape.name.replace("[", "_").replace("]", "")
    return extend


def make_draft(
    model: Model,
    shape: DraftShape,
    block_size: int,
    max_draft_tokens: int,
    *,
    implementation: Implementation = "auto",
    sampler: Literal["xla", "cpu"] = "xla",
    uniform: bool = False,
) -> Callable[..., tuple[tuple[jax.Array, ...], Any]]:
    """(leaves, kv*, packed) -> (kv, i32[2, S, k]: drafts, and the bits of their probabilities).

    A shape that proposes: (leaves, kv*, packed, `Proposed`) -> (kv, (the same, `Proposed`)).
    """
    num_seqs = shape.num_seqs
    padding = (0, shape.later_tokens - num_seqs)

    def sample(
        leaves: tuple[jax.Array, ...],
        m: DraftInputs,
        hidden: jax.Array,  # dtype[T, d]
        row_token: jax.Array,  # i32[S], the row of T of each sequence
        position: jax.Array,  # i32[S], of the token to be sampled
        ahead: jax.Array,  # i32[], drafts before it
    ) -> tuple[jax.Array, ...]:
        """(i32[S], f32[S]): tokens, and how likely each was.

        Where the shape proposes, also i32[S, K] and f32[S, K]: what they were drawn from.
        """
        row_token = jnp.pad(row_token, (0, shape.num_rows - num_seqs))
        logits = model.logits(leaves, embed(hidden, row_token), m.header[0])[:num_seqs]
        params = m.params.reshape(num_seqs, NUM_PARAMS)
        floats = jax.lax.bitcast_convert_type(params[:, 2:5], jnp.float32)
        temperature = floats[:, 0]
        asked: dict[str, Any] = {
            "temperature": temperature,
            "top_k": params[:, 5],
            "top_p": floats[:, 1],
            "min_p": floats[:, 2],
            "seed": params[:, :2].view(jnp.uint32),
        }
        any_random, any_filter = ((m.header[2] & bit) != 0 for bit in (RANDOM, FILTER))
        if shape.proposes:
            known = position - ahead - 1
            drawn = sampling.propose(
                logits,
                support=SUPPORT,
                known=known,
                ahead=ahead,
                any_filter=any_filter,
                **asked,
            )
            return drawn.token, drawn.probability.max(axis=1), drawn.token_ids, drawn.probability
        token = sampling.sample(
            logits,
            position=position,
            any_random=any_random,
            any_filter=any_filter,
            num_rows=m.header[0],
            **asked,
            implementation=sampler,
        )
        token = jnp.clip(token, 0, logits.shape[1] - 1)
        scaled = logits / jnp.where(temperature > 0, temperature, 1.0)[:, None]
        chosen = jnp.take_along_axis(scaled, token[:, None], axis=1)[:, 0]
        probability = jnp.exp(chosen - jax.nn.logsumexp(scaled, axis=1))
        return token, jnp.where(jnp.isfinite(probability), probability, 0.0)

    @jax.jit  # traced and lowered once for all passes
    def go_on(
        leaves: tuple[jax.Array, ...],
        kv: tuple[jax.Array, ...],
        m: DraftInputs,
        last: jax.Array,  # i32[S], position of the last known token
        token: jax.Array,  # i32[S], at `last + ahead`
        ahead: jax.Array,  # i32[]
    ) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        """Computes keys and values of `token`: (kv, what `sample` gives of the token after it)."""
        seq = jnp.arange(num_seqs)
        exists = seq < m.header[0]
        # Where there is no room, the last position is computed anew, and what comes of it is not
        # used: nothing is written, and nothing is read that was not.
        written = exists & (last + ahead < m.end)
        position = jnp.where(exists, jnp.minimum(last + ahead, m.end - 1), 0)
        tables = m.tables.reshape(num_seqs, shape.max_blocks)
        slot = tables[seq, position // block_size] * block_size + position % block_size
        num_kv = kv[0].shape[0] * block_size
        kv, hidden = model.forward(
            leaves,
            kv,
            jnp.pad(token, padding),
            jnp.pad(position, padding),
            jnp.pad(jnp.where(written, slot, num_kv), padding, constant_values=num_kv),
            tables,
            position + 1,
            jnp.minimum(jnp.arange(num_seqs + 1), m.header[0]),
            m.header[0],
            implementation=implementation,
            max_q_len=shape.max_q_len if uniform else 1,
            uniform=uniform,
        )
        return kv, sample(leaves, m, hidden, seq, last + ahead + 1, ahead)

    def draft(
        leaves: tuple[jax.Array, ...],
        kv: tuple[jax.Array, ...],
        packed: jax.Array,  # i32[shape.width]
        proposed: Proposed | None = None,
    ) -> tuple[tuple[jax.Array, ...], Any]:
        m = shape.split(packed)
        kv, hidden = _take_in(model, leaves, kv, shape, m, block_size, implementation, uniform)
        last = m.start + m.cu_q_lens[1:] - m.cu_q_lens[:-1] - 1
        row_token = jnp.maximum(m.cu_q_lens[1:] - 1, 0)
        drawn = [sample(leaves, m, hidden, row_token, last + 1, jnp.int32(0))]
        # Unrolled: as fast as a loop on the CPU, and a GPU's command buffers hold no loop.
        for ahead in range(1, max_draft_tokens):
            kv, more = go_on(leaves, kv, m, last, drawn[-1][0], jnp.int32(ahead))
            drawn.append(more)
        tokens, probabilities, *drawn_from = zip(*drawn, strict=True)
        bits = jax.lax.bitcast_convert_type(jnp.stack(probabilities, axis=1), jnp.int32)
        out = jnp.stack([jnp.stack(tokens, axis=1), bits])
        if proposed is None:
            return kv, out
        new = Proposed(*[jnp.stack(values, axis=1) for values in drawn_from])
        at = m.slot
        return kv, (out, jax.tree.map(lambda a, b: a.at[at].set(b, mode="drop"), proposed, new))

    draft.__name__ = shape.name.replace("[", "_").replace("]", "")
    return draft


def _take_in(
    model: Model,
    leaves: tuple[jax.Array, ...],
    kv: tuple[jax.Array, ...],
    shape: DraftShape,
    m: DraftInputs,
    block_size: int,
    implementation: Implementation,
    uniform: bool,
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """The forward pass over the tokens of a call: (kv, dtype[T, d])."""
    tables = m.tables.reshape(shape.num_seqs, shape.max_blocks)
    index = jnp.arange(shape.num_tokens)
    valid = index < m.header[1]
    positions = jnp.where(valid, m.start[m.token_seq] + index - m.cu_q_lens[m.token_seq], 0)
    blocks = tables[m.token_seq, positions // block_size]
    num_kv = kv[0].shape[0] * block_size
    return model.forward(
        leaves,
        kv,
        m.tokens,
        positions,
        jnp.where(valid, blocks * block_size + positions % block_size, num_kv),
        tables,
        m.start + m.cu_q_lens[1:] - m.cu_q_lens[:-1],
        m.cu_q_lens,
        m.header[0],
        implementation=implementation,
        max_q_len=shape.max_q_len,
        uniform=uniform,
    )


class DraftShapes(NamedTuple):
    """Of all executables, smallest first."""

    extend: tuple[DraftShape, ...]
    draft: tuple[DraftShape, ...]


def draft_shapes(
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_rows: int,
    max_blocks: int,
    deterministic: bool = False,
    proposes: bool = False,
) -> DraftShapes:
    """The executables for an engine of these limits; the arguments are those of its steps.

    With `proposes` they are for verification by rejection.

    In the deterministic tier every pass has the shape of the engine's step: where the draft model
    is the target, it computes the same bits.
    """

    def extend(num_tokens: int) -> DraftShape:
        return DraftShape(
            name=f"extend[{num_tokens}]",
            num_tokens=num_tokens,
            num_seqs=min(max_num_seqs, num_tokens),
            max_blocks=max_blocks,
            max_q_len=num_tokens,
        )

    def draft(batch: int) -> DraftShape:
        return DraftShape(
            name=f"draft[{batch}]",
            num_tokens=2 * batch,
            num_seqs=batch,
            max_blocks=max_blocks,
            max_q_len=2,
            later_tokens=batch,
            num_rows=batch,
            proposes=proposes,
        )

    if deterministic:
        step = extend(max_num_batched_tokens)
        whole = replace(
            step,
            name=f"draft[{step.num_seqs}]",
            num_tokens=max(step.num_tokens, 2),
            later_tokens=step.num_tokens,
            num_rows=min(max_rows, step.num_tokens),
            proposes=proposes,
        )
        return DraftShapes((step,), (whole,))
    tokens = [t for t in (64,) if t < max_num_batched_tokens] + [max_num_batched_tokens]
    batches = [b for b in (4, 16, 64) if b < max_num_seqs] + [max_num_seqs]
    return DraftShapes(tuple(map(extend, tokens)), tuple(map(draft, batches)))


class DraftModel:
    """Owns the device state of a draft model and its executables.

    Life: `compile`, then `start` with the weights; `adopt` takes what has been compiled since, and
    from the first of each kind on it `can_draft`.

    Not thread-safe: one thread starts, calls and adopts, or one after the other.

    Args:
      sampler: what samples in the target's steps; the noise must be the same bits.
      proposals: where to leave what drafts were drawn from, for shapes that propose.
      memory_limit: bytes of the device that weights, KV cache and a call may take; None: no matter
        how many.
      uniform: the deterministic tier.
      mesh: the devices that share the target, of which `device` is one. A model that is not cut is
        whole on each, and all compute the same; None: `device` is alone.
    """

    def __init__(  # noqa: PLR0913
        self,
        model: Model,
        *,
        shapes: DraftShapes,
        kv_shape: KVShape,
        max_draft_tokens: int,
        device: jax.Device,
        implementation: Implementation = "auto",
        sampler: Literal["xla", "cpu"] = "xla",
        draft_probs: DraftProbs | None = None,
        uniform: bool = False,
        compiler_options: Mapping[str, str | bool | int] | None = None,
        memory_limit: int | None = None,
        mesh: TensorMesh | None = None,
    ):
        self.max_draft_tokens = max_draft_tokens
        self.kv_shape = kv_shape
        self._model = model
        self._mesh = mesh
        self._sharding = jax.sharding.SingleDeviceSharding(device) if mesh is None else mesh.whole
        self._shapes = shapes
        self._ready: list[DraftShape] = []
        self._implementation: Implementation = implementation
        self._sampler: Literal["xla", "cpu"] = sampler
        self._draft_probs = draft_probs
        self._uniform = uniform
        self._executables = Executables(compiler_options)
        self._late = LateShapes(
            self._executables, [*shapes.extend, *shapes.draft], memory_limit, "--num-blocks"
        )
        self._compiled: dict[str, jax.stages.Compiled] = {}  # that run
        self._leaves: tuple[jax.Array, ...] = ()
        self._kv: tuple[jax.Array, ...] = ()

    @property
    def proposes(self) -> bool:
        """Whether its drafts are for verification by rejection."""
        return self._draft_probs is not None

    @property
    def vocab_size(self) -> int:
        return self._model.spec.vocab_size

    @property
    def context(self) -> int:
        """Tokens of the longest sequence that it can take in."""
        blocks = self._shapes.extend[-1].max_blocks * self.kv_shape.block_size
        return min(self._model.spec.max_position_embeddings, blocks)

    @property
    def extend_tokens(self) -> int:
        """How many tokens one `extend` takes."""
        return max((s.num_tokens for s in self._shapes.extend if s in self._ready), default=0)

    @property
    def extend_rows(self) -> int:
        """How many sequences one `extend` takes."""
        return max((s.num_seqs for s in self._shapes.extend if s in self._ready), default=0)

    @property
    def can_draft(self) -> bool:
        return all(any(shape in self._ready for shape in kind) for kind in self._shapes)

    def compile(self) -> None:
        """Starts to lower and compile everything in threads."""
        mesh, model, kv_sharding = self._mesh, self._model, self._sharding
        leaves = self._on_device(model.leaves) if mesh is None else mesh.leaves(model)
        if mesh is not None:
            kv_sharding = mesh.kv(model)
        layers = self.kv_shape.num_layers
        kv = self._on_device((self._whole_kv.layer,) * layers, kv_sharding)
        block_size, add = self.kv_shape.block_size, self._executables.add
        options = {"implementation": self._implementation, "uniform": self._uniform}
        add("new_kv", self._new_kv, out_shardings=kv_sharding)
        self._executables.pause(PATIENCE_S)  # serving begins without any of these
        for shape in self._shapes.extend:
            extend = make_extend(model, shape, block_size, **options)
            extend = extend if mesh is None else mesh.shard_step(model, extend)
            add(shape.name, extend, leaves, kv, self._i32(shape.width), donate_argnums=1)
        options |= {"sampler": self._sampler}
        for shape in self._shapes.draft:
            draft = make_draft(model, shape, block_size, self.max_draft_tokens, **options)
            draft = draft if mesh is None else mesh.shard_step(model, draft)
            inputs = [self._i32(shape.width), *self._on_device(self._latest(shape))]
            add(shape.name, draft, leaves, kv, *inputs, donate_argnums=1)
        self._executables.close()

    def start(self, leaves: tuple[jax.Array, ...]) -> None:
        """Takes the weights, which may be the target's own arrays, and makes the KV cache."""
        self._leaves = leaves
        self.reset()
        self._executables.resume()

    def reset(self) -> None:
        """Makes the KV cache anew: what it held is lost, and so are all drafts."""
        if self._draft_probs is not None:
            self._draft_probs.reset()
        self._kv = ()  # first, or there would be no room for the new
        self._kv = jax.block_until_ready(self._executables["new_kv"]())

    @property
    def complete(self) -> bool:
        """Whether there is nothing left to adopt."""
        return not self._late

    def adopt(self) -> None:
        """Takes what has been compiled since, and runs each once. Between steps only.

        What fails to compile or to run, or does not fit into the memory, is left out.
        """
        for shape in self._late.arrived():
            try:
                self._adopt(shape)
            except Exception:  # drafts are dispensable: the engine goes on
                log.exception("%s cannot run: it is left out", shape.name)
        if self.complete and not self.can_draft:
            log.error("the draft model cannot run: no drafts")

    def _adopt(self, shape: DraftShape) -> None:
        self._compiled[shape.name] = self._executables[shape.name]
        self._call(shape, (), *self._latest(shape))  # writes nothing, for every index is padding
        jax.block_until_ready(self._kv)
        self._ready.append(shape)

    def on_compiled(self, call: Callable[[], None]) -> None:
        """Has `call` called, in another thread, whenever `adopt` has something to do."""
        self._late.on_compiled(call)

    def wait(self) -> None:
        """Until `adopt` can take everything that is left."""
        self._late.wait()

    def cancel(self) -> None:
        """Compiles nothing more: what has not been adopted never will be."""
        self._late.cancel()

    def extend(self, rows: Seq[Row]) -> None:
        """Computes keys and values of the rows' tokens, in one call. Does not wait for it."""
        assert len(rows) <= self.extend_rows
        self._call(self._choose(self._shapes.extend, rows), rows)

    def draft(self, rows: Seq[Row]) -> tuple[np.ndarray, np.ndarray]:
        """What the sequences go on with, in as few calls as it takes. Waits for it.

        Returns:
          i32[len(rows), k] and f32[len(rows), k]: tokens, and the draft model's probability of
          each. Of row i, those from `end - position of the last known token` on mean nothing.
        """
        outs = []
        first = 0
        proposed = self._latest(self._shapes.draft[0])
        while first < len(rows):
            shape = self._choose(self._shapes.draft, rows[first:])
            count = shape.most(rows[first:])
            out = self._call(shape, rows[first : first + count], *proposed)
            if proposed:
                out, *proposed = out
            out.copy_to_host_async()
            outs.append((out, count))
            first += count
        both = np.concatenate([np.asarray(out)[:, :count] for out, count in outs], axis=1)
        if self._draft_probs is not None:  # now that nothing has raised, or steps would, too
            [self._draft_probs.latest] = proposed
        return both[0], both[1].view(np.float32)

    def _choose(self, shapes: Seq[DraftShape], rows: Seq[Row]) -> DraftShape:
        """The smallest that takes them all, or the largest."""
        ready = [shape for shape in shapes if shape in self._ready]
        return next((shape for shape in ready if shape.most(rows) == len(rows)), ready[-1])

    def _call(self, shape: DraftShape, rows: Seq[Row], *proposed: Proposed) -> Any:
        packed = shape.pack(rows)
        self._kv, out = self._compiled[shape.name](self._leaves, self._kv, packed, *proposed)
        return out

    def _latest(self, shape: DraftShape) -> tuple[Proposed, ...]:
        """What an executable takes and gives of `DraftProbs`: one argument, or none."""
        if not shape.proposes:
            return ()
        assert self._draft_probs is not None
        return (self._draft_probs.latest,)

    def _new_kv(self) -> tuple[jax.Array, ...]:
        layer = self._whole_kv.layer
        return tuple(jnp.zeros(layer.shape, layer.dtype) for _ in range(self.kv_shape.num_layers))

    @property
    def _whole_kv(self) -> KVShape:
        """Of all shards."""
        if self._mesh is None or self._model.shards == 1:
            return self.kv_shape
        return self._mesh.kv_shape(self.kv_shape)

    def _i32(self, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, np.int32, sharding=self._sharding)

    def _on_device(self, tree: Any, sharding: jax.sharding.Sharding | None = None) -> Any:
        sharding = sharding or self._sharding
        return jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), tree
        )
