"""A draft model on the device: its weights, its KV cache and its executables.

`draft.py` manages sequences and blocks. `draft_step.py` has the functions that are compiled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

import jax
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
from forge_jax.step.executables import PATIENCE_S, BackgroundCompile, Executables, Store
from forge_jax.step.placement import Placement
from forge_jax.step.results import begin_copy
from forge_kernels.attention import Implementation

if TYPE_CHECKING:
    from forge_jax.models.decoder import Model
    from forge_jax.step.kv_cache import KVShape
    from forge_jax.step.mesh import TensorMesh
    from forge_jax.step.options import CompilerOptions

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class DraftModelOptions:
    """The sizes and choices that determine a draft model's executables.

    Args:
      max_draft_tokens: the length of a draft.
      mesh: the devices that share the target model, including `device`; None if there is only one.
        A draft model that is not split is replicated on each device.
      implementation: the implementation of attention.
      sampler: the sampler of the target's steps, because the noise must have the same bits.
      draft_probs: receives the distributions of drafts, from shapes that propose.
      uniform: True in the deterministic tier.
      memory_limit: the device memory in bytes for weights, KV cache and a call; None: no limit.
      store: holds executables that are loaded instead of compiled.
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
    store: Store | None = None

    @cached_property
    def placement(self) -> Placement:
        return Placement(self.device, self.mesh)


