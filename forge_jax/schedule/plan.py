"""The host's decision for one step, and what comes back: plain ints, no arrays.

A step serves its sequences in the order of `StepPlan.sequences`: those with one token first
(decode), then prompt chunks. The decodes are columns, not objects: at 256 sequences making the
objects would take as long as all other decisions of the step. A device (the real one in
step/runner.py, the fake one in testing.py) turns a plan into a `StepResult` whose rows stand in the
same order.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

from forge_jax.config import Pooling
from forge_jax.sampling_params import SamplingParams

FED_BACK = -1  # a token the host has not read: the device takes the slot's last token


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence takes a slot: everything the device must know of it before its first step.

    `tokens` are those known at admission (prompt, and output where it was preempted);
    the device needs them only if the sequence is penalised.
    """

    slot: int
    seed: int
    params: SamplingParams
    stop_ids: tuple[int, ...]
    prompt_len: int
    block_table: tuple[int, ...]
    tokens: Seq[int]
    seq_key: tuple[str, int]  # (request_id, index)
    lora: int = 0  # the place of its adapter; 0: none


# What exists once per row and step is not frozen, only never changed: a frozen dataclass takes five
# times as long to make (0.9 us).
@dataclass(slots=True)
class ScheduledSequence:
    """`len(token_ids)` tokens of one sequence, at positions `start`, `start + 1`, ...

    The last `num_rows` of them get logits: 0 in the middle of a prompt, 1 to sample the next token,
    1 + k to verify k drafts. With `scoring`, row i gives the logprob of `targets[i]`, the prompt's
    own next token; a row at the prompt's end has no target. The last row samples if `samples` says
    so; a prompt without output (max_tokens 0) ends with one that does not.
    """

    slot: int
    start: int
    token_ids: tuple[int, ...]  # FED_BACK where only the device knows it
    num_rows: int
    samples: bool  # whether the last row's token is the sequence's next token
    new_blocks: tuple[tuple[int, int], ...]  # (index in the block table, block), since last step
    num_output: int  # output tokens before the first sampled one (for min_tokens)
    scoring: bool = False
    targets: tuple[int, ...] = ()  # scoring: the next prompt token of each row that has one
    seq_key: tuple[str, int] = ("", 0)
    salt: str = ""
    pooling: Pooling | None = None  # with a row: the pooled hidden states are wanted

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_drafts(self) -> int:
        """How many of the last tokens are drafts, to be verified."""
        return self.num_rows - 1 if self.samples and not self.scoring else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decodes:
    """The sequences of a step that compute one token and sample from it: row i is the i-th of each.

    The fields are those of `ScheduledSequence`, except `new_blocks`.
    """

    slots: Seq[int] = ()
    starts: Seq[int] = ()
    tokens: Seq[int] = ()  # FED_BACK where only the device knows it
    num_outputs: Seq[int] = ()
    new_blocks: Seq[tuple[int, int, int]] = ()  # (row, index in the block table, block)
    seq_keys: Seq[tuple[str, int]] = ()
    salts: Seq[str] = ()

    def __len__(self) -> int:
        return len(self.slots)

    def rows(self) -> list[ScheduledSequence]:
        """The same, one object for each."""
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
            )
            for row in range(len(self))
        ]


@dataclass(frozen=True, slots=True)
class StepPlan:
    step: int
    admissions: tuple[Admission, ...]
    chunks: tuple[ScheduledSequence, ...]  # what comes after the decodes: drafts, then prompts
    decodes: Decodes = Decodes()
    # i32[num_rows, mask_width]: which tokens each row may sample, those of a row without a
    # constraint being all; None: every row may sample anything. Token t is bit t % 32 of word
    # t // 32.
    masks: Any = None

    @property
    def sequences(self) -> tuple[ScheduledSequence, ...]:
        """Every row of the step in order, made anew at each call."""
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
        """Whether hidden states are pooled, which takes executables of its own."""
        return any(s.pooling is not None for s in self.chunks)

    @property
    def num_drafts(self) -> int:
        return sum(s.num_drafts for s in self.chunks)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Logprob of one token, and the most likely alternatives, best first.

    `rank` is one more than the number of likelier tokens.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 1


@dataclass(slots=True)
class SequenceResult:
    """What one scheduled sequence got: `token_ids` is empty where it did not sample.

    Of verified drafts, `token_ids` are those that were accepted, and the token sampled after them.
    """

    token_ids: tuple[int, ...] = ()
    fault: bool = False  # its logits were not finite; the tokens mean nothing
    logprobs: tuple[TokenLogprobs, ...] | None = None  # of token_ids
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # of `targets`
    pooled: bytes | None = None  # f32[d], not normalised


@dataclass(frozen=True, slots=True)
class StepResult:
    step: int
    sequences: tuple[SequenceResult, ...]


class Device(Protocol):
    """Runs plans in the order they are dispatched. `dispatch` does not wait; `read` does.

    Either may raise; then no step in flight counts, and after `reset` the device is as at first.
    """

    def dispatch(self, plan: StepPlan) -> Any: ...

    def read(self, pending: Any) -> StepResult: ...

    def reset(self) -> None:
        """Gives up all KV, slots and steps in flight. Raises if the device is beyond repair."""
        ...
