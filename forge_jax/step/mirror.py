"""Operations on the device that every process of a mesh performs, in the same order.

One process schedules. Its `Runner` passes each operation to a `Mirror` before it performs it. The
mirror sends the operation to the other processes, whose runners `replay` it. A failed step ends all
processes, because they may have failed at different points.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

from forge_jax.host import supervise
from forge_jax.schedule.wire_array import WireArray

if TYPE_CHECKING:
    from forge_jax.step.inputs import StepShape
    from forge_jax.step.runner import Runner


class UpdateSlots(msgspec.Struct, array_like=True, frozen=True, tag=True):
    name: str
    packed: WireArray


class Run(msgspec.Struct, array_like=True, frozen=True, tag=True):
    shape: str
    packed: WireArray
    masks: WireArray | None

    @classmethod
    def of(cls, shape: StepShape, packed: np.ndarray, masks: np.ndarray | None) -> Run:
        return cls(shape.name, WireArray.of(packed), None if masks is None else WireArray.of(masks))


class Complete(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Move a micro-batch through the remaining stages of the pipeline."""

    number: int


class Activate(msgspec.Struct, array_like=True, frozen=True, tag=True):
    shape: str


class SetAdapter(msgspec.Struct, array_like=True, frozen=True, tag=True):
    place: int
    arrays: tuple[WireArray, ...]


class CompilePooling(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Begin to compile the pooling steps. It may come between any two other operations."""


class ActivatePooling(msgspec.Struct, array_like=True, frozen=True, tag=True):
    pass


type Operation = (
    UpdateSlots | Run | Complete | Activate | SetAdapter | CompilePooling | ActivatePooling
)


class Mirror(Protocol):
    """The other processes of a mesh."""

    def send(self, operation: Operation) -> None:
        """Let every other process perform an operation after all earlier ones."""
        ...


def replay(runner: Runner, operation: Operation) -> None:
    """Perform an operation that another process's runner has sent."""
    match operation:
        case UpdateSlots(name, packed):
            runner.state.update_slots(name, packed.array())
        case Run(shape, packed, masks):
            runner.run(shape, packed.array(), None if masks is None else masks.array())
        case Complete(number):
            runner.complete(number)
        case Activate(shape):
            runner.activate(shape)
        case CompilePooling():
            supervise.start_thread(
                runner.compile_pooling, "compiling pooling steps", lambda error: None
            )
        case ActivatePooling():
            runner.compile_pooling()  # only waits
            runner.activate_pooling()
        case SetAdapter(place, arrays):
            runner.set_adapter(place, tuple(array.array() for array in arrays))
