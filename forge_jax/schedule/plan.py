"""The host's decision for one step, and the step's result: plain ints, no arrays.

A step serves its sequences in the order of `StepPlan.sequences`: those with one token first
(decodes), then prompt chunks. The decodes are stored as columns. At 256 sequences, creating one
object per decode would take as long as all other decisions of the step. A device (`step/runner.py`,
or the fake one in `testing.py`) turns a plan into a `StepResult` with its rows in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

from forge_jax.config import Pooling
from forge_jax.sampling_params import SamplingParams
from forge_jax.schedule.activations import Activations

FED_BACK = -1  # a token that the host has not read: the device uses the slot's last token


@dataclass(frozen=True, slots=True)
class Admission:
    """The device's initial data for a sequence that takes a slot.

    `tokens` are those known at admission: the prompt, and the output of a preempted sequence. The
    device needs them only if the sequence is penalized.
    """

    slot: int
    seed: int
    params: SamplingParams
    stop_ids: tuple[int, ...]
    prompt_len: int
    block_table: tuple[int, ...]
    tokens: Seq[int]
    seq_key: tuple[str, int]  # (request_id, index)
    lora: int = 0  # slot of its adapter in the device's arrays; 0: none


# Objects that exist once per row and step are not frozen, but never changed: creating a frozen
# dataclass takes five times as long (0.9 us).
@dataclass(slots=True)
class ScheduledSequence:
    """`len(token_ids)` tokens of one sequence, at positions `start`, `start + 1`, ...

    The last `num_rows` get logits: 0 in the middle of a prompt, 1 to sample the next token, 1 + k
    to verify k drafts. If `scoring`, row i gives the logprob of `targets[i]`, the prompt's own next
    token. A row at the prompt's end has no target. The last row samples if `samples` is True. A
    prompt without output (max_tokens 0) ends with a row that does not sample.
    """

    slot: int
    start: int
    token_ids: tuple[int, ...]  # FED_BACK if only the device has the token
    num_rows: int
    samples: bool  # True if the last row's token is the sequence's next token
    # (index in the block table, block), since the last step
    new_blocks: tuple[tuple[int, int], ...]
    num_output: int  # output tokens before the first sampled one (for min_tokens)
    scoring: bool = False
    targets: tuple[int, ...] = ()  # with `scoring`: the next prompt token of each row that has one
    seq_key: tuple[str, int] = ("", 0)
    salt: str = ""
    pooling: Pooling | None = None  # how to pool hidden states; the last row returns them
    # Its last tokens whose activations are returned, if the request returns activations.
    num_returned: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_drafts(self) -> int:
        """Number of the last tokens that are drafts to verify."""
        return self.num_rows - 1 if self.samples and not self.scoring else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decodes:
    """Columns of the sequences that compute one token and sample from it.

    Row i is the i-th entry of each. The fields are as in `ScheduledSequence`, except `new_blocks`.
    """

    slots: Seq[int] = ()
    starts: Seq[int] = ()
    tokens: Seq[int] = ()  # FED_BACK if only the device has the token
    num_outputs: Seq[int] = ()
    new_blocks: Seq[tuple[int, int, int]] = ()  # (row, index in the block table, block)
    seq_keys: Seq[tuple[str, int]] = ()
    salts: Seq[str] = ()

    def __len__(self) -> int:
        return len(self.slots)

    def rows(self) -> list[ScheduledSequence]:
        """Return the rows as one object each."""
        new_blocks = {row: ((index, block),) for row, index, block in self.new_blocks}
        return [
            ScheduledSequence(
                slot=self.slots[row],
                start=self.starts[row],
                token_ids=(self.tokens[row],),
                num_rows=1,
                samples=True,
                new_blocks=new_blocks.get(row, ()),
                num_output=self.num_outputs[row],
                seq_key=self.seq_keys[row],
                salt=self.salts[row],
                num_returned=1,
            )
            for row in range(len(self))
        ]


@dataclass(frozen=True, slots=True)
class StepPlan:
    step: int
    admissions: tuple[Admission, ...]
    chunks: tuple[ScheduledSequence, ...]  # the rows after the decodes: drafts, then prompts
    decodes: Decodes = Decodes()
    # i32[num_rows, mask_width]: the tokens that each row may sample. All bits are set in a row
    # without a constraint. Token t is bit t % 32 of word t // 32. None: no row is constrained.
    masks: Any = None

    @property
    def sequences(self) -> tuple[ScheduledSequence, ...]:
        """Every row of the step in order, as new objects on each access."""
        return (*self.decodes.rows(), *self.chunks)

    @property
    def num_sequences(self) -> int:
        return len(self.decodes) + len(self.chunks)

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(len(s.token_ids) for s in self.chunks)

    @property
    def num_rows(self) -> int:
        return len(self.decodes) + sum(s.num_rows for s in self.chunks)

    @property
    def pools(self) -> bool:
        """True if the step pools hidden states, which needs separate executables."""
        return any(s.pooling is not None for s in self.chunks)

    @property
    def num_drafts(self) -> int:
        return sum(s.num_drafts for s in self.chunks)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The logprob of one token, and the most likely alternatives in descending order.

    `rank` is 1 for the most likely token.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 1


@dataclass(slots=True)
class SequenceResult:
    """The result of one scheduled sequence. `token_ids` is empty if it did not sample.

    If the row verified drafts, `token_ids` are the accepted ones and the token sampled after them.
    """

    token_ids: tuple[int, ...] = ()
    fault: bool = False  # its logits were not finite; ignore the tokens
    logprobs: tuple[TokenLogprobs, ...] | None = None  # logprobs of `token_ids`
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # logprobs of `targets`
    pooled: bytes | None = None  # f32[d], not normalized
    # Of the last `num_returned` tokens, without rejected drafts.
    activations: Activations | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    step: int
    sequences: tuple[SequenceResult, ...]


class Device(Protocol):
    """A device that runs plans in dispatch order. `dispatch` returns at once; `read` blocks.

    Both may raise. All steps in flight are then lost, and `reset` restores the initial state.
    """

    def dispatch(self, plan: StepPlan) -> Any: ...

    def read(self, pending: Any) -> StepResult: ...

    def reset(self) -> None:
        """Drop all KV, slots and steps in flight. Raise if the device cannot recover."""
        ...
