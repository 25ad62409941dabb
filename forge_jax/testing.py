"""Helpers for tests of an engine: a fake device that checks its input, and tiny models.

`FakeDevice` replaces the model and its KV cache. It needs only NumPy and the plan's
types, so schedulers and servers can be tested with it anywhere. Functions that need jax import it
when they are called.
"""

from __future__ import annotations

import hashlib
import math
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from forge_jax.config import Pooling
from forge_jax.sampling_params import SamplingParams
from forge_jax.schedule.activations import Activations
from forge_jax.schedule.block_pool import BlockPool
from forge_jax.schedule.host_tier import Finished, Transfers
from forge_jax.schedule.plan import (
    FED_BACK,
    Admission,
    Device,
    ScheduledSequence,
    SequenceResult,
    StepPlan,
    StepResult,
    TokenLogprobs,
)

if TYPE_CHECKING:
    import jax

    from forge_jax.engine.core import EngineCore
    from forge_jax.engine.thread import Engine
    from forge_jax.llm import LLM
    from forge_jax.models.decoder import Model

_MASK = 2**64 - 1
_EMPTY = 0xCBF29CE484222325  # the rolling hash of no tokens
_POISON = -2  # non-finite KV
_UNWRITTEN = -1
POOLED_SIZE = 8  # size of the fake's hidden states


def _extend(rolling: int, token: int) -> int:
    """Return the hash of a token list, from that of the list without its last token."""
    return (rolling * 6364136223846793005 + token + 1442695040888963407) & _MASK


def _hidden(rolling: int) -> list[float]:
    """Return the last hidden state, from -1 to 1, of a token list with this hash."""
    return [
        (rolling * (2 * i + 0x9E3779B97F4A7C15) >> 40 & 0xFFFF) / 0x7FFF - 1.0
        for i in range(POOLED_SIZE)
    ]


def _salt_hash(salt: str) -> int:
    return int.from_bytes(hashlib.blake2b(salt.encode(), digest_size=8).digest(), "little")


@dataclass(slots=True)
class _Slot:
    """The device state of a slot, from one admission to the next."""

    admission: Admission
    block_table: list[int]
    tokens: list[int]  # Known tokens, from the admission, an upload or sampling.
    rolling: list[int] = field(default_factory=lambda: [_EMPTY])  # [i]: hash of the first i tokens.
    expected_kv: list[int] = field(default_factory=list)  # With `check`: of each token.
    last_token: int | None = None
    computed: int | None = None  # Tokens with KV. None before the first step.
    hidden_sum: list[float] = field(default_factory=lambda: [0.0] * POOLED_SIZE)

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.rolling.append(_extend(self.rolling[-1], token))

    def forget(self, length: int) -> None:
        """Drop the tokens from `length` on, which were wrong drafts."""
        if length < len(self.tokens):
            del self.tokens[length:], self.rolling[length + 1 :], self.expected_kv[length:]

    def known(self) -> list[int]:
        """Return all tokens, including one that is sampled but not fed back yet."""
        if self.last_token is None or self.computed != len(self.tokens):
            return self.tokens
        return [*self.tokens, self.last_token]


