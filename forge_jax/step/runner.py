"""`Runner`: the real device. Turns plans into dispatches of compiled executables.

All executables are lowered from shapes, so they compile while the weights are being read. The first
few suffice for any plan within `limits`. The others are activated between steps once they are
compiled. The thread that dispatches never traces or compiles. `dispatch` sends one packed array and
starts the copy of the result. `read` waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from forge_jax.schedule.plan import StepResult
from forge_jax.schedule.wire_array import WireArray
from forge_jax.step.executables import PATIENCE_S, BackgroundCompile, Executables
from forge_jax.step.host_blocks import HostBlocks
from forge_jax.step.micro_batches import MicroBatch, joined_results, split_plan
from forge_jax.step.mirror import (
    Activate,
    ActivatePooling,
    CompilePooling,
    Complete,
    Mirror,
    Operation,
    Run,
    SetAdapter,
    UpdateSlots,
)
from forge_jax.step.pipeline import Batch, Pipeline, PipelineBuilder
from forge_jax.step.pooling import Pooling
from forge_jax.step.results import Pending, begin_copy, read_result
from forge_jax.step.state import StepState
from forge_jax.step.step_builder import StepBuilder
from forge_jax.step.step_shapes import StepLimits, step_limits
from forge_jax.step.uploads import Uploads

if TYPE_CHECKING:
    from forge_jax.models.decoder import Model
    from forge_jax.sampling_params import SamplingParams
    from forge_jax.schedule.plan import StepPlan
    from forge_jax.step.inputs import StepShape
    from forge_jax.step.options import RunnerOptions


class PendingBatches(NamedTuple):
    """A step of a pipeline that has been dispatched."""

    plan: StepPlan
    # Each micro-batch, with the parameters of its sequences, or None if no logprobs are needed.
    batches: list[tuple[MicroBatch, tuple[SamplingParams, ...] | None, Batch]]


class Runner:
    """The owner of the device state (weights, KV cache, slots) and the executables.

    Call `compile`, then `start` with the weights. Then plans within `limits` run, and
    `background.activate` between two of them adds new executables.

    A runner is not thread-safe: only one thread at a time may start, dispatch, read or activate.

    Args:
      background: receives the executables that `start` does not wait for. Default: a new one.

    Attributes:
      mirror: the other processes of the mesh, which follow this runner from `start` on. None: there
        are none, or this runner follows another one.
      host: copies of blocks in host memory. None: there are none.
    """

    def __init__(
        self, model: Model, options: RunnerOptions, background: BackgroundCompile | None = None
    ):
        self.model = model
        self.options = options
        self.mirror: Mirror | None = None
        self.background = BackgroundCompile() if background is None else background
        self._builder: StepBuilder
        self.state: StepState | Pipeline
        if options.stages:
            builder = self._builder = PipelineBuilder(model, options)
            self.state = Pipeline.of(builder, options)
        else:
            self._builder = StepBuilder(model, options)
            self.state = StepState(self._builder, options)
        self.host = _host_blocks(self._whole, options) if options.host_copies else None
        self._uploads = Uploads(options, model.spec.vocab_size)
        self._executables = Executables(options.compiler_options, store=options.store)
        self._ready: list[StepShape] = []  # active, smallest first
        self._pooling = Pooling(options)

    @property
    def _whole(self) -> StepState:
        """The state of a model without stages."""
        assert isinstance(self.state, StepState)
        return self.state

    @property
    def settings(self) -> dict[str, Any]:
        return self._builder.settings

    @property
    def limits(self) -> StepLimits:
        """Limits of the plans that can run now. They only grow."""
        return step_limits(self._ready)

    @property
    def leaves(self) -> tuple[jax.Array, ...]:
        """The weights, without LoRA adapters and steering vectors."""
        return self.state.weights

    @property
    def adapters(self) -> tuple[jax.Array, ...]:
        """The LoRA adapters, as in `LoraShape.stacks`; empty without them."""
        return self.state.adapters

    @property
    def resident_bytes(self) -> int:
        return self._builder.resident_bytes

    def compile(self) -> None:
        """Start to lower and compile everything in threads, the first shapes first."""
        executables, options = self._executables, self.options
        self._builder.add_new_state(executables)
        self.state.create(executables)
        for shape in options.first_shapes:
            self._builder.add_step(executables, shape)
        self._builder.add_slot_updates(executables)
        if options.host_copies:
            self._builder.add_block_copies(executables)
        executables.pause(PATIENCE_S)
        for shape in options.late_shapes:
            self._builder.add_step(executables, shape)
        executables.close()
        self.background.add(
            executables,
            {shape.name: partial(self._activate, shape) for shape in options.late_shapes},
            memory_limit=options.memory_limit,
            remedy="--num-blocks or --max-num-batched-tokens",
        )

    def memory_bytes(self) -> int:
        """Return the bytes that the first executables need, including weights and KV cache. Waits.

        The value is XLA's own analysis of the buffers; 0 if it has none.
        """
        shapes = self.options.first_shapes
        names = [name for shape in shapes for name in self._builder.names(shape)]
        return max(map(self._executables.memory_bytes, names))

    def start(self, leaves: tuple[jax.Array, ...]) -> None:
        """Set the weights, and run each of the first executables once."""
        self.state.set_weights(leaves)
        self.allocate()
        updates = ("admit", "set_history", *(["set_adapter"] if self.options.lora else []))
        for name in updates:
            self.state.use(name, self._executables)
        for shape in self.options.first_shapes:
            self._activate(shape)
        if self.host is not None:
            for name in ("save_blocks", "load_blocks"):
                self.state.use(name, self._executables)
            self.host.warm_up()
        self._executables.resume()

    def allocate(self) -> None:
        """Wait for the KV cache and slots, whose allocation `compile` has started."""
        self.state.allocate()

    def release(self) -> None:
        """Release the KV cache and slots, so that another runner can use the memory."""
        self.state.release()

    def reset(self) -> None:
        assert self.mirror is None, "a failed step ends all processes of a mesh"
        self._uploads.reset()
        self.state.renew(self._executables)

    def set_adapter(self, place: int, arrays: tuple[np.ndarray, ...]) -> None:
        """Write an adapter (see `LoraShape.adapter`) to a slot that no sequence uses.

        Call it between two steps, in the thread that dispatches. If it raises, the adapters are
        unchanged.
        """
        lora, mesh = self.options.lora, self.options.mesh
        assert lora is not None and 1 <= place <= lora.places
        self._tell(lambda: SetAdapter(place, tuple(map(WireArray.of, arrays))))
        adapter = arrays if mesh is None else mesh.cut_adapter(self.model, arrays)
        self._whole.set_adapter(place, adapter)

    def set_steering(self, stack: np.ndarray) -> None:
        """Set the values of all steering vectors, f32[n, L, d], before the first sequence."""
        self._whole.set_steering(stack)

    def replace_weights(self, leaves: tuple[jax.Array, ...]) -> None:
        """Use other weights from the next step on. LoRA adapters and steering vectors stay.

        Call it in the thread that dispatches, while no step is in flight.
        """
        self.state.replace_weights(leaves)

    @property
    def can_pool(self) -> bool:
        return bool(self._pooling.ready)

    def compile_pooling(self) -> None:
        self._tell(CompilePooling)
        self._pooling.compile(self._builder)

    def activate_pooling(self) -> None:
        self._tell(ActivatePooling)
        self._pooling.activate(self._whole)

    def compiled(self) -> dict[str, jax.stages.Compiled]:
        return self.state.compiled.copy()

    def settle(self) -> None:
        jax.block_until_ready((self.state.kv, self.state.slots))

    @property
    def command_buffers(self) -> bool:
        return self.options.command_buffers and self.options.device.platform != "cpu"

    def dispatch(self, plan: StepPlan) -> Pending | PendingBatches:
        for name, packed in self._uploads.admissions(plan.admissions):
            self._tell(lambda name=name, packed=packed: UpdateSlots(name, WireArray.of(packed)))
            self.state.update_slots(name, packed)
        if isinstance(self.state, Pipeline):
            return self._dispatch_batches(self.state, plan)
        shape = self._choose(plan)
        packed, masks, params, returned = self._uploads.step(plan, shape)
        self._tell(lambda: Run.of(shape, packed, masks))
        out, pooled = self.state.run(shape, packed, masks)
        begin_copy(out.packed)
        return Pending(plan, shape, out, params, pooled, returned)

    def _dispatch_batches(self, pipeline: Pipeline, plan: StepPlan) -> PendingBatches:
        """Compute the micro-batches of a plan, one after the other, in the first stage."""
        pending = []
        for part in split_plan(plan, len(self.options.stages)):
            shape = self._choose(part.plan)
            packed, masks, params, _ = self._uploads.step(part.plan, shape)
            self._tell(lambda shape=shape, packed=packed, masks=masks: Run.of(shape, packed, masks))
            pending.append((part, params, pipeline.run(shape, packed, masks)))
        return PendingBatches(plan, pending)

    def read(self, pending: Pending | PendingBatches) -> StepResult:
        if isinstance(pending, Pending):
            return read_result(pending)
        results = []
        for part, params, batch in pending.batches:
            self._complete(batch)
            assert batch.out is not None, "only the process of the first stage reads"
            result = read_result(Pending(part.plan, batch.shape, batch.out, params))
            results.append((part, result.sequences))
        return StepResult(pending.plan.step, joined_results(results))

    def _complete(self, batch: Batch) -> None:
        if not batch.done:
            self._tell(lambda: Complete(batch.number))
            self.complete(batch.number)

    def complete(self, number: int) -> None:
        """Move a micro-batch through the remaining stages of the pipeline."""
        assert isinstance(self.state, Pipeline)
        self.state.complete(number)

    def _choose(self, plan: StepPlan) -> StepShape:
        for shape in self._pooling.ready if plan.pools else self._ready:
            if shape.fits(plan):
                return shape
        raise AssertionError(
            f"no executable fits {plan.num_sequences} sequences, {plan.num_tokens} tokens, "
            f"{plan.num_rows} rows"
        )

    def run(self, name: str, packed: np.ndarray, masks: np.ndarray | None) -> None:
        """Run an active step whose result another process reads."""
        active = (*self._ready, *self._pooling.ready)
        shape = next(shape for shape in active if shape.name == name)
        self.state.run(shape, packed, masks)

    def activate(self, name: str) -> None:
        """Wait for a step that is compiling, and activate it."""
        self._activate(next(shape for shape in self.options.late_shapes if shape.name == name))

    def _tell(self, operation: Callable[[], Operation]) -> None:
        """Let the other processes of the mesh perform an operation, if there are any."""
        if self.mirror is not None:
            self.mirror.send(operation())

    def _activate(self, shape: StepShape) -> None:
        self._tell(lambda: Activate(shape.name))
        self.state.activate(shape, self._executables)
        self._ready = [s for s in self.options.shapes if s in self._ready or s == shape]


def _host_blocks(state: StepState, options: RunnerOptions) -> HostBlocks:
    rows = options.placement.block_rows(options.kv_shape.block_bytes)
    assert rows.sharding is not None
    return HostBlocks(
        state,
        rows.sharding,
        num_blocks=options.kv_shape.num_blocks,
        block_bytes=rows.size,
    )
