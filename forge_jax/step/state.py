"""`StepState`: a runner's arrays on the device, and the executables that run on them."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from forge_jax.models.kv import KV
from forge_jax.step.inputs import StepShape
from forge_jax.step.mesh import placed
from forge_jax.step.slots import Slots
from forge_jax.step.step import Pooled, StepOut
from forge_jax.step.uploads import pad_masks

if TYPE_CHECKING:
    from forge_jax.step.executables import Executables
    from forge_jax.step.options import RunnerOptions
    from forge_jax.step.step_builder import StepBuilder


class StepState:
    """Weights, LoRA adapters, KV cache and slots, and the active executables.

    A step donates the KV cache and slots, and replaces them with its results.
    """

    def __init__(self, builder: StepBuilder, options: RunnerOptions):
        self.compiled: dict[str, jax.stages.Compiled] = {}  # active, by name
        self.leaves: tuple[jax.Array, ...] = ()  # weights, adapters, steering vectors
        self.kv: KV = ()
        self.slots: Any = None
        self._creating: Future[tuple[KV, Slots]] | None = None
        self._num_weights = 0
        self._sums: Any = None  # f32[num_slots, d], None until a step pools
        self._no_masks: dict[str, jax.Array] = {}  # dummies for steps without masks, never read
        self._builder = builder
        self._draft_probs = options.draft_probs
        self._sharding = options.placement.sharding

    def set_weights(self, leaves: tuple[jax.Array, ...]) -> None:
        """Set the weights, and zero every LoRA adapter and steering vector."""
        stacks = tuple(
            placed(np.zeros(stack.shape, stack.dtype), stack.sharding)
            for stack in self._builder.stacks + self._builder.steering
        )
        self._num_weights = len(leaves)
        self.leaves = (*leaves, *stacks)

    def replace_weights(self, leaves: tuple[jax.Array, ...]) -> None:
        """Replace the weights by arrays of the same shapes, and keep the others."""
        assert len(leaves) == self._num_weights
        self.leaves = (*leaves, *self.leaves[self._num_weights :])

    @property
    def weights(self) -> tuple[jax.Array, ...]:
        """The weights without adapters and steering vectors."""
        return self.leaves[: self._num_weights]

    @property
    def adapters(self) -> tuple[jax.Array, ...]:
        """The LoRA adapters, as in `LoraShape.stacks`."""
        return self.leaves[self._num_weights : self._num_weights + len(self._builder.stacks)]

    def set_adapter(self, place: int, adapter: tuple[Any, ...]) -> None:
        """Write a LoRA adapter to its slot. If it raises, the adapters are unchanged."""
        steering = self.leaves[self._num_weights + len(self._builder.stacks) :]
        new = self.compiled["set_adapter"](self.adapters, np.int32(place), adapter)
        self.leaves = (*self.weights, *jax.block_until_ready(new), *steering)

    def set_steering(self, stack: np.ndarray) -> None:
        """Set the values of all steering vectors, f32[n, L, d]."""
        [shape] = self._builder.steering
        assert stack.shape == shape.shape
        self.leaves = (*self.leaves[:-1], placed(stack, shape.sharding))

    def new_sums(self) -> None:
        zeros = np.zeros(self._builder.sums.shape, np.float32)
        self._sums = placed(zeros, self._sharding)

    def create(self, executables: Executables) -> None:
        """Start to allocate the KV cache and slots, which may touch all of the cache's pages."""
        self._creating = executables.call(self._builder.name("new_state"))

    def allocate(self) -> None:
        """Wait for the KV cache and slots."""
        if self._creating is not None:
            (self.kv, self.slots), self._creating = self._creating.result(), None

    def release(self) -> None:
        """Drop the KV cache and slots, whose memory is then free."""
        self.allocate()
        self.kv, self.slots = (), None

    def renew(self, executables: Executables) -> None:
        """Recreate the KV cache and slots after a step has raised: its donated arrays are lost."""
        self.release()  # first, or there would be no memory for the new ones
        new_state = executables[self._builder.name("new_state")]
        self.kv, self.slots = jax.block_until_ready(new_state())
        if self._sums is not None:
            self.new_sums()

    def use(self, name: str, executables: Executables) -> None:
        """Wait for an executable, and use it from now on."""
        self.compiled[name] = executables[self._builder.name(name)]

    def activate(self, shape: StepShape, executables: Executables) -> None:
        """Run the real step without sequences. It writes nothing: every index is padding."""
        self.prepare(shape, executables)
        self.run(shape, self._builder.pack_empty(shape), None)[0].packed.block_until_ready()

    def prepare(self, shape: StepShape, executables: Executables) -> None:
        """Wait for the step of a shape. `run` and `run_stage` then accept the shape."""
        self.use(shape.name, executables)
        num_rows, width = self._builder.masks_shape(shape)
        no_masks = pad_masks(np.empty((0, width), np.int32), num_rows)
        self._no_masks[shape.name] = placed(no_masks, self._sharding)

    def update_slots(self, name: str, packed: np.ndarray) -> None:
        """Run `admit` or `set_history`."""
        self.slots = self.compiled[name](self.slots, packed)

    def run(
        self, shape: StepShape, packed: np.ndarray, masks: np.ndarray | None
    ) -> tuple[StepOut, Pooled | None]:
        # The call uploads the inputs: a `device_put` before it would take half as long again.
        inputs = (packed, self._no_masks[shape.name] if masks is None else masks)
        step, proposed = self.compiled[shape.name], ()
        if self._draft_probs is not None and shape.max_drafts:
            proposed = (self._draft_probs.latest,)
        if not shape.pools:
            self.kv, self.slots, out = step(self.leaves, self.kv, self.slots, *inputs, *proposed)
            return out, None
        inputs = (*inputs, *(proposed or (None,)), self._sums)
        self.kv, self.slots, out, pooled = step(self.leaves, self.kv, self.slots, *inputs)
        self._sums = pooled.sums
        return out, pooled

    def run_stage(
        self,
        shape: StepShape,
        packed: np.ndarray,
        masks: np.ndarray | None,
        stream: jax.Array | None,
    ) -> Any:
        """Run the step of a stage of pipeline parallelism.

        Args:
          shape: an active shape.
          packed, masks: as in `run`.
          stream: dtype[T, d], from the stage before; None for the first stage.

        Returns:
          The stage's stream, or the `StepOut` of the last stage.
        """
        inputs = (packed, self._no_masks[shape.name] if masks is None else masks)
        given = () if stream is None else (None, None, stream)
        step = self.compiled[shape.name]
        self.kv, self.slots, out = step(self.leaves, self.kv, self.slots, *inputs, *given)
        return out

    def take_tokens(self, shape: StepShape, packed: np.ndarray, out: jax.Array) -> None:
        """Feed the tokens of a step back, if this is the first of several stages.

        Args:
          shape: an active shape.
          packed: the input of the step.
          out: its `StepOut.packed`, from the last stage.
        """
        self.slots = self.compiled[f"take[{shape.name}]"](self.slots, packed, out)
