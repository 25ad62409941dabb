"""Activations of a step that requests return: which rows the host reads, and their names."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from forge_jax.schedule.activations import Activations, matching

if TYPE_CHECKING:
    import jax

    from forge_jax.sampling_params import SamplingParams
    from forge_jax.schedule.plan import SequenceResult, StepPlan


class ReturnedRows(NamedTuple):
    """The rows of a step that one sequence returns."""

    index: int  # the sequence's index in the plan
    row: int  # the first one, among the step's tokens
    start: int  # its position in the sequence
    count: int
    num_drafts: int  # drafts in the last rows; a row of a rejected draft is not returned
    arrays: tuple[tuple[str, int], ...]  # name, and index in `StepOut.activations`


class SlotActivations:
    """The activations that the sequence of each slot returns.

    Args:
      served: the names of `StepOut.activations`.
    """

    def __init__(self, served: tuple[str, ...]):
        self._served = served
        self._arrays: dict[int, tuple[tuple[str, int], ...]] = {}  # by slot

    def admit(self, slot: int, params: SamplingParams) -> None:
        self._arrays.pop(slot, None)
        asked = params.return_activations
        if asked is None:
            return
        names = {name for pattern in asked.names for name in matching(pattern, self._served)}
        self._arrays[slot] = tuple(
            (name, index) for index, name in enumerate(self._served) if name in names
        )

    def of_step(self, plan: StepPlan) -> tuple[ReturnedRows, ...]:
        if not self._arrays:
            return ()
        found: list[ReturnedRows] = []
        decodes = plan.decodes
        for index, slot in enumerate(decodes.slots):
            if slot in self._arrays:
                arrays = self._arrays[slot]
                found.append(ReturnedRows(index, index, decodes.starts[index], 1, 0, arrays))
        end = len(decodes)
        for index, s in enumerate(plan.chunks, start=len(decodes)):
            end += s.num_tokens
            if s.num_returned and s.slot in self._arrays:
                start = s.start + s.num_tokens - s.num_returned
                rows = (end - s.num_returned, start, s.num_returned, s.num_drafts)
                found.append(ReturnedRows(index, *rows, self._arrays[s.slot]))
        return tuple(found)


def add_activations(
    results: Seq[SequenceResult], returned: Seq[ReturnedRows], arrays: Seq[jax.Array]
) -> None:
    """Read the rows from the device, and store them in the results of their sequences."""
    read: dict[int, np.ndarray] = {}
    for index, row, start, count, num_drafts, names in returned:
        result = results[index]
        if result.fault:
            continue
        if num_drafts:
            count = len(result.token_ids)
        rows: dict[str, np.ndarray] = {}
        for name, at in names:
            if at not in read:
                read[at] = np.asarray(arrays[at])
            rows[name] = read[at][row : row + count].copy()  # the step's other rows are freed
        result.activations = Activations(start, rows)
