"""`Runner`: the real device. Turns plans into dispatches of compiled executables.

All executables are lowered from shapes, so they compile while the weights are being read; after
that nothing here traces or compiles. `dispatch` sends one packed array and starts the copy of the
result; `read` waits for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from forge_jax.cache.kv import KVShape
from forge_jax.sampling_params import MAX_LOGIT_BIAS, SamplingParams
from forge_jax.schedule.plan import (
    Admission,
    ScheduledSequence,
    SequenceResult,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from forge_jax.step import meta as meta_bits
from forge_jax.step.meta import SlotFlags, StepShape
from forge_jax.step.slots import (
    ADMISSIONS,
    admission_width,
    admit,
    pack_admissions,
    pack_history,
    set_history,
    slots_shape,
)
from forge_jax.step.step import StepOut, make_step
from forge_kernels import cpu
from forge_kernels.attention import Implementation

if TYPE_CHECKING:
    from forge_jax.models.decoder import Model


class _Pending(NamedTuple):
    plan: StepPlan
    shape: StepShape
    out: StepOut
    params: tuple[SamplingParams, ...] | None  # of plan.sequences, where logprobs are asked for


# https://openxla.org/xla/determinism: some operations have fast forms without a fixed order of
# summation, and autotuning picks kernels by measured time, so two starts may pick different ones.
DETERMINISTIC_GPU_OPTIONS = {
    "xla_gpu_exclude_nondeterministic_ops": True,
    "xla_gpu_autotune_level": 0,
}


def step_shapes(
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_rows: int,
    block_size: int,
    deterministic: bool = False,
) -> list[StepShape]:
    """The executables of an engine, smallest first: a few decode sizes, a few mixed sizes.

    The deterministic tier has one shape for every step: another may round differently.
    """
    if deterministic:
        return [StepShape.mixed(max_num_batched_tokens, max_num_seqs, max_rows, block_size)]
    largest = min(max_num_seqs, max_num_batched_tokens)
    decode = [b for b in (4, 16, 64) if b < largest] + [largest]
    mixed = [t for t in (64, 256, 1024) if t < max_num_batched_tokens] + [max_num_batched_tokens]
    return [StepShape.decode(b) for b in decode] + [
        StepShape.mixed(t, max_num_seqs, max_rows, block_size) for t in mixed
    ]


class Runner:
    """Owns the device state (weights, KV cache, slots) and the executables.

    Not thread-safe: one thread dispatches and reads.

    Args:
      shapes: of the steps, smallest first.
      deterministic: compute every row in the same way. With one shape, the logits of a token are
        then the same bits whatever else is in the step.
    """

    def __init__(
        self,
        model: Model,
        *,
        shapes: Iterable[StepShape],
        kv_shape: KVShape,
        num_slots: int,
        max_blocks: int,
        device: jax.Device,
        implementation: Implementation = "auto",
        deterministic: bool = False,
    ):
        self._model = model
        self._kv_shape = kv_shape
        self._max_blocks = max_blocks
        self._device = device
        self._sharding = jax.sharding.SingleDeviceSharding(device)
        self._shapes = list(shapes)
        self._implementation: Implementation = implementation
        self._deterministic = deterministic
        self._slots_shape = slots_shape(num_slots, max_blocks, model.spec.vocab_size)
        self._slot_params: list[SamplingParams | None] = [None] * num_slots
        self._slot_flags = SlotFlags(num_slots)
        self._executables: dict[str, Future[Any]] = {}
        self._leaves: tuple[jax.Array, ...] = ()
        self._kv: tuple[jax.Array, ...] = ()
        self._slots: Any = None

    @property
    def executables(self) -> list[str]:
        """Names of what is compiled."""
        return list(self._executables)

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the bits of a step, besides weights, device and versions; as JSON.

        How many blocks the cache has is not among it: a row reads its own, wherever they are.
        """
        return {
            "shapes": [dataclasses.asdict(shape) for shape in self._shapes],
            "block_size": self._kv_shape.block_size,
            "max_blocks": self._max_blocks,
            "dtypes": [str(self._model.dtype), str(self._kv_shape.storage)],
            "attention": self._implementation,
            "matrices": sorted({packing.format for packing in self._model.packings.values()}),
            "cpu_kernels": cpu.identity(),
            "uniform": self._deterministic,
            "compiler_options": self._compiler_options,
        }

    @property
    def _compiler_options(self) -> dict[str, Any] | None:
        if self._deterministic and self._device.platform == "gpu":
            return DETERMINISTIC_GPU_OPTIONS
        return None

    def compile(self, executor: Executor) -> None:
        """Starts to lower and compile everything; needs no weights."""
        leaves = self._on_device(self._model.leaves)
        kv = tuple(self._on_device(self._kv_shape.layer) for _ in range(self._kv_shape.num_layers))
        slots = self._on_device(self._slots_shape)

        def start(name: str, function: Callable[..., Any], donate: tuple[int, ...], *args: Any):
            jitted = jax.jit(function, donate_argnums=donate)
            self._executables[name] = executor.submit(
                lambda: jitted.lower(*args).compile(self._compiler_options)
            )

        for shape in self._shapes:
            step = make_step(
                self._model,
                shape,
                self._kv_shape.block_size,
                implementation=self._implementation,
                uniform=self._deterministic,
            )
            start(shape.name, step, (1, 2), leaves, kv, slots, self._i32(shape.width))
        rows = self._i32(ADMISSIONS, admission_width(self._max_blocks))
        start("admit", admit, (0,), slots, rows)
        history = self._i32(1 + 2 * MAX_LOGIT_BIAS + self._model.spec.vocab_size)
        start("set_history", set_history, (0,), slots, history)

    def start(self, leaves: tuple[jax.Array, ...]) -> None:
        """Takes the weights, makes the KV cache and the slots, and runs every executable once."""
        self._leaves = leaves
        self._kv = self._kv_shape.allocate(self._device)
        zeros = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), self._slots_shape)
        self._slots = jax.device_put(zeros, self._device)
        for executable in self._executables.values():
            executable.result()
        for shape in self._shapes:
            self._warm_up(shape)

    def dispatch(self, plan: StepPlan) -> _Pending:
        self._admit(plan.admissions)
        shape = self._choose(plan)
        flags = self._slot_flags.of_step(plan)
        packed = shape.pack(plan, flags, self._max_blocks)
        out = self._step(shape, packed)
        out.packed.copy_to_host_async()
        params = None
        if flags & meta_bits.LOGPROBS:
            params = tuple(self._params_of(s.slot) for s in plan.sequences)
        return _Pending(plan, shape, out, params)

    def read(self, pending: _Pending) -> StepResult:
        plan, shape, out, all_params = pending
        packed = np.asarray(out.packed)
        num_rows = shape.num_rows
        tokens = packed[:num_rows].tolist()
        faults = packed[num_rows : 2 * num_rows]
        any_fault = bool(faults.any())
        accepted = packed[2 * num_rows :].tolist()
        logprobs = None
        if all_params is not None:
            logprobs = _RowLogprobs(
                np.asarray(out.logprob), np.asarray(out.top_ids), np.asarray(out.top_logprobs)
            )
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
            first = end
        return StepResult(plan.step, tuple(results))

    def _step(self, shape: StepShape, packed: np.ndarray) -> StepOut:
        meta = jax.device_put(packed, self._device)
        executable = self._executables[shape.name].result()
        self._kv, self._slots, out = executable(self._leaves, self._kv, self._slots, meta)
        return out

    def _admit(self, admissions: tuple[Admission, ...]) -> None:
        for i in range(0, len(admissions), ADMISSIONS):
            packed = pack_admissions(admissions[i : i + ADMISSIONS], self._max_blocks)
            self._update_slots("admit", packed)
        for admission in admissions:
            self._slot_params[admission.slot] = admission.params
            self._slot_flags.admit(admission.slot, admission.params)
            if admission.params.penalised or admission.params.logit_bias:
                packed = pack_history(admission, self._model.spec.vocab_size)
                self._update_slots("set_history", packed)

    def _update_slots(self, name: str, packed: np.ndarray) -> None:
        put = jax.device_put(packed, self._device)
        self._slots = self._executables[name].result()(self._slots, put)

    def _choose(self, plan: StepPlan) -> StepShape:
        for shape in self._shapes:
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

    def _warm_up(self, shape: StepShape) -> None:
        """Runs the real step on no sequences: it writes nothing, for every index is padding."""
        empty = StepPlan(step=0, admissions=(), chunks=())
        packed = shape.pack(empty, 0, self._max_blocks)
        self._step(shape, packed).packed.block_until_ready()

    def _i32(self, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, np.int32, sharding=self._sharding)

    def _on_device(self, tree: Any) -> Any:
        return jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=self._sharding), tree
        )


class _RowLogprobs(NamedTuple):
    chosen: np.ndarray  # f32[R]
    top_ids: np.ndarray  # i32[R, 20]
    top: np.ndarray  # f32[R, 20]

    def at(self, row: int, token_id: int, count: int) -> TokenLogprobs:
        top = zip(self.top_ids[row, :count].tolist(), self.top[row, :count].tolist(), strict=True)
        return TokenLogprobs(token_id, float(self.chosen[row]), tuple(top))


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