class DraftModel:
    """The device state of a draft model and its executables.

    Call `compile`, then `start` with the weights. `background.activate` activates new executables.
    `can_draft` is True as soon as there is one of each kind.

    Calls must not be concurrent.

    Args:
      background: receives the executables. Default: a new one.
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
        self._executables = Executables(options.compiler_options, store=options.store)
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
        """The longest supported sequence in tokens."""
        blocks = self._shapes.extend[-1].max_blocks * self.kv_shape.block_size
        return min(self.model.spec.max_context, blocks)

    @property
    def extend_tokens(self) -> int:
        """The maximum number of tokens of one `extend` call."""
        return max((s.num_tokens for s in self._shapes.extend if s in self._ready), default=0)

    @property
    def extend_rows(self) -> int:
        """The maximum number of sequences of one `extend` call."""
        return max((s.num_seqs for s in self._shapes.extend if s in self._ready), default=0)

    @property
    def can_draft(self) -> bool:
        return all(any(shape in self._ready for shape in kind) for kind in self._shapes)

    def compile(self) -> None:
        """Start to lower and compile everything in threads."""
        executables, options = self._executables, self.options
        self.add_new_kv(executables)
        executables.pause(PATIENCE_S)  # serving starts without these
        self.add_passes(executables)
        executables.close()
        shapes = [*self._shapes.extend, *self._shapes.draft]
        self.background.add(
            executables,
            {shape.name: partial(self._activate, shape) for shape in shapes},
            memory_limit=options.memory_limit,
            remedy="--num-blocks",
        )
        self.background.after_activation(self._check_complete)

    def add_new_kv(self, executables: Executables) -> None:
        """Add `new_kv() -> kv`."""
        sharding = self.options.placement.kv_sharding(self.model)
        executables.add("new_kv", self._new_kv, out_shardings=sharding)

    def add_passes(self, executables: Executables) -> None:
        """Add an executable for each shape, which extends the cache or drafts."""
        for shape in self._shapes.extend:
            self._add(executables, shape, make_extend(self._pass(shape)))
        for shape in self._shapes.draft:
            draft = make_draft(self._pass(shape), self.options.max_draft_tokens)
            self._add(executables, shape, draft)

    def _pass(self, shape: DraftShape) -> DraftPass:
        return DraftPass(
            model=self.model,
            shape=shape,
            block_size=self.kv_shape.block_size,
            implementation=self.options.implementation,
            sampler=self.options.sampler,
            uniform=self.options.uniform,
        )

    def _add(
        self, executables: Executables, shape: DraftShape, function: Callable[..., Any]
    ) -> None:
        place, model = self.options.placement, self.model
        inputs = [place.leaves(model), place.kv(model, self.kv_shape), place.i32(shape.width)]
        if shape.proposes:
            assert self._draft_probs is not None
            inputs.append(place.put(self._draft_probs.shapes))
        sharded = place.shard_step(model, function)
        executables.add(shape.name, sharded, *inputs, donate_argnums=1)

    def compiled(self) -> dict[str, jax.stages.Compiled]:
        """Return the active executables by name. Thread-safe."""
        return self._compiled.copy()

    def start(self, leaves: tuple[jax.Array, ...]) -> None:
        """Set the weights, which may be the target's arrays, and create the KV cache."""
        self._leaves = leaves
        self.reset()
        self._executables.resume()

    def replace_weights(self, leaves: tuple[jax.Array, ...]) -> None:
        """Use other weights. Call `reset` afterwards, because the KV cache is of the old ones."""
        self._leaves = leaves

    @property
    def leaves(self) -> tuple[jax.Array, ...]:
        return self._leaves

    def release(self) -> None:
        """Release the KV cache. `reset` creates a new one."""
        self._kv = ()

    def reset(self) -> None:
        """Replace the KV cache with an empty one, and drop all drafts."""
        if self._draft_probs is not None:
            self._draft_probs.reset()
        self._kv = ()  # frees the old cache first, to make room for the new one
        self._kv = jax.block_until_ready(self._executables["new_kv"]())

    def _activate(self, shape: DraftShape) -> None:
        try:
            self._compiled[shape.name] = self._executables[shape.name]
            self._call(shape, (), *self._latest(shape))  # every index is padding: writes nothing
            jax.block_until_ready(self._kv)
        except Exception:  # drafts are optional, so the engine continues
            log.exception("%s cannot run and is skipped", shape.name)
        else:
            self._ready.append(shape)

    def _check_complete(self) -> None:
        if self.background.complete and not self.can_draft:
            log.error("the draft model cannot run: speculation is off")

    def extend(self, rows: Seq[Row]) -> None:
        """Compute keys and values of the rows' tokens in one call, without waiting for it."""
        assert len(rows) <= self.extend_rows
        self._call(self._choose(self._shapes.extend, rows), rows)

    def draft(self, rows: Seq[Row]) -> tuple[np.ndarray, np.ndarray]:
        """Draft the continuation of each sequence in as few calls as possible, and wait.

        Returns:
          The tokens, i32[len(rows), k], and the draft model's probability of each,
          f32[len(rows), k]. In a row, values from `end - position of the last known token` on are
          undefined.
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
            begin_copy(out)
            outs.append((out, count))
            first += count
        both = np.concatenate([np.asarray(out)[:, :count] for out, count in outs], axis=1)
        # Only after all calls have succeeded, because steps would raise with an invalid array.
        if self._draft_probs is not None:
            [self._draft_probs.latest] = proposed
        return both[0], both[1].view(np.float32)

    def _choose(self, shapes: Seq[DraftShape], rows: Seq[Row]) -> DraftShape:
        """Return the smallest shape that fits all rows, or the largest shape."""
        ready = [shape for shape in shapes if shape in self._ready]
        return next((shape for shape in ready if shape.most(rows) == len(rows)), ready[-1])

    def _call(self, shape: DraftShape, rows: Seq[Row], *proposed: Proposed) -> Any:
        packed = shape.pack(rows)
        self._kv, out = self._compiled[shape.name](self._leaves, self._kv, packed, *proposed)
        return out

    def _latest(self, shape: DraftShape) -> tuple[Proposed, ...]:
        """Return the `DraftProbs` argument of an executable, or () if it has none."""
        if not shape.proposes:
            return ()
        assert self._draft_probs is not None
        return (self._draft_probs.latest,)

    def _new_kv(self) -> KV:
        return self.options.placement.whole_kv(self.model, self.kv_shape).empty()
