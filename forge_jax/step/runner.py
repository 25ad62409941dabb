"""`Runner`: the real device. Turns plans into dispatches of compiled executables.

All executables are lowered from shapes, so they compile while the weights are being read. The first
few are enough to run any plan within `limits`; the others are adopted between steps when they have
been compiled. Nothing here traces or compiles in the thread that dispatches. `dispatch` sends one
packed array and starts the copy of the result; `read` waits for it.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from forge_jax.config import Verification
from forge_jax.errors import EngineError
from forge_jax.grammar.masks import mask_width
from forge_jax.models.kv import KV
from forge_jax.models.lora import LoraShape, set_adapter
from forge_jax.sampling_params import MAX_LOGIT_BIAS, SamplingParams
from forge_jax.schedule.plan import (
    Admission,
    ScheduledSequence,
    SequenceResult,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from forge_jax.step import inputs as meta_bits
from forge_jax.step.draft_probs import DraftProbs, Proposed
from forge_jax.step.executables import Executables, LateShapes
from forge_jax.step.inputs import SlotFlags, StepShape
from forge_jax.step.kv_cache import GIB, KVShape
from forge_jax.step.slots import (
    ADMISSIONS,
    Slots,
    admission_width,
    admit,
    pack_admissions,
    pack_history,
    set_history,
    slots_shape,
)
from forge_jax.step.step import Pooled, Sampler, StepOut, make_step
from forge_jax.weights.partition import shard_spec
from forge_kernels import cpu
from forge_kernels.attention import Implementation

if TYPE_CHECKING:
    from forge_jax.models.decoder import Model
    from forge_jax.step.mesh import TensorMesh

log = logging.getLogger(__name__)

# The first executables are there so soon if they were in the cache. Then the others had better wait
# until they run: tracing would only slow them down. Else there is time to trace.
PATIENCE_S = 1.0


class StepLimits(NamedTuple):
    """What any plan must keep to, so that there is an executable for it."""

    max_num_batched_tokens: int
    max_rows: int


class _Pending(NamedTuple):
    plan: StepPlan
    shape: StepShape
    out: StepOut
    params: tuple[SamplingParams, ...] | None  # of plan.sequences, where logprobs are asked for
    pooled: Pooled | None = None


# https://openxla.org/xla/determinism: some operations have fast forms without a fixed order of
# summation, and autotuning picks kernels by measured time, so two starts may pick different ones.
DETERMINISTIC_GPU_OPTIONS: dict[str, str | bool | int] = {
    "xla_gpu_exclude_nondeterministic_ops": True,
    "xla_gpu_autotune_level": 0,
}


def step_shapes(
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_rows: int,
    block_size: int,
    max_drafts: int = 0,
    deterministic: bool = False,
) -> list[StepShape]:
    """The executables of an engine, smallest first: a few decode sizes, a few mixed sizes.

    With drafts (at most `max_drafts` of a sequence), also a few sizes for nothing but those. The
    deterministic tier has one shape for every step: another may round differently.
    """

    def mixed(num_tokens: int) -> StepShape:
        return StepShape.mixed(num_tokens, max_num_seqs, max_rows, block_size, max_drafts)

    if deterministic:
        return [mixed(max_num_batched_tokens)]
    largest = min(max_num_seqs, max_num_batched_tokens)
    decode = [b for b in (4, 16, 64) if b < largest] + [largest]
    shapes = [StepShape.decode(b) for b in decode]
    if max_drafts:
        most = min(max_num_batched_tokens, max_num_seqs * (1 + max_drafts))
        shapes += [
            StepShape.verify(t, max_num_seqs, block_size, max_drafts)
            for t in (8, 32, 128)
            if t <= most
        ]
    several = [t for t in (64, 256, 1024) if t < max_num_batched_tokens] + [max_num_batched_tokens]
    return shapes + [mixed(t) for t in several]


def step_limits(shapes: Iterable[StepShape]) -> StepLimits:
    """Of the plans that these can run: those of the largest that takes prompts."""
    largest = max((s for s in shapes if s.prompts), key=lambda shape: shape.num_tokens)
    return StepLimits(largest.num_tokens, largest.num_rows)


def first_shapes(shapes: Iterable[StepShape], platform: str) -> list[StepShape]:
    """What serving begins with: one mixed shape, which takes decodes too.

    On the CPU, where a step costs what its tokens cost, the smallest. Elsewhere the largest: it
    needs the most memory, so that all that the memory must hold is known before serving begins.
    """
    mixed = [shape for shape in shapes if shape.prompts]
    return mixed[:1] if platform == "cpu" else mixed[-1:]


class Runner:
    """Owns the device state (weights, KV cache, slots) and the executables.

    Life: `compile`, then `start` with the weights; from then on plans within `limits` run, and
    `adopt` between two of them takes what has been compiled since, until `complete`.

    Not thread-safe: one thread starts, dispatches, reads and adopts, or one after the other.

    Args:
      shapes: of all executables, smallest first; the last takes any plan.
      first: those that `start` waits for; one of them takes prompts. Default:
        all.
      kv_shape: of one shard, if the model is cut.
      mesh: the devices that share the model, of which `device` is one; None: it is alone.
      implementation, sampler: of attention and of sampling.
      command_buffers: whether XLA:GPU may use command buffers (CUDA graphs).
      verification: of drafts. proposals: by rejection, what a draft model drew them from; None: the
        drafts come from the texts.
      lora: the adapters that there may be beside the model's weights; None: there never are any.
      memory_limit: bytes of the device that all of this may take; None: no matter how many.
      deterministic: compute every row in the same way. With one shape, the logits of a token are
        then the same bits whatever else is in the step.
    """

    def __init__(  # noqa: PLR0913
        self,
        model: Model,
        *,
        shapes: Iterable[StepShape],
        first: Iterable[StepShape] | None = None,
        kv_shape: KVShape,
        num_slots: int,
        max_blocks: int,
        device: jax.Device,
        implementation: Implementation = "auto",
        sampler: Sampler = "xla",
        verification: Verification = "coupled",
        draft_probs: DraftProbs | None = None,
        deterministic: bool = False,
        command_buffers: bool = True,
        lora: LoraShape | None = None,
        memory_limit: int | None = None,
        mesh: TensorMesh | None = None,
    ):
        self._model = model
        self._kv_shape = kv_shape
        self._max_blocks = max_blocks
        self._mesh = mesh
        # Of everything but weights and KV cache, which a mesh divides.
        self._sharding = jax.sharding.SingleDeviceSharding(device) if mesh is None else mesh.whole
        self._shapes = list(shapes)  # that can run, or will
        self._first = self._shapes.copy() if first is None else list(first)
        self._ready: list[StepShape] = []  # that can run, smallest first
        self._implementation: Implementation = implementation
        self._sampler: Sampler = sampler
        self._verification: Verification = verification
        self._draft_probs = draft_probs
        self._deterministic = deterministic
        self._memory_limit = memory_limit
        self._lora = lora
        self._stacks: tuple[jax.Array, ...] = ()  # of the adapters
        vocab_size = model.spec.vocab_size
        has_lora = lora is not None
        self._slots_shape = slots_shape(num_slots, max_blocks, vocab_size, lora=has_lora)
        self._slot_params: list[SamplingParams | None] = [None] * num_slots
        self._slot_flags = SlotFlags(num_slots)
        self._compiler_options = compiler_options(
            device.platform, command_buffers=command_buffers, deterministic=deterministic
        )
        self._executables = Executables(self._compiler_options)
        self._late = LateShapes(
            self._executables,
            [shape for shape in self._shapes if shape not in self._first],
            memory_limit,
            "--num-blocks or --max-num-batched-tokens",
        )
        self._compiled: dict[str, jax.stages.Compiled] = {}  # that run
        self._leaves: tuple[jax.Array, ...] = ()
        self._kv: KV = ()
        self._slots: Any = None
        self._no_masks: dict[str, jax.Array] = {}  # for steps without any: never read
        self._new: Future[tuple[KV, Slots]] | None = None  # both of them
        self._pools: list[StepShape] = []  # that can run, smallest first
        self._pooling: Executables | None = None  # of those, from the first request on
        self._pooling_lock = threading.Lock()
        self._sums: Any = None  # f32[num_slots, d], of those

    @property
    def executables(self) -> list[str]:
        """Names of what can run."""
        return list(self._compiled)

    @property
    def prompt_sizes(self) -> list[int]:
        """Tokens of the executables that take prompts, and compute unused rows as well."""
        return [shape.num_tokens for shape in self._shapes if shape.prompts]

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the bits of a step, besides weights, device and versions; as JSON.

        How many blocks the cache has is not among it: a row reads its own, wherever they are.
        """
        settings = {
            "shapes": [dataclasses.asdict(shape) for shape in self._shapes],
            "block_size": self._kv_shape.block_size,
            "max_blocks": self._max_blocks,
            "dtypes": [str(self._model.dtype), str(self._kv_shape.storage)],
            "attention": self._implementation,
            "sampling": self._sampler,
            "verification": self._verification,
            "matrices": sorted(self._model.formats),
            "cpu_kernels": cpu.identity(),
            "uniform": self._deterministic,
            "compiler_options": self._compiler_options,
            **({} if self._lora is None else {"lora": dataclasses.asdict(self._lora)}),
        }
        # Another number of shards adds up in another order.
        return settings if self._mesh is None else settings | {"shards": self._mesh.shards}

    @property
    def complete(self) -> bool:
        """Whether there is nothing left to adopt."""
        return not self._late

    @property
    def limits(self) -> StepLimits:
        """Of the plans that can run now; they only grow."""
        return step_limits(self._ready)

    def compile(self) -> None:
        """Starts to lower and compile everything in threads, the first shapes first."""
        slots = self._on_device(self._slots_shape)
        add = self._executables.add

        def add_step(shape: StepShape) -> None:
            step, inputs = self._make_step(shape), self._step_inputs(shape)
            add(shape.name, step, *inputs, donate_argnums=(1, 2))

        whole = {} if self._mesh is None else {"out_shardings": self._sharding}
        kv_sharding = self._sharding if self._mesh is None else self._mesh.kv(self._model)
        add("new_state", self._new_state, out_shardings=(kv_sharding, self._sharding))
        self._new = self._executables.call("new_state")  # which may touch all of its pages
        for shape in self._first:
            add_step(shape)
        has_lora = self._lora is not None
        rows = self._i32(ADMISSIONS, admission_width(self._max_blocks, lora=has_lora))
        add("admit", admit, slots, rows, donate_argnums=0, **whole)
        history = self._i32(1 + 2 * MAX_LOGIT_BIAS + self._model.spec.vocab_size)
        add("set_history", set_history, slots, history, donate_argnums=0, **whole)
        if self._lora is not None:
            if self._mesh is None:
                put = set_adapter
                adapter = self._on_device(self._lora.adapter(self._model.spec, self._model.dtype))
            else:
                put = self._mesh.set_adapter(self._model)
                adapter = self._mesh.adapter(self._model, self._lora)
            add("set_adapter", put, self._stacks_shape, self._i32(), adapter)
        self._executables.pause(PATIENCE_S)
        for shape in self._late.shapes:
            add_step(shape)
        self._executables.close()

    @property
    def can_pool(self) -> bool:
        """Whether the steps that pool hidden states have been adopted."""
        return bool(self._pools)

    def compile_pooling(self) -> None:
        """Compiles the steps that pool hidden states; a further call only waits. In any thread.

        Raises:
          EngineError: there is no room for them.
        """
        with self._pooling_lock:
            if self._pooling is None:
                self._pooling = Executables(self._compiler_options)
                for shape in self._pool_shapes:
                    step = self._make_step(shape)
                    inputs = [*self._step_inputs(shape), self._sums_shape]
                    self._pooling.add(shape.name, step, *inputs, donate_argnums=(1, 2, 6))
                self._pooling.close()
        for shape in self._pool_shapes:
            needed = self._pooling.memory_bytes(shape.name)
            if self._memory_limit is not None and needed > self._memory_limit:
                raise EngineError(
                    f"embeddings need {needed / GIB:.2f} GiB, and there is "
                    f"{self._memory_limit / GIB:.2f}: less --num-blocks makes room"
                )

    def adopt_pooling(self) -> None:
        """Takes what `compile_pooling` has compiled, and runs each once. Between steps only."""
        if self._pools:
            return
        assert self._pooling is not None
        self._new_sums()
        for shape in self._pool_shapes:
            self._run_empty(shape, self._pooling[shape.name])
        self._pools = self._pool_shapes

    @property
    def _pool_shapes(self) -> list[StepShape]:
        """The smallest and the largest that take chunks."""
        mixed = [shape for shape in self._shapes if shape.prompts]
        chosen = list(dict.fromkeys([*mixed[:1], self._shapes[-1]]))
        return [
            dataclasses.replace(shape, name=f"pool[{shape.num_tokens}]", pools=True)
            for shape in chosen
        ]

    def _new_sums(self) -> None:
        zeros = np.zeros(self._sums_shape.shape, np.float32)
        self._sums = jax.device_put(zeros, self._sharding)

    @property
    def _sums_shape(self) -> jax.ShapeDtypeStruct:
        shape = (len(self._slot_params), self._model.spec.hidden_size)
        return jax.ShapeDtypeStruct(shape, np.float32, sharding=self._sharding)

    @property
    def resident_bytes(self) -> int:
        """What a device holds between two steps: weights, KV cache, slots, and masks."""
        own = sum(s.size * s.dtype.itemsize for s in jax.tree.leaves(self._slots_shape))
        if self._lora is not None:
            of_shard = shard_spec(self._model.spec, self._model.shards)
            own += self._lora.num_bytes(of_shard, self._model.dtype)
        masks = sum(4 * math.prod(self._masks_shape(shape)) for shape in self._shapes)
        return self._model.param_bytes + self._kv_shape.total_bytes + own + masks

    @property
    def _stacks_shape(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        if self._lora is None:
            return ()
        if self._mesh is not None:
            return self._mesh.stacks(self._model, self._lora)
        return self._on_device(self._lora.stacks(self._model.spec, self._model.dtype))

    def _make_step(self, shape: StepShape) -> Callable[..., Any]:
        step = make_step(
            self._model,
            shape,
            self._kv_shape.block_size,
            implementation=self._implementation,
            sampler=self._sampler,
            verification=self._verification,
            uniform=self._deterministic,
        )
        if self._mesh is None:
            return step
        return self._mesh.shard_step(self._model, step, lora=self._lora is not None)

    def _step_inputs(self, shape: StepShape) -> list[Any]:
        """The shapes of a step's arguments, but for the sums of a shape that pools."""
        layer = self._whole_kv.layer
        if self._mesh is None:
            leaves, layer = self._on_device(self._model.leaves), self._on_device(layer)
        else:
            kv_sharding = self._mesh.kv(self._model)
            leaves = self._mesh.leaves(self._model)
            layer = self._on_device(layer, kv_sharding)
        leaves += self._stacks_shape
        kv = (layer,) * self._kv_shape.num_layers
        inputs = [leaves, kv, self._on_device(self._slots_shape)]
        inputs += [self._i32(shape.width), self._i32(*self._masks_shape(shape))]
        proposed = self._on_device(self._proposed(shape))
        return [*inputs, *(proposed or ((None,) if shape.pools else ()))]

    def memory_bytes(self) -> int:
        """What the first executables need at most, weights and KV cache included. Waits for them.

        By XLA's own analysis of the buffers; 0 where there is none.
        """
        return max(self._executables.memory_bytes(shape.name) for shape in self._first)

    def start(self, leaves: tuple[jax.Array, ...]) -> None:
        """Takes the weights, and runs the first executables once each."""
        self._stacks = tuple(
            jax.device_put(np.zeros(stack.shape, stack.dtype), stack.sharding)
            for stack in self._stacks_shape
        )
        self._leaves = (*leaves, *self._stacks)
        self.allocate()
        for name in ("admit", "set_history", *(["set_adapter"] if self._stacks else [])):
            self._compiled[name] = self._executables[name]
        for shape in self._first:
            self._adopt(shape)
        self._executables.resume()

    def allocate(self) -> None:
        """Waits for KV cache and slots, which `compile` has had made."""
        if self._new is not None:
            (self._kv, self._slots), self._new = self._new.result(), None

    def reset(self) -> None:
        """Makes KV cache and slots anew, after a step has raised: what it was given is lost."""
        self._kv, self._slots = (), None  # first, or there would be no room for the new
        num_slots = len(self._slot_params)
        self._slot_params = [None] * num_slots
        self._slot_flags = SlotFlags(num_slots)
        new = self._executables["new_state"]()
        self._kv, self._slots = jax.block_until_ready(new)
        if self._pools:
            self._new_sums()

    def set_adapter(self, place: int, arrays: tuple[np.ndarray, ...]) -> None:
        """Puts an adapter (see `LoraShape.adapter`) at a place that no sequence takes.

        Between two steps, by the thread that dispatches. If it raises, the adapters are as before.
        """
        assert self._lora is not None and 1 <= place <= self._lora.places
        weights = self._leaves[: len(self._model.leaves)]
        adapter = arrays if self._mesh is None else self._mesh.cut_adapter(self._model, arrays)
        new = self._compiled["set_adapter"](self._stacks, np.int32(place), adapter)
        self._stacks = jax.block_until_ready(new)
        self._leaves = (*weights, *self._stacks)

    def adopt(self) -> None:
        """Takes what has been compiled since, and runs each once. Between steps only.

        What failed to compile, or does not fit into the memory, is left out: larger shapes take its
        plans, or the limits stay.
        """
        for shape in self._late.arrived():
            self._adopt(shape)

    def on_compiled(self, call: Callable[[], None]) -> None:
        """Has `call` called, in another thread, whenever `adopt` has something to do."""
        self._late.on_compiled(call)

    def wait(self) -> None:
        """Until `adopt` can take everything that is left."""
        self._late.wait()

    def cancel(self) -> None:
        """Compiles nothing more: what has not been adopted never will be."""
        self._late.cancel()

    def compiled(self) -> dict[str, jax.stages.Compiled]:
        """What runs, by name. In any thread."""
        return self._compiled.copy()

    def settle(self) -> None:
        """Until the device has done all that was dispatched."""
        jax.block_until_ready((self._kv, self._slots))

    def dispatch(self, plan: StepPlan) -> _Pending:
        self._admit(plan.admissions)
        shape = self._choose(plan)
        flags = self._slot_flags.of_step(plan)
        packed = shape.pack(plan, flags, self._max_blocks)
        masks = None if plan.masks is None else self._pad_masks(shape, plan.masks)
        out, pooled = self._step(shape, packed, masks)
        out.packed.copy_to_host_async()
        params = None
        if flags & meta_bits.LOGPROBS:
            params = tuple(self._params_of(s.slot) for s in plan.sequences)
        return _Pending(plan, shape, out, params, pooled)

    def read(self, pending: _Pending) -> StepResult:
        plan, shape, out, all_params, pooled = pending
        packed = np.asarray(out.packed)
        num_rows = shape.num_rows
        tokens = packed[:num_rows].tolist()
        faults = packed[num_rows : 2 * num_rows]
        any_fault = bool(faults.any())
        accepted = packed[2 * num_rows :].tolist()
        logprobs = None
        if all_params is not None:
            scores = (out.logprob, out.rank, out.top_ids, out.top_logprobs)
            logprobs = _RowLogprobs(*map(np.asarray, scores))
        results: list[SequenceResult] = []
        sequences = plan.sequences if any_fault or logprobs is not None else plan.chunks
        if sequences is plan.chunks:  # the decodes have nothing but their tokens, a row each
            results = [SequenceResult((token,)) for token in tokens[: len(plan.decodes)]]
        first = len(results)
        for index, s in enumerate(sequences, start=first):
            end = first + s.num_rows
            if any_fault and faults[first:end].any():
                results.append(SequenceResult(fault=True))
            else:
                params = None if all_params is None else all_params[index]
                results.append(_result(s, params, tokens, first, accepted[index], logprobs))
                if pooled is not None and s.pooling is not None and s.num_rows:
                    _take_pooled(results[-1], s, pooled, end - 1)
            first = end
        return StepResult(plan.step, tuple(results))

    def _step(
        self, shape: StepShape, packed: np.ndarray, masks: np.ndarray | None = None
    ) -> tuple[StepOut, Pooled | None]:
        # The call uploads: a `device_put` before it would take half as long again.
        inputs = (packed, self._no_masks[shape.name] if masks is None else masks)
        step, proposed = self._compiled[shape.name], self._proposed(shape)
        if not shape.pools:
            self._kv, self._slots, out = step(
                self._leaves, self._kv, self._slots, *inputs, *proposed
            )
            return out, None
        inputs = (*inputs, *(proposed or (None,)), self._sums)
        self._kv, self._slots, out, pooled = step(self._leaves, self._kv, self._slots, *inputs)
        self._sums = pooled.sums
        return out, pooled

    def _proposed(self, shape: StepShape) -> tuple[Proposed, ...]:
        """What the step of `shape` takes of the draft model: one argument, or none."""
        if self._draft_probs is None or not shape.max_drafts:
            return ()
        return (self._draft_probs.latest,)

    def _masks_shape(self, shape: StepShape) -> tuple[int, int]:
        return shape.num_rows, mask_width(self._model.spec.vocab_size)

    def _pad_masks(self, shape: StepShape, masks: np.ndarray) -> np.ndarray:
        """Masks of the rows of a plan, and padding: a new array, for the device may keep it."""
        padded = np.empty(self._masks_shape(shape), np.int32)
        padded[: len(masks)] = masks
        padded[len(masks) :] = -1
        return padded

    def _admit(self, admissions: tuple[Admission, ...]) -> None:
        for i in range(0, len(admissions), ADMISSIONS):
            some = admissions[i : i + ADMISSIONS]
            packed = pack_admissions(some, self._max_blocks, lora=self._lora is not None)
            self._update_slots("admit", packed)
        for admission in admissions:
            self._slot_params[admission.slot] = admission.params
            self._slot_flags.admit(admission.slot, admission.params)
            if admission.params.penalised or admission.params.logit_bias:
                packed = pack_history(admission, self._model.spec.vocab_size)
                self._update_slots("set_history", packed)

    def _update_slots(self, name: str, packed: np.ndarray) -> None:
        self._slots = self._compiled[name](self._slots, packed)

    def _choose(self, plan: StepPlan) -> StepShape:
        for shape in self._pools if plan.pools else self._ready:
            if shape.fits(plan):
                return shape
        raise AssertionError(
            f"no executable fits {plan.num_sequences} sequences, {plan.num_tokens} tokens, "
            f"{plan.num_rows} rows"
        )

    def _params_of(self, slot: int) -> SamplingParams:
        params = self._slot_params[slot]
        assert params is not None, f"slot {slot} runs without an admission"
        return params

    def _adopt(self, shape: StepShape) -> None:
        """Runs the real step on no sequences: it writes nothing, for every index is padding."""
        self._run_empty(shape, self._executables[shape.name])
        self._ready = [s for s in self._shapes if s in self._ready or s == shape]

    def _run_empty(self, shape: StepShape, executable: jax.stages.Compiled) -> None:
        self._compiled[shape.name] = executable
        no_masks = self._pad_masks(shape, np.empty((0, 1), np.int32))
        self._no_masks[shape.name] = jax.device_put(no_masks, self._sharding)
        empty = StepPlan(step=0, admissions=(), chunks=())
        packed = shape.pack(empty, 0, self._max_blocks)
        self._step(shape, packed)[0].packed.block_until_ready()

    def _new_state(self) -> tuple[KV, Slots]:
        slots = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self._slots_shape)
        # Each position is written before it is read. On a CPU it may take longer than all else to
        # find the pages of a large cache.
        untouched = self._implementation == "cpu" and self._mesh is None
        return self._whole_kv.empty(untouched=untouched), slots

    def _i32(self, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, np.int32, sharding=self._sharding)

    @property
    def _whole_kv(self) -> KVShape:
        """Of all shards."""
        return self._kv_shape if self._mesh is None else self._mesh.kv_shape(self._kv_shape)

    def _on_device(self, tree: Any, sharding: jax.sharding.Sharding | None = None) -> Any:
        sharding = sharding or self._sharding
        return jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), tree
        )


