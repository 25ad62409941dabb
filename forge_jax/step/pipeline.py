"""Pipeline parallelism: the stages of this process, and the micro-batches in flight.

All processes follow the same order of operations. Each process performs the operations of its
stages. Two devices therefore never wait for each other. A micro-batch moves one stage at a time,
together with all others in flight, the oldest first. At most one is in each stage. JAX dispatches
asynchronously, so the stages compute at the same time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from forge_jax.models.kv import KV
from forge_jax.sampling_params import MAX_LOGPROBS
from forge_jax.schedule.plan import FED_BACK
from forge_jax.step.links import Link
from forge_jax.step.results import begin_copy
from forge_jax.step.state import StepState
from forge_jax.step.step import StepOut
from forge_jax.step.step_builder import StepBuilder

if TYPE_CHECKING:
    from forge_jax.models.decoder import Model
    from forge_jax.step.executables import Executables
    from forge_jax.step.inputs import StepShape
    from forge_jax.step.options import RunnerOptions


class PipelineBuilder(StepBuilder):
    """A builder that adds the executables of this process's stages, and of the links between them.

    Attributes:
      own: the builders of this process's stages, by the stages' indices.
      links: from each stage to the next, and from the last to the first.
    """

    def __init__(self, model: Model, options: RunnerOptions):
        super().__init__(model, options)
        stages = options.stages
        self.own = {
            index: StepBuilder(stage.model, options.of_stage(stage))
            for index, stage in enumerate(stages)
            if stage.placement.own_devices
        }
        self.links = [
            Link(f"{index}-to-{to}", stage.placement, stages[to].placement)
            for index, stage in enumerate(stages)
            for to in [(index + 1) % len(stages)]
        ]

    def names(self, shape: StepShape) -> list[str]:
        return [builder.name(shape.name) for builder in self.own.values()]

    def add_step(self, executables: Executables, shape: StepShape) -> None:
        for builder in self.own.values():
            builder.add_step(executables, shape)
        if 0 in self.own:
            self.own[0].add_take_tokens(executables, shape)
        for link in self.links[:-1]:
            link.add(executables, shape, self.stream(shape))
        self.links[-1].add(executables, shape, self._out(shape))

    def _out(self, shape: StepShape) -> Any:
        """Return the shapes of a `StepOut`."""
        rows, top = shape.num_rows, min(MAX_LOGPROBS, self._model.spec.vocab_size)
        sizes = (2 * rows + shape.num_seqs,), (rows,), (rows,), (rows, top), (rows, top)
        dtypes = np.int32, np.float32, np.int32, np.int32, np.float32
        return StepOut(*map(jax.ShapeDtypeStruct, sizes, dtypes))  # type: ignore[arg-type]

    def add_new_state(self, executables: Executables) -> None:
        for builder in self.own.values():
            builder.add_new_state(executables)

    def add_slot_updates(self, executables: Executables) -> None:
        for builder in self.own.values():
            builder.add_slot_updates(executables)


@dataclass(slots=True, eq=False)
class Batch:
    """A micro-batch in flight, or with a result.

    Attributes:
      number: counts all micro-batches.
      updates: the slot updates that each stage performs before it: executable and argument.
      samples: the slots whose next token it samples.
      stage: the index of the stage that computes it.
      stream: dtype[T, d], the residual stream after this stage; after the last, the `StepOut`. None
        in a process that has no device of the stage.
      out: the result on the first stage; None before it is there, or in another process.
      done: True if it has left the last stage.
    """

    number: int
    shape: StepShape
    packed: np.ndarray
    masks: np.ndarray | None
    updates: tuple[tuple[str, np.ndarray], ...]
    samples: frozenset[int]
    stage: int = 0
    stream: Any = None
    out: StepOut | None = None
    done: bool = False


class Pipeline:
    """The state of this process's stages, and the micro-batches in flight.

    It takes the place of `StepState`. Its weights are those of all its stages in order.

    Args:
      builder: the builder of the executables.
      states: by the stages' indices.
    """

    def __init__(self, builder: PipelineBuilder, states: Mapping[int, StepState]):
        self._builder = builder
        self._states = states
        self._last = len(builder.links) - 1
        self._flight: deque[Batch] = deque()  # the oldest first
        self._updates: list[tuple[str, np.ndarray]] = []  # for the next micro-batch
        self._count = 0
        self.adapters: tuple[jax.Array, ...] = ()

    @classmethod
    def of(cls, builder: PipelineBuilder, options: RunnerOptions) -> Pipeline:
        """Return a pipeline without weights and KV cache."""
        states = {
            index: StepState(own, options.of_stage(options.stages[index]))
            for index, own in builder.own.items()
        }
        return cls(builder, states)

    @property
    def states(self) -> list[StepState]:
        """The states of this process's stages, in their order."""
        return list(self._states.values())

    @property
    def compiled(self) -> dict[str, jax.stages.Compiled]:
        """The active executables, with the stage in their names."""
        return {
            self._builder.own[index].name(name): executable
            for index, state in self._states.items()
            for name, executable in state.compiled.items()
        }

    @property
    def weights(self) -> tuple[jax.Array, ...]:
        return tuple(leaf for state in self.states for leaf in state.weights)

    @property
    def kv(self) -> KV:
        return tuple(layer for state in self.states for layer in state.kv)

    @property
    def slots(self) -> Any:
        return [state.slots for state in self.states]

    def set_weights(self, leaves: tuple[jax.Array, ...]) -> None:
        for state, own in self._by_stage(leaves):
            state.set_weights(own)

    def replace_weights(self, leaves: tuple[jax.Array, ...]) -> None:
        for state, own in self._by_stage(leaves):
            state.replace_weights(own)

    def _by_stage(
        self, leaves: tuple[jax.Array, ...]
    ) -> list[tuple[StepState, tuple[jax.Array, ...]]]:
        parts, start = [], 0
        for index, state in self._states.items():
            end = start + self._builder.own[index].num_leaves
            parts.append((state, leaves[start:end]))
            start = end
        assert start == len(leaves)
        return parts

    def create(self, executables: Executables) -> None:
        for state in self.states:
            state.create(executables)

    def allocate(self) -> None:
        for state in self.states:
            state.allocate()

    def release(self) -> None:
        for state in self.states:
            state.release()

    def renew(self, executables: Executables) -> None:
        """Recreate the KV cache and slots after a step has raised, and drop what is in flight."""
        self._flight.clear()
        self._updates.clear()
        for state in self.states:
            state.renew(executables)

    def use(self, name: str, executables: Executables) -> None:
        for state in self.states:
            state.use(name, executables)

    def activate(self, shape: StepShape, executables: Executables) -> None:
        """Run a shape on all stages without sequences."""
        for state in self.states:
            state.prepare(shape, executables)
        if 0 in self._states:
            self._states[0].use(f"take[{shape.name}]", executables)
        for link in self._builder.links:
            link.prepare(shape, executables)
        batch = self.run(shape, self._builder.pack_empty(shape), None)
        self.complete(batch.number)
        jax.block_until_ready((batch.out, self.slots))

    def update_slots(self, name: str, packed: np.ndarray) -> None:
        """Run `admit` or `set_history` on each stage, before the next micro-batch."""
        self._updates.append((name, packed))

    def run(self, shape: StepShape, packed: np.ndarray, masks: np.ndarray | None) -> Batch:
        """Compute a micro-batch in the first stage. It becomes the newest one in flight."""
        needed, samples = _slots(shape, packed)
        if self._flight and self._flight[-1].stage == 0:
            self._advance()
        while any(needed & batch.samples for batch in self._flight):
            self._advance()
        updates, self._updates = tuple(self._updates), []
        batch = Batch(self._count, shape, packed, masks, updates, samples)
        self._count += 1
        self._flight.append(batch)
        self._compute(batch)
        return batch

    def complete(self, number: int) -> None:
        """Advance until a micro-batch has left the last stage."""
        while self._flight and self._flight[0].number <= number:
            self._advance()

    def _advance(self) -> None:
        """Move each micro-batch in flight by one stage."""
        for batch in tuple(self._flight):
            link = self._builder.links[batch.stage]
            batch.stream = link.send(batch.shape, batch.stream)
            if batch.stage == self._last:
                self._flight.popleft()
                self._finish(batch)
            else:
                batch.stage += 1
                self._compute(batch)

    def _compute(self, batch: Batch) -> None:
        state = self._states.get(batch.stage)
        if state is None:
            return
        for name, packed in batch.updates:
            state.update_slots(name, packed)
        batch.stream = state.run_stage(batch.shape, batch.packed, batch.masks, batch.stream)

    def _finish(self, batch: Batch) -> None:
        """Feed the tokens of a micro-batch back on the first stage, which has the result now."""
        batch.done = True
        if 0 in self._states:
            batch.out, batch.stream = batch.stream, None
            assert batch.out is not None
            self._states[0].take_tokens(batch.shape, batch.packed, batch.out.packed)
            begin_copy(batch.out.packed)


def _slots(shape: StepShape, packed: np.ndarray) -> tuple[frozenset[int], frozenset[int]]:
    """Return the slots whose last token a step needs, and those whose next token it samples."""
    m = shape.split(packed)
    num_seqs, num_tokens = packed[0], packed[1]
    needed = m.slot[m.token_seq[:num_tokens][m.tokens[:num_tokens] == FED_BACK]]
    samples = m.slot[:num_seqs][m.samples[:num_seqs] > 0]
    return frozenset(needed.tolist()), frozenset(samples.tolist())
