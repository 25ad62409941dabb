"""A draft model on the device: its weights, its KV cache and its executables.

Requests and blocks in use are `draft.py`'s; the functions that run are in `draft_step.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from forge_jax.models.kv import KV
from forge_jax.speculate.draft_step import (
    DraftPass,
    DraftShape,
    DraftShapes,
    Row,
    make_draft,
    make_extend,
)
from forge_jax.step.draft_probs import DraftProbs, Proposed
from forge_jax.step.executables import PATIENCE_S, BackgroundCompile, Executables
from forge_jax.step.placement import Placement
from forge_kernels.attention import Implementation

if TYPE_CHECKING:
    from forge_jax.models.decoder import Model
    from forge_jax.step.kv_cache import KVShape
    from forge_jax.step.mesh import TensorMesh
    from forge_jax.step.options import CompilerOptions

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class DraftModelOptions:
    """The sizes and choices that decide a draft model's executables.

    Args:
      mesh: the devices that share the target, of which `device` is one. A model that is not divided
        is whole on each, and all compute the same; None: `device` is alone.
      implementation: of attention.
      sampler: of the target's steps; the noise must be the same bits.
      draft_probs: where shapes that propose leave the probabilities that drafts were drawn from.
      uniform: the deterministic tier.
      memory_limit: bytes of the device that weights, KV cache and a call may take; None: no limit.
    """

    shapes: DraftShapes
    kv_shape: KVShape
    max_draft_tokens: int
    device: jax.Device
    mesh: TensorMesh | None = None
    implementation: Implementation = "auto"
    sampler: Literal["xla", "cpu"] = "xla"
    draft_probs: DraftProbs | None = None
    uniform: bool = False
    compiler_options: CompilerOptions = field(default_factory=dict)
    memory_limit: int | None = None

    @cached_property
    def placement(self) -> Placement:
        return Placement(self.device, self.mesh)


class DraftModel:
    """Owns the device state of a draft model and its executables.

    Call `compile`, then `start` with the weights. `background.activate` takes new executables into
    use. From the first of each kind on it `can_draft`.

    Not thread-safe: one thread starts, calls and activates, or one after the other.

    Args:
      background: gets the executables. Default: a new one.
    """

    def __init__(
        self,
        model: Model,
        options: DraftModelOptions,
        background: BackgroundCompile | None = None,
    ):
        self.model = model
        self.options = options
        self.kv_shape = options.kv_shape
        self.max_draft_tokens = options.max_draft_tokens
        self.background = BackgroundCompile() if background is None else background
        self._shapes = options.shapes
        self._ready: list[DraftShape] = []
        self._draft_probs = options.draft_probs
        self._executables = Executables(options.compiler_options)
        self._compiled: dict[str, jax.stages.Compiled] = {}  # active
        self._leaves: tuple[jax.Array, ...] = ()
        self._kv: KV = ()

    @property
    def proposes(self) -> bool:
        """True if its drafts are for verification by rejection."""
        return self._draft_probs is not None

    @property
    def vocab_size(self) -> int:
        return self.model.spec.vocab_size

    @property
    def context(self) -> int:
        """Tokens of the longest sequence that it can take in."""
        blocks = self._shapes.extend[-1].max_blocks * self.kv_shape.block_size
        return min(self.model.spec.max_position_embeddings, blocks)

    @property
    def extend_tokens(self) -> int:
        """Tokens that one `extend` takes."""
        return max((s.num_tokens for s in self._shapes.extend if s in self._ready), default=0)

    @property
    def extend_rows(self) -> int:
        """Sequences that one `extend` takes."""
        return max((s.num_seqs for s in self._shapes.extend if s in self._ready), default=0)

    @property
    def can_draft(self) -> bool:
        return all(any(shape in self._ready for shape in kind) for kind in self._shapes)

    def compile(self) -> None:
        """Start to lower and compile everything in threads."""
        executables, options = self._executables, self.options
        sharding = options.placement.kv_sharding(self.model)
        executables.add("new_kv", self._new_kv, out_shardings=sharding)
        executables.pause(PATIENCE_S)  # serving begins without any of these
        for shape in self._shapes.extend:
            self._add(shape, make_extend(self._pass(shape)))
        for shape in self._shapes.draft:
            draft = make_draft(self._pass(shape), options.max_draft_tokens)
            self._add(shape, draft, *options.placement.put(self._latest(shape)))
        executables.close()
        shapes = [*self._shapes.extend, *self._shapes.draft]
        self.background.add(
            executables,
            {shape.name: partial(self._activate, shape) for shape in shapes},
            memory_limit=options.memory_limit,
            remedy="--num-blocks",
        )
        self.background.after_activation(self._check_complete)

    def _pass(self, shape: DraftShape) -> DraftPass:
        return DraftPass(
            model=self.model,
            shape=shape,
            block_size=self.kv_shape.block_size,
            implementation=self.options.implementation,
            sampler=self.options.sampler,
            uniform=self.options.uniform,
        )

    def _add(self, shape: DraftShape, function: Callable[..., Any], *proposed: Any) -> None:
        place, model = self.options.placement, self.model
        inputs = [place.leaves(model), place.kv(model, self.kv_shape), place.i32(shape.width)]
        sharded = place.shard_step(model, function)
        self._executables.add(shape.name, sharded, *inputs, *proposed, donate_argnums=1)

    def compiled(self) -> dict[str, jax.stages.Compiled]:
        """Return the active executables by name. Thread-safe."""
        return self._compiled.copy()

    def start(self, leaves: tuple[jax.Array, ...]) -> None:
        """Take the weights, which may be the target's own arrays, and make the KV cache."""
        self._leaves = leaves
        self.reset()
        self._executables.resume()

    def reset(self) -> None:
        """Make the KV cache anew: what it held is lost, and so are all drafts."""
        if self._draft_probs is not None:
            self._draft_probs.reset()
        self._kv = ()  # first, or there would be no room for the new
        self._kv = jax.block_until_ready(self._executables["new_kv"]())

    def _activate(self, shape: DraftShape) -> None:
        try:
            self._compiled[shape.name] = self._executables[shape.name]
            self._call(shape, (), *self._latest(shape))  # writes nothing: every index is padding
            jax.block_until_ready(self._kv)
        except Exception:  # drafts are dispensable: the engine goes on
            log.exception("%s cannot run: it is left out", shape.name)
        else:
            self._ready.append(shape)

    def _check_complete(self) -> None:
        if self.background.complete and not self.can_draft:
            log.error("the draft model cannot run: no drafts")

    def extend(self, rows: Seq[Row]) -> None:
        """Compute keys and values of the rows' tokens, in one call. Does not wait for it."""
        assert len(rows) <= self.extend_rows
        self._call(self._choose(self._shapes.extend, rows), rows)

    def draft(self, rows: Seq[Row]) -> tuple[np.ndarray, np.ndarray]:
        """Draft the continuation of each sequence, in as few calls as possible. Waits.

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
        """Return the smallest shape that takes all rows, or the largest."""
        ready = [shape for shape in shapes if shape in self._ready]
        return next((shape for shape in ready if shape.most(rows) == len(rows)), ready[-1])

    def _call(self, shape: DraftShape, rows: Seq[Row], *proposed: Proposed) -> Any:
        packed = shape.pack(rows)
        self._kv, out = self._compiled[shape.name](self._leaves, self._kv, packed, *proposed)
        return out

    def _latest(self, shape: DraftShape) -> tuple[Proposed, ...]:
        """Return the `DraftProbs` that an executable takes and gives: one argument, or none."""
        if not shape.proposes:
            return ()
        assert self._draft_probs is not None
        return (self._draft_probs.latest,)

    def _new_kv(self) -> KV:
        whole = self.options.placement.whole_kv(self.model, self.kv_shape)
        layer = whole.layer
        return tuple(jnp.zeros(layer.shape, layer.dtype) for _ in range(whole.num_layers))