def compiler_options(
    platform: str, *, command_buffers: bool, deterministic: bool
) -> dict[str, str | bool | int]:
    """XLA's options for the steps."""
    options: dict[str, str | bool | int] = {}
    if platform != "cpu" and not command_buffers:
        options["xla_gpu_enable_command_buffer"] = ""  # the list of what goes into them: nothing
    if platform != "cpu" and deterministic:
        options |= DETERMINISTIC_GPU_OPTIONS
    return options


class _RowLogprobs(NamedTuple):
    chosen: np.ndarray  # f32[R]
    rank: np.ndarray  # i32[R]
    top_ids: np.ndarray  # i32[R, 20]
    top: np.ndarray  # f32[R, 20]

    def at(self, row: int, token_id: int, count: int) -> TokenLogprobs:
        top = zip(self.top_ids[row, :count].tolist(), self.top[row, :count].tolist(), strict=True)
        return TokenLogprobs(token_id, float(self.chosen[row]), tuple(top), int(self.rank[row]))


def _take_pooled(result: SequenceResult, s: ScheduledSequence, pooled: Pooled, row: int) -> None:
    """Puts the vector of a prompt whose last token has the row `row` into its result."""
    if s.pooling == "mean":
        vector = np.asarray(pooled.row_sums)[row] / np.float32(s.start + s.num_tokens)
    else:
        vector = np.asarray(pooled.rows)[row]
    result.fault = not np.isfinite(vector).all()
    result.pooled = None if result.fault else vector.tobytes()


def _result(
    s: ScheduledSequence,
    params: SamplingParams | None,  # None without logprobs
    tokens: list[int],
    first: int,
    accepted: int,
    logprobs: _RowLogprobs | None,
) -> SequenceResult:
    prompt_count = own_count = None
    if logprobs is not None and params is not None:
        prompt_count, own_count = params.prompt_logprobs, params.logprobs
    prompt_logprobs = None
    if s.scoring and logprobs is not None and prompt_count is not None:
        prompt_logprobs = tuple(
            logprobs.at(first + i, target, prompt_count) for i, target in enumerate(s.targets)
        )
    if not s.samples:
        return SequenceResult(prompt_logprobs=prompt_logprobs)
    last = first + s.num_rows - 1
    rows = range(last, last + 1) if s.scoring else range(first, first + accepted + 1)
    own = None
    if logprobs is not None and own_count is not None:
        own = tuple(logprobs.at(row, tokens[row], own_count) for row in rows)
    return SequenceResult(tuple(tokens[row] for row in rows), False, own, prompt_logprobs)
