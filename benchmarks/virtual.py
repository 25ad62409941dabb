"""The device and clock of `replay`: nothing is computed, and time is virtual.

The duration of a step is modeled as a roofline: an overhead, plus the longer of memory and
arithmetic time. All tokens are equal; lengths come from the requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from forge_jax.schedule.host_tier import Finished, Transfers
from forge_jax.schedule.plan import SequenceResult, StepPlan, StepResult

# Shared by all rows of all steps, because results are never modified.
_TOKEN = SequenceResult((0,))
_NOTHING = SequenceResult()


def cost(default: float, doc: str) -> float:
    return field(default=default, metadata={"doc": doc})


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """The costs of a step; the defaults are the preset `h200-8b`."""

    overhead_ms: float = cost(0.5, "fixed cost of a step: launches, sampling, gaps")
    weights_ms: float = cost(16e9 / 4.3e12 * 1e3, "memory: all weights, once per step")
    context_ns: float = cost(131_072 / 4.3e12 * 1e9, "memory: the KV of one token of context")
    token_us: float = cost(2 * 8e9 / 788e12 * 1e6, "arithmetic: one token through all matrices")
    pair_ns: float = cost(4 * 32 * 4096 / 788e12 * 1e9, "arithmetic: one token attends to one")

    def step_s(self, tokens: int, context: int, pairs: int) -> float:
        """Return the duration of a step of `tokens` tokens in all.

        Args:
          tokens: Tokens of the step.
          context: Tokens whose KV the step reads, summed over sequences.
          pairs: The same, summed over the tokens of each sequence.
        """
        memory_us = self.weights_ms * 1e3 + self.context_ns * 1e-3 * context
        arithmetic_us = self.token_us * tokens + self.pair_ns * 1e-3 * pairs
        return 1e-3 * self.overhead_ms + 1e-6 * max(memory_us, arithmetic_us)

    def prefill_s(self, cached: int, prompt_len: int, chunk: int) -> float:
        """Return the time for the rest of a prompt on an idle device, in steps of up to `chunk`."""
        total_s = 0.0
        for start in range(cached, prompt_len, chunk):
            end = min(start + chunk, prompt_len)
            total_s += self.step_s(end - start, end, pairs_of(start, end))
        return total_s

    def decode_s(self, prompt_len: int, output_len: int) -> float:
        """Return the time for the output after its first token, on an idle device."""
        contexts = range(prompt_len + 1, prompt_len + output_len)
        return sum(self.step_s(1, context, context) for context in contexts)


# Llama 3.1 8B (32 layers of 4,096, 8 KV heads of 128) in bfloat16 on an H200. The rates are those
# of plain copies and matrix products there: 4.3 TB/s and 788 TFLOP/s.
DEVICES = {"h200-8b": StepCost()}


def pairs_of(start: int, end: int) -> int:
    """Count the pairs (token, token it attends to) of the positions from `start` to `end`."""
    return (end * (end + 1) - start * (start + 1)) // 2


@dataclass(slots=True)
class VirtualClock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


class VirtualDevice:
    """A `plan.Device` whose `read` moves the clock to the end of its step."""

    def __init__(self, step_s: Callable[[int, int, int], float], clock: VirtualClock):
        self.num_steps = 0
        self.num_sequences = 0  # summed over steps, like the next two
        self.num_tokens = 0
        self.busy_s = 0.0
        self._step_s = step_s
        self._clock = clock
        self._free_s = 0.0  # when the last dispatched step ends

    def dispatch(self, plan: StepPlan) -> tuple[StepResult, float]:
        starts, chunks = plan.decodes.starts, plan.chunks
        num_decodes = tokens = len(starts)
        context = pairs = sum(starts) + num_decodes
        results = (_TOKEN,) * num_decodes
        if chunks:
            for row in chunks:
                start, length = row.start, len(row.token_ids)
                tokens += length
                context += start + length
                pairs += pairs_of(start, start + length)
            results += tuple([_TOKEN if row.samples else _NOTHING for row in chunks])
        step_s = self._step_s(tokens, context, pairs)
        self._free_s = max(self._free_s, self._clock.now_s) + step_s
        self.num_steps += 1
        self.num_sequences += len(results)
        self.num_tokens += tokens
        self.busy_s += step_s
        return StepResult(plan.step, results), self._free_s

    def reset(self) -> None:
        """Drop steps in flight: nothing to do, because results are known at dispatch."""

    def read(self, pending: tuple[StepResult, float]) -> StepResult:
        result, end_s = pending
        if end_s > self._clock.now_s:
            self._clock.now_s = end_s
        return result


class VirtualHostMemory:
    """A `HostMemory` whose copies take the time of their bytes at a constant bandwidth.

    Both directions have the full bandwidth at the same time, as PCIe. Copies within the device, and
    their effect on its steps, cost nothing.
    """

    def __init__(self, block_bytes: int, bytes_per_s: float, clock: VirtualClock):
        self.block_bytes = block_bytes
        self._block_s = block_bytes / bytes_per_s
        self._clock = clock
        self.reset()

    def reset(self) -> None:
        self._saves: deque[tuple[float, int]] = deque()  # end, copy
        self._loads: deque[tuple[float, int]] = deque()  # end, load
        self._out_s = self._in_s = 0.0  # when the last copy of each direction ends

    def start(self, transfers: Transfers) -> None:
        now_s = self._clock.now_s
        for copy, _ in transfers.saves:
            self._out_s = max(self._out_s, now_s) + self._block_s
            self._saves.append((self._out_s, copy))
        for load, blocks in transfers.loads:
            self._in_s = max(self._in_s, now_s) + len(blocks) * self._block_s
            self._loads.append((self._in_s, load))

    def finished(self) -> Finished:
        return Finished(saves=self._arrived(self._saves), loads=self._arrived(self._loads))

    def wait(self) -> None:
        """Move the clock to the end of the next load."""
        self._clock.now_s = max(self._clock.now_s, self._loads[0][0])

    def _arrived(self, copies: deque[tuple[float, int]]) -> list[int]:
        arrived: list[int] = []
        while copies and copies[0][0] <= self._clock.now_s:
            arrived.append(copies.popleft()[1])
        return arrived
