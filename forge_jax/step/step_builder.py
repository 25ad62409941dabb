"""`StepBuilder`: the functions of a runner's executables and the shapes of their arguments.

It owns no arrays, so all of it can run before the weights have been read.
"""

from __future__ import annotations

import dataclasses
import math
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from forge_jax.grammar.masks import mask_width
from forge_jax.models.kv import KV
from forge_jax.models.lora import set_adapter
from forge_jax.models.plugins import code_digest
from forge_jax.sampling_params import MAX_LOGIT_BIAS
from forge_jax.schedule.plan import StepPlan
from forge_jax.step.host_blocks import BATCH, load_blocks, save_blocks
from forge_jax.step.slots import (
    ADMISSIONS,
    Slots,
    admission_width,
    admit,
    set_history,
    slots_shape,
)
from forge_jax.step.step import make_step, make_take_tokens
from forge_jax.weights.partition import shard_spec
from forge_kernels import cpu

if TYPE_CHECKING:
    from forge_jax.models.decoder import Model
    from forge_jax.step.executables import Executables
    from forge_jax.step.inputs import StepShape
    from forge_jax.step.options import RunnerOptions


class StepBuilder:
    """A builder that adds a model's steps and slot updates to `Executables`.

    The executables of a stage of pipeline parallelism have its index in their names.
    """

    def __init__(self, model: Model, options: RunnerOptions):
        self._model = model
        self._options = options
        self._placement = options.placement

    def name(self, name: str) -> str:
        """Return the name of an executable, such as "admit" or a shape's name."""
        stage = self._model.stage
        return name if stage is None else f"{name}@{stage.index}"

    def names(self, shape: StepShape) -> list[str]:
        """Return the names of the executables that compute a step."""
        return [self.name(shape.name)]

    @property
    def num_leaves(self) -> int:
        """Number of the model's weights."""
        return len(self._model.leaves)

    def add_step(self, executables: Executables, shape: StepShape) -> None:
        """Add a shape's step. It donates KV cache, slots, and the sums if the shape pools.

        See `forge_jax.step.step` for its arguments.
        """
        step = make_step(
            self._model,
            shape,
            self._options.kv_shape.block_size,
            implementation=self._options.implementation,
            sampler=self._options.sampler,
            verification=self._options.verification,
            uniform=self._options.deterministic,
            steering=self._options.steering,
            activations=self._options.activations,
        )
        step = self._placement.shard_step(
            self._model,
            step,
            lora=self._options.lora is not None,
            steering=self._options.steering is not None,
        )
        donated = (1, 2, 6) if shape.pools else (1, 2)
        inputs = self._step_inputs(shape)
        executables.add(self.name(shape.name), step, *inputs, donate_argnums=donated)

    def _step_inputs(self, shape: StepShape) -> list[Any]:
        place = self._placement
        inputs = [
            place.leaves(self._model) + self.stacks + self.steering,
            place.kv(self._model, self._options.kv_shape),
            place.put(self._slots),
            place.i32(shape.width),
            place.i32(*self.masks_shape(shape)),
        ]
        stage = self._model.stage
        if stage is not None:
            return inputs if stage.is_first else [*inputs, None, None, self.stream(shape)]
        probs = self._options.draft_probs
        if probs is not None and shape.max_drafts:
            inputs.append(place.put(probs.shapes))
        elif shape.pools:
            inputs.append(None)
        return [*inputs, self.sums] if shape.pools else inputs

    def add_take_tokens(self, executables: Executables, shape: StepShape) -> None:
        """Add `take[SHAPE]` of a first stage, see `forge_jax.step.step.make_take_tokens`."""
        place = self._placement
        whole = {} if self._options.mesh is None else {"out_shardings": place.sharding}
        inputs = place.i32(shape.width), place.i32(2 * shape.num_rows + shape.num_seqs)
        name, take = self.name(f"take[{shape.name}]"), make_take_tokens(shape)
        executables.add(name, take, place.put(self._slots), *inputs, donate_argnums=0, **whole)

    def add_new_state(self, executables: Executables) -> None:
        """Add `new_state() -> (kv, slots)`."""
        shardings = self._placement.kv_sharding(self._model), self._placement.sharding
        executables.add(self.name("new_state"), self._new_state, out_shardings=shardings)

    def _new_state(self) -> tuple[KV, Slots]:
        slots = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self._slots)
        # Each position is written before it is read, so the memory need not be zeroed. On a CPU,
        # touching the pages of a large cache may take longer than the rest of the start.
        untouched = self._options.implementation == "cpu" and self._options.mesh is None
        whole = self._placement.whole_kv(self._model, self._options.kv_shape)
        return whole.empty(untouched=untouched), slots

    def add_slot_updates(self, executables: Executables) -> None:
        """Add `admit`, `set_history` and, with LoRA, `set_adapter`."""
        place, lora, mesh = self._placement, self._options.lora, self._options.mesh
        slots = place.put(self._slots)
        whole = {} if mesh is None else {"out_shardings": place.sharding}
        width = admission_width(
            self._options.max_blocks, lora=lora is not None, steering=self._options.steering
        )
        rows = place.i32(ADMISSIONS, width)
        executables.add(self.name("admit"), admit, slots, rows, donate_argnums=0, **whole)
        history = place.i32(1 + 2 * MAX_LOGIT_BIAS + self._model.spec.vocab_size)
        executables.add(
            self.name("set_history"), set_history, slots, history, donate_argnums=0, **whole
        )
        if lora is None:
            return
        if mesh is None:
            put, adapter = set_adapter, place.put(lora.adapter(self._model.spec, self._model.dtype))
        else:
            put, adapter = mesh.set_adapter(self._model), mesh.adapter(self._model, lora)
        executables.add(self.name("set_adapter"), put, self.stacks, place.i32(), adapter)

    def add_block_copies(self, executables: Executables) -> None:
        """Add `save_blocks` and `load_blocks`, which donates the KV cache."""
        place, options = self._placement, self._options
        save, load = save_blocks, load_blocks
        if options.mesh is not None:
            save, load = options.mesh.shard_copies(self._model, save, load)
        kv, blocks = place.kv(self._model, options.kv_shape), place.i32(BATCH)
        rows = (place.block_rows(options.kv_shape.block_bytes),) * BATCH
        executables.add("save_blocks", save, kv, blocks)
        executables.add("load_blocks", load, kv, blocks, *rows, donate_argnums=0)

    @cached_property
    def stacks(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The shapes of all LoRA adapters' arrays; see `LoraShape.stacks`."""
        lora, mesh = self._options.lora, self._options.mesh
        if lora is None:
            return ()
        if mesh is not None:
            return mesh.stacks(self._model, lora)
        return self._placement.put(lora.stacks(self._model.spec, self._model.dtype))

    @property
    def steering(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The shape of the stack of steering vectors, or nothing without them."""
        shape = self._options.steering
        return () if shape is None else (self._placement.put(shape.stack),)

    def stream(self, shape: StepShape) -> jax.ShapeDtypeStruct:
        """Return dtype[T, d], the residual stream of a step, on the devices of this model."""
        size = shape.num_tokens, self._model.spec.hidden_size
        return self._placement.put(jax.ShapeDtypeStruct(size, self._model.dtype))

    @property
    def sums(self) -> jax.ShapeDtypeStruct:
        """f32[num_slots, d], the sums of pooled hidden states per slot."""
        shape = (self._options.num_slots, self._model.spec.hidden_size)
        return jax.ShapeDtypeStruct(shape, np.float32, sharding=self._placement.sharding)

    def masks_shape(self, shape: StepShape) -> tuple[int, int]:
        """Return the shape of a step's masks: i32[R, mask_width]."""
        return shape.num_rows, mask_width(self._model.spec.vocab_size)

    def pack_empty(self, shape: StepShape) -> np.ndarray:
        """Return the upload of a step without sequences."""
        return shape.pack(StepPlan(step=0, admissions=(), chunks=()), 0, self._options.max_blocks)

    @cached_property
    def _slots(self) -> Slots:
        options = self._options
        return slots_shape(
            options.num_slots,
            options.max_blocks,
            self._model.spec.vocab_size,
            lora=options.lora is not None,
            steering=options.steering,
        )

    @property
    def resident_bytes(self) -> int:
        """Bytes that a device holds between two steps: weights, KV cache, slots and masks."""
        own = sum(s.size * s.dtype.itemsize for s in jax.tree.leaves(self._slots))
        if self._options.lora is not None:
            of_shard = shard_spec(self._model.spec, self._model.shards)
            own += self._options.lora.num_bytes(of_shard, self._model.dtype)
        if self._options.steering is not None:
            own += self._options.steering.num_bytes
        masks = sum(4 * math.prod(self.masks_shape(shape)) for shape in self._options.shapes)
        return self._model.param_bytes + self._options.kv_shape.total_bytes + own + masks

    @property
    def settings(self) -> dict[str, Any]:
        """The choices that determine the bits of a step, except weights, device and versions; JSON.

        The number of KV cache blocks is excluded: a row reads only its own, wherever they are.
        """
        options = self._options
        settings = {
            "shapes": [dataclasses.asdict(shape) for shape in options.shapes],
            "block_size": options.kv_shape.block_size,
            "max_blocks": options.max_blocks,
            "dtypes": [str(self._model.dtype), str(options.kv_shape.storage)],
            "attention": options.implementation,
            "sampling": options.sampler,
            "verification": options.verification,
            "matrices": sorted(self._model.formats),
            "cpu_kernels": cpu.identity(),
            "uniform": options.deterministic,
            "compiler_options": options.compiler_options,
            "model_code": code_digest(self._model.spec.architecture),
            **({} if options.lora is None else {"lora": dataclasses.asdict(options.lora)}),
            **({} if options.steering is None else {"steering": options.steering.digest}),
            **({"activations": options.activations} if options.activations else {}),
        }
        if options.stages:
            layers = [stage.model.stage.layers for stage in options.stages if stage.model.stage]
            settings["stages"] = [each.stop for each in layers]
        if options.mesh is None:
            return settings
        # The number of shards, and the experts that each has, change the order of sums.
        experts = {"expert_parallel": self._model.spec.expert_parallel}
        return settings | {"shards": options.mesh.shards} | experts