class FakeDevice:
    """A `plan.Device` in plain Python, whose next token is a hash of the prefix and the seed.

    At temperature 0 the seed has no effect, as on a real device. A row with a mask samples the
    first allowed token, starting from the token that it would sample without a mask.

    A token's KV is a fingerprint of everything it depends on: the salt and all tokens up to it. If
    `check` is set, every scheduled sequence gathers its prefix through its block table. Any
    difference raises an AssertionError that names the position. This detects stale blocks, blocks
    used after they were freed, and wrong prefix cache hits. The device checks the contract of
    plans. It stores every sequence, to check that preempted ones come back unchanged. If there is a
    `pool`, writes must go to blocks that are neither shared nor in the prefix cache.

    If `check` is not set, a row takes O(1) time for any context length. Use this for load tests.

    Steps run in the order of `dispatch`, each for `step_time_s`. `read` waits for the end of its
    step, as on a real device.

    Args:
      vocab_size: the exclusive upper bound of sampled tokens.
      eos_probability: the probability that a sampled token is the EOS token.
      next_token: (tokens, seed) -> token, instead of the hash. A row then costs O(context).
      step_time_s: the duration of a step in seconds.
      check: True to store and check the KV.
      fault: returns True for scheduled sequences that compute non-finite values. The fault is
        reported once a row with logits depends on it. Reading that KV also faults.
    """

    def __init__(  # noqa: PLR0913
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        vocab_size: int = 256,
        eos_token_id: int | None = None,
        eos_probability: float = 0.0,
        next_token: Callable[[Seq[int], int], int] | None = None,
        step_time_s: float = 0.0,
        check: bool = True,
        pool: BlockPool | None = None,
        fault: Callable[[ScheduledSequence], bool] | None = None,
    ):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.vocab_size = vocab_size
        self.num_steps = 0
        self._eos_token_id = eos_token_id
        self._eos_threshold = int(eos_probability * 2**32) if eos_token_id is not None else 0
        self._next_token = next_token
        self._step_time_s = step_time_s
        self._check = check
        self._pool = pool
        self._fault = fault
        self._busy_until_s = 0.0
        self._salts: dict[str, int] = {}
        self.reset()

    def reset(self) -> None:
        """Drop all KV and all slots, like a device that is rebuilt after an error."""
        self._slots: list[_Slot | None] = [None] * self.max_num_seqs
        self._kv = [[_UNWRITTEN] * self.block_size for _ in range(self.num_blocks)]
        self._history: dict[tuple[str, int], _Slot] = {}  # with `check`: each sequence's last slot

    def continuation(
        self,
        prompt: Seq[int],
        params: SamplingParams,
        seed: int,
        stop_ids: Seq[int],
        count: int,
        mask: Callable[[Seq[int]], Any] | None = None,
    ) -> list[int]:
        """Return the tokens that a sequence samples after `prompt`, on any schedule.

        Args:
          stop_ids: tokens that are not sampled until `min_tokens` is reached.
          mask: returns the mask of a row from all tokens before it.
        """
        tokens = list(prompt)
        rolling = _EMPTY
        for token in tokens:
            rolling = _extend(rolling, token)
        for num_output in range(count):
            stops = stop_ids if num_output < params.held_tokens else ()
            noise = 0 if params.greedy else seed
            allowed = None if mask is None else mask(tokens)
            tokens.append(self._sample(tokens, rolling, noise, stops, allowed))
            rolling = _extend(rolling, tokens[-1])
        return tokens[len(prompt) :]

    def dispatch(self, plan: StepPlan) -> tuple[StepResult, float]:
        """Run a step, and return the argument of `read`."""
        for admission in plan.admissions:
            self._admit(admission)
        rows = plan.sequences
        if self._check:
            self._check_plan(plan, rows)
        results, first = [], 0
        for scheduled in rows:
            end = first + scheduled.num_rows
            masks = None if plan.masks is None else plan.masks[first:end]
            results.append(self._run(scheduled, masks))
            first = end
        assert plan.masks is None or len(plan.masks) == first, "not a mask for each row"
        self.num_steps += 1
        if self._step_time_s:
            start_s = max(time.monotonic(), self._busy_until_s)
            self._busy_until_s = start_s + self._step_time_s
        return StepResult(plan.step, tuple(results)), self._busy_until_s

    def read(self, pending: tuple[StepResult, float]) -> StepResult:
        """Return the result of a dispatched step, after its time has passed."""
        result, ready_s = pending
        if self._step_time_s:
            time.sleep(max(0.0, ready_s - time.monotonic()))
        return result

    # ---- one sequence --------------------------------------------------------------------------

    def _admit(self, admission: Admission) -> None:
        assert 0 <= admission.slot < self.max_num_seqs, f"no slot {admission.slot}"
        key = admission.seq_key
        slot = _Slot(admission, list(admission.block_table), [])
        for token in admission.tokens:
            slot.append(token)
        self._slots[admission.slot] = slot
        if self._check:
            before = self._history.get(key)
            if before is not None:
                assert slot.tokens == before.known(), f"{key} comes back with other tokens"
            self._history[key] = slot

    def _run(self, scheduled: ScheduledSequence, masks: Any = None) -> SequenceResult:
        slot = self._slots[scheduled.slot]
        assert slot is not None, f"slot {scheduled.slot} is empty"
        admission = slot.admission
        for index, block in scheduled.new_blocks:
            assert index == len(slot.block_table), "the block table has a gap"
            slot.block_table.append(block)
        for position, token in enumerate(scheduled.token_ids, scheduled.start):
            if token == FED_BACK:
                assert slot.last_token is not None, f"{scheduled.seq_key}: nothing to feed back"
                token = slot.last_token
            known = len(slot.tokens)
            assert position <= known, f"{scheduled.seq_key}: skips to position {position}"
            if position == known:
                slot.append(token)
            assert slot.tokens[position] == token, f"{scheduled.seq_key}: wrong token at {position}"
        end = scheduled.start + len(scheduled.token_ids)
        fault = self._fault is not None and self._fault(scheduled)
        if self._check:
            self._check_scheduled(slot, scheduled)
            fault |= self._gather(slot, scheduled)
            self._write(slot, scheduled, poison=fault)
        slot.computed = end
        if fault:
            slot.last_token = 0
            if scheduled.num_drafts:
                slot.forget(end - scheduled.num_drafts)
                slot.last_token = None
            return SequenceResult((0,) * scheduled.samples, fault=scheduled.num_rows > 0)
        params = admission.params
        token_ids: tuple[int, ...] = ()
        logprobs = prompt_logprobs = None
        if scheduled.samples:
            token_ids = tuple(self._verify(slot, scheduled, masks))
            slot.last_token = token_ids[-1]
            first = end - scheduled.num_drafts
            if params.logprobs is not None:
                logprobs = tuple(
                    self._logprobs(slot.rolling[first + row], token, params.logprobs)
                    for row, token in enumerate(token_ids)
                )
            slot.computed = first + len(token_ids) - 1
            slot.forget(slot.computed)
        if scheduled.scoring and params.prompt_logprobs is not None:
            first = end - scheduled.num_rows + 1
            prompt_logprobs = tuple(
                self._logprobs(slot.rolling[first + row], target, params.prompt_logprobs)
                for row, target in enumerate(scheduled.targets)
            )
        pooled = None if scheduled.pooling is None else self._pool_hidden(slot, scheduled)
        activations = None
        if scheduled.num_returned and params.return_activations is not None:
            first = end - scheduled.num_returned
            count = len(token_ids) if scheduled.num_drafts else scheduled.num_returned
            activations = self._activations(
                slot.rolling[first + 1 : first + 1 + count], first, params.return_activations.names
            )
        return SequenceResult(token_ids, False, logprobs, prompt_logprobs, pooled, activations)

    def activations(self, tokens: Seq[int], start: int, names: Seq[str]) -> Activations:
        """Return the activations of `tokens` from position `start` on, on any schedule."""
        rolling = _EMPTY
        rows: list[int] = []
        for token in tokens:
            rolling = _extend(rolling, token)
            rows.append(rolling)
        return self._activations(rows[start:], start, names)

    def _activations(self, rolling: Seq[int], start: int, names: Seq[str]) -> Activations:
        rows = np.array([_hidden(each) for each in rolling], np.float32)
        return Activations(start, dict.fromkeys(names, rows.reshape(-1, POOLED_SIZE)))

    def _pool_hidden(self, slot: _Slot, scheduled: ScheduledSequence) -> bytes | None:
        """Add the hidden states of this step, so that a skipped position changes the result."""
        end = scheduled.start + scheduled.num_tokens
        hidden = [0.0] * POOLED_SIZE
        for length in range(scheduled.start + 1, end + 1):
            hidden = _hidden(slot.rolling[length])
            slot.hidden_sum = [a + b for a, b in zip(slot.hidden_sum, hidden, strict=True)]
        if not scheduled.num_rows:
            return None
        mean = [total / end for total in slot.hidden_sum]
        return struct.pack(f"<{POOLED_SIZE}f", *(mean if scheduled.pooling == "mean" else hidden))

    def pooled(self, prompt: Seq[int], pooling: Pooling) -> list[float]:
        """Return the embedding of a prompt, on any schedule, before rounding to float32."""
        rolling, states = _EMPTY, []
        for token in prompt:
            rolling = _extend(rolling, token)
            states.append(_hidden(rolling))
        if pooling == "last":
            return states[-1]
        return [sum(column) / len(states) for column in zip(*states, strict=True)]

    def _verify(self, slot: _Slot, scheduled: ScheduledSequence, masks: Any) -> list[int]:
        """Return the sampled tokens of the rows, up to the first wrong draft."""
        params = slot.admission.params
        assert masks is not None or not params.masked, f"{scheduled.seq_key} has no mask"
        if masks is not None:
            masks = masks[scheduled.num_rows - 1 - scheduled.num_drafts :]
        seed = 0 if params.greedy else slot.admission.seed
        sampled: list[int] = []
        first = scheduled.start + scheduled.num_tokens - scheduled.num_drafts
        for row, end in enumerate(range(first, first + scheduled.num_drafts + 1)):
            held_back = scheduled.num_output + row < params.held_tokens
            stops = slot.admission.stop_ids if held_back else ()
            tokens = slot.tokens if end == len(slot.tokens) else slot.tokens[:end]
            mask = None if masks is None else masks[row]
            sampled.append(self._sample(tokens, slot.rolling[end], seed, stops, mask))
            if end < len(slot.tokens) and slot.tokens[end] != sampled[-1]:
                break
        return sampled

    def _sample(
        self, tokens: Seq[int], rolling: int, seed: int, stops: Seq[int], mask: Any = None
    ) -> int:
        if self._next_token is not None:
            token = self._next_token(tokens, seed)
        else:
            noise = ((rolling ^ seed) * 0x9E3779B97F4A7C15) & _MASK
            noise = ((noise ^ noise >> 31) * 0xBF58476D1CE4E5B9) & _MASK
            if noise & 0xFFFFFFFF < self._eos_threshold and self._eos_token_id is not None:
                token = self._eos_token_id
            else:
                token = (noise >> 32) % self.vocab_size
        for _ in range(self.vocab_size):
            if token not in stops and (mask is None or mask[token >> 5] >> (token & 31) & 1):
                break
            token = (token + 1) % self.vocab_size
        else:
            raise AssertionError("a mask allows no token")
        return token

    def _logprobs(self, rolling: int, token: int, count: int) -> TokenLogprobs:
        top = tuple(((rolling >> 16) + index) % self.vocab_size for index in range(min(count, 20)))
        return TokenLogprobs(
            token,
            -1.0 - token / self.vocab_size,
            tuple((t, -1.0 - i) for i, t in enumerate(top)),
            rank=1 + token,
        )

    # ---- the KV cache --------------------------------------------------------------------------

    def kv(self, block: int) -> list[int]:
        """Return a copy of a block's KV. Requires `check`. Equal prefixes have equal KV."""
        return self._kv[block].copy()

    def set_kv(self, block: int, kv: Seq[int]) -> None:
        """Overwrite a block. Requires `check`."""
        if self._pool is not None:
            assert self._pool.is_writable(block), f"a load writes block {block}, which is in use"
        self._kv[block] = list(kv)

    def _check_plan(self, plan: StepPlan, rows: Seq[ScheduledSequence]) -> None:
        slots = [scheduled.slot for scheduled in rows]
        assert len(set(slots)) == len(slots), "a slot runs twice in a step"
        counts = [scheduled.num_tokens for scheduled in rows]
        assert all(counts), "a sequence without tokens"
        singles = sum(count == 1 for count in counts)
        assert all(count == 1 for count in counts[:singles]), "single tokens do not come first"
        admitted = {admission.slot for admission in plan.admissions}
        assert len(admitted) == len(plan.admissions) and admitted <= set(slots)

    def _check_scheduled(self, slot: _Slot, scheduled: ScheduledSequence) -> None:
        key, admission = scheduled.seq_key, slot.admission
        assert key == admission.seq_key, f"{key} runs in the slot of {admission.seq_key}"
        end = scheduled.start + scheduled.num_tokens
        if slot.computed is not None:
            assert scheduled.start == slot.computed, f"{key}: positions are not contiguous"
        assert 0 <= scheduled.num_rows <= scheduled.num_tokens
        if scheduled.samples:
            assert scheduled.num_rows and end == len(slot.tokens), f"{key}: samples too early"
            num_output = end - scheduled.num_drafts - admission.prompt_len
            assert scheduled.num_output == num_output, f"{key}: num_output"
        if scheduled.scoring:
            first = end - scheduled.num_rows + 1
            prompt = slot.tokens[: admission.prompt_len]
            assert scheduled.targets == tuple(prompt[first : end + 1]), f"{key}: wrong targets"

    def _expect(self, slot: _Slot, salt: str) -> list[int]:
        """Return the expected KV of each token, which is the hash of its prefix and the salt."""
        if salt not in self._salts:
            self._salts[salt] = _salt_hash(salt)
        expected, salted = slot.expected_kv, self._salts[salt]
        expected += [rolling ^ salted for rolling in slot.rolling[len(expected) + 1 :]]
        return expected

    def _gather(self, slot: _Slot, scheduled: ScheduledSequence) -> bool:
        """Return True if the prefix has non-finite KV.

        Raises:
          AssertionError: the KV is that of another prefix.
        """
        block_size, start = self.block_size, scheduled.start
        expected = self._expect(slot, scheduled.salt)[:start]
        found: list[int] = []
        for block in slot.block_table[: -(-start // block_size)]:
            found += self._kv[block]
        del found[start:]
        if found == expected:
            return False
        for position, (have, want) in enumerate(zip(found, expected, strict=True)):
            if have not in (want, _POISON):
                block = slot.block_table[position // block_size]
                what = "nothing" if have == _UNWRITTEN else "the KV of another prefix"
                raise AssertionError(
                    f"{scheduled.seq_key}: block {block} holds {what} at position {position}"
                )
        return True

    def _write(self, slot: _Slot, scheduled: ScheduledSequence, *, poison: bool) -> None:
        start, end = scheduled.start, scheduled.start + scheduled.num_tokens
        values = self._expect(slot, scheduled.salt)[start:end]
        for position, value in enumerate(values, start):
            index, offset = divmod(position, self.block_size)
            assert index < len(slot.block_table), f"{scheduled.seq_key}: no block for {position}"
            block = slot.block_table[index]
            if self._pool is not None:
                assert self._pool.is_writable(block), (
                    f"{scheduled.seq_key} writes position {position} to block {block}, which has "
                    f"{self._pool.ref_count(block)} owners"
                    f"{' and is in the prefix cache' * self._pool.is_registered(block)}"
                )
            self._kv[block][offset] = _POISON if poison else value


class FakeHostMemory:
    """A `HostMemory` for a `FakeDevice` with `check`.

    A copy to the host is taken when it is started, as on a device that runs in order. It can be
    read only after it has finished.

    Args:
      finishes: returns True if the next copy or load in progress has finished.
    """

    block_bytes = 1

    def __init__(self, device: FakeDevice, finishes: Callable[[], bool] = lambda: True):
        self._device = device
        self._finishes = finishes
        self.reset()

    def reset(self) -> None:
        self._copies: dict[int, list[int]] = {}
        self._saves: deque[tuple[int, list[int]]] = deque()
        self._loads: deque[tuple[int, list[tuple[int, list[int]]]]] = deque()
        self._dropped: set[int] = set()

    def start(self, transfers: Transfers) -> None:
        for copy, block in transfers.saves:
            self._saves.append((copy, self._device.kv(block)))
        nothing = [_UNWRITTEN] * self._device.block_size
        for load, pairs in transfers.loads:
            read = [(block, self._copies.get(copy, nothing)) for copy, block in pairs]
            self._loads.append((load, read))
        for copy in transfers.drops:
            if self._copies.pop(copy, None) is None:
                self._dropped.add(copy)

    def finished(self) -> Finished:
        saves, loads = [], []
        while self._saves and self._finishes():
            copy, kv = self._saves.popleft()
            saves.append(copy)
            if copy in self._dropped:
                self._dropped.remove(copy)
            else:
                self._copies[copy] = kv
        while self._loads and self._finishes():
            load, pairs = self._loads.popleft()
            loads.append(load)
            for block, kv in pairs:
                self._device.set_kv(block, kv)
        return Finished(saves=saves, loads=loads)

    def wait(self) -> None:
        """Return at once: `finishes` decides, not the time."""


class FailingDevice:
    """A device whose steps can raise, to test recovery.

    Args:
      device: runs the steps.
      fails: (plan, "dispatch" or "read") -> True if the step raises there. After a failure, the
        device must be reset before its next use.
    """

    def __init__(self, device: Device, fails: Callable[[StepPlan, str], bool]):
        self.device = device
        self.num_failures = 0
        self._fails = fails
        self._broken = False

    def dispatch(self, plan: StepPlan) -> tuple[StepPlan, Any]:
        assert not self._broken, "a step is dispatched to a device that was not reset"
        pending = self.device.dispatch(plan)
        self._fail(plan, "dispatch")
        return plan, pending

    def read(self, pending: tuple[StepPlan, Any]) -> StepResult:
        assert not self._broken, "a step is read from a device that was not reset"
        plan, inner = pending
        self._fail(plan, "read")
        return self.device.read(inner)

    def reset(self) -> None:
        self.device.reset()
        self._broken = False

    def _fail(self, plan: StepPlan, where: str) -> None:
        if self._fails(plan, where):
            self._broken = True
            self.num_failures += 1
            raise RuntimeError(f"injected: step {plan.step} fails at its {where}")


@contextmanager
def failing_steps(core: Any, fails: Callable[[StepPlan, str], bool]) -> Iterator[FailingDevice]:
    """Make steps of an `EngineCore` raise. It recovers from these, but not from failed checks.

    Args:
      fails: as for `FailingDevice`.
    """
    device, unrecoverable = core.device, core.unrecoverable
    core.device = failing = FailingDevice(device, fails)
    core.unrecoverable = (AssertionError,)
    try:
        yield failing
    finally:
        core.device, core.unrecoverable = device, unrecoverable


def drafts_always_pay(policy: Any) -> None:
    """Make a `LengthPolicy` assume that all steps take one second, and that waiting is free."""
    policy.drafted.record(1 << 20, 1.0)  # lets steps have any number of drafts
    for times in (policy.ahead, policy.alone, policy.drafted):
        times.expect = lambda num_tokens, origin=None: 1.0
        times.count = lambda num_tokens: math.inf
        times.record = lambda num_tokens, seconds: None


def not_a_number(dtype: Any) -> float:
    """Return a NaN in the storage type of a KV cache array.

    In 8-bit caches the scales are stored as uint16. Integers have no NaN, so it returns the
    largest one.
    """
    largest = {"int8": 127, "int32": 2**31 - 1}
    return (largest | {"uint16": 0x7FC1, "uint8": 0x7F}).get(str(dtype), math.nan)


# ---- tiny models -------------------------------------------------------------------------------


def core_of(engine: LLM | Engine) -> EngineCore:
    """Return the loop of an engine in this process: its scheduler, device and statistics.

    The core is private API and may change in any release. The thread of an `Engine` uses it too, so
    only read from it while requests run.
    """
    return engine._core  # pyright: ignore[reportPrivateUsage]


def tiny_model(**changes: Any) -> Model:
    """Return a Llama of a few thousand parameters, without weights.

    `changes` replace fields of its `ModelSpec`: `tiny_model(vocab_size=64)`.
    """
    from forge_jax.models.registry import build_model
    from forge_jax.models.spec import ModelSpec, RopeSpec

    fields: dict[str, Any] = {
        "architecture": "LlamaForCausalLM",
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "norm_eps": 1e-5,
        "rope": RopeSpec(type="default", theta=10000.0),
        "tie_word_embeddings": True,
        "dtype": "float32",
        "bos_token_id": 1,
        "eos_token_ids": (2,),
        **changes,
    }
    return build_model(ModelSpec(**fields), fields["dtype"])


def random_leaves(model: Model, seed: int = 0) -> tuple[jax.Array, ...]:
    """Return random weights for `model`, in the order of `model.leaves`.

    Norms are near one. Other weights are large enough that the logits of a tiny model clearly
    differ between tokens.
    """
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(seed)
    leaves = []
    for leaf in model.leaves:
        values = rng.normal(size=leaf.shape)
        values = 1 + 0.1 * values if len(leaf.shape) == 1 else 2 * values / leaf.shape[-1] ** 0.5
        leaves.append(jnp.asarray(values, leaf.dtype))
    return tuple(leaves)
