"""The result of a step: its pending form, and how the host reads it."""

from __future__ import annotations

import atexit
import contextlib
import math
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np

from forge_jax.schedule.plan import (
    ScheduledSequence,
    SequenceResult,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from forge_jax.step.activations import ReturnedRows, add_activations

if TYPE_CHECKING:
    from forge_jax.sampling_params import SamplingParams
    from forge_jax.step.inputs import StepShape
    from forge_jax.step.step import Pooled, StepOut


# Arrays whose copies began last, of all runners, including runners that no longer exist.
_latest: deque[jax.Array] = deque(maxlen=8)


@atexit.register
def _finish_copies() -> None:
    """Wait for copies that no caller reads, such as the result of a step dispatched ahead.

    JAX ends a copy in a thread that needs the interpreter. After the interpreter's end, the thread
    aborts the process ("terminate called without an active exception").
    """
    while _latest:
        with contextlib.suppress(Exception):  # errors of a step that has failed
            np.asarray(_latest.popleft())


def begin_copy(array: jax.Array) -> None:
    """Start to copy an array to the host. `np.asarray` waits for it.

    An array on a CPU needs no copy. JAX would only wrap it in a NumPy array, in a thread of XLA.
    `np.asarray` does not wait for that thread, so it could abort a process that ends.
    """
    if array.platform() != "cpu":
        array.copy_to_host_async()
        _latest.append(array)


class Pending(NamedTuple):
    """A step that has been dispatched, and `begin_copy(out.packed)` with it."""

    plan: StepPlan
    shape: StepShape
    out: StepOut
    params: tuple[SamplingParams, ...] | None  # one per sequence; None if no logprobs are needed
    pooled: Pooled | None = None
    returned: tuple[ReturnedRows, ...] = ()


def read_result(pending: Pending) -> StepResult:
    """Wait for a step and return its result."""
    plan, shape, out, all_params, pooled, returned = pending
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
    # Fast path: decodes have one row each and nothing but their tokens.
    if sequences is plan.chunks:
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
    if returned:
        add_activations(results, returned, out.activations)
    return StepResult(plan.step, tuple(results))


class _RowLogprobs(NamedTuple):
    chosen: np.ndarray  # f32[R]
    rank: np.ndarray  # i32[R]
    top_ids: np.ndarray  # i32[R, 20]
    top: np.ndarray  # f32[R, 20]

    def at(self, row: int, token_id: int, count: int) -> TokenLogprobs:
        pairs = zip(self.top_ids[row, :count].tolist(), self.top[row, :count].tolist(), strict=True)
        # A filter or a mask leaves some tokens out of the processed distribution.
        top = tuple(pair for pair in pairs if pair[1] > -math.inf)
        return TokenLogprobs(token_id, float(self.chosen[row]), top, int(self.rank[row]))


def _take_pooled(result: SequenceResult, s: ScheduledSequence, pooled: Pooled, row: int) -> None:
    """Store the vector of a prompt whose last token has row `row` in its result."""
    if s.pooling == "mean":
        vector = np.asarray(pooled.row_sums)[row] / np.float32(s.start + s.num_tokens)
    else:
        vector = np.asarray(pooled.rows)[row]
    result.fault = not np.isfinite(vector).all()
    result.pooled = None if result.fault else vector.tobytes()


def _result(
    s: ScheduledSequence,
    params: SamplingParams | None,  # None: no logprobs
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
