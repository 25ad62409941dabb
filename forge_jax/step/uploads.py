"""`Uploads`: the inputs of steps and slots, packed into arrays on the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from forge_jax.sampling_params import SamplingParams
from forge_jax.schedule.plan import Admission, StepPlan
from forge_jax.step.activations import ReturnedRows, SlotActivations
from forge_jax.step.inputs import LOGPROBS, SlotFlags, StepShape
from forge_jax.step.slots import ADMISSIONS, pack_admissions, pack_history

if TYPE_CHECKING:
    from forge_jax.step.options import RunnerOptions


class Upload(NamedTuple):
    """The arguments of one step that come from the host."""

    packed: np.ndarray  # i32[shape.width]
    masks: np.ndarray | None  # i32[R, mask_width]; None: no row is masked
    params: tuple[SamplingParams, ...] | None  # one per sequence; None if no logprobs are needed
    returned: tuple[ReturnedRows, ...]  # activations that requests return


class Uploads:
    """A packer of plans and admissions, with the sampling parameters of each slot."""

    def __init__(self, options: RunnerOptions, vocab_size: int):
        self._max_blocks = options.max_blocks
        self._lora, self._steering = options.lora is not None, options.steering
        self._vocab_size = vocab_size
        self._num_slots = options.num_slots
        self._served = options.activations
        self.reset()

    def reset(self) -> None:
        self._params: list[SamplingParams | None] = [None] * self._num_slots
        self._flags = SlotFlags(self._num_slots)
        self._returned = SlotActivations(self._served)

    def admissions(self, admissions: tuple[Admission, ...]) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the names of the executables that update slots, each with its packed argument."""
        for i in range(0, len(admissions), ADMISSIONS):
            some = admissions[i : i + ADMISSIONS]
            yield (
                "admit",
                pack_admissions(some, self._max_blocks, lora=self._lora, steering=self._steering),
            )
        for admission in admissions:
            self._params[admission.slot] = admission.params
            self._flags.admit(admission.slot, admission.params)
            self._returned.admit(admission.slot, admission.params)
            if admission.params.penalized or admission.params.logit_bias:
                yield "set_history", pack_history(admission, self._vocab_size)

    def step(self, plan: StepPlan, shape: StepShape) -> Upload:
        """Pack a plan for a shape that it fits."""
        flags = self._flags.of_step(plan)
        packed = shape.pack(plan, flags, self._max_blocks)
        masks = None if plan.masks is None else pad_masks(plan.masks, shape.num_rows)
        params = None
        if flags & LOGPROBS:
            params = tuple(self._params_of(s.slot) for s in plan.sequences)
        return Upload(packed, masks, params, self._returned.of_step(plan))

    def _params_of(self, slot: int) -> SamplingParams:
        params = self._params[slot]
        assert params is not None, f"slot {slot} runs without an admission"
        return params


def pad_masks(masks: np.ndarray, num_rows: int) -> np.ndarray:
    """Return the masks with padding, as a new array because the device may keep it."""
    padded = np.empty((num_rows, masks.shape[1]), np.int32)
    padded[: len(masks)] = masks
    padded[len(masks) :] = -1
    return padded
