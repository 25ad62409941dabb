"""Interfaces of drafters, which propose likely continuations of sequences.

The target model verifies drafts, so they do not affect the output. A drafter runs in the thread
that schedules, and the device is idle meanwhile.

A `Drafter` proposes for all sequences of a step together, as a draft model does. A `TextDrafter`
proposes for one text at a time.
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

from forge_jax.schedule.request import Sequence


class Draft(NamedTuple):
    token_ids: tuple[int, ...] = ()
    # The drafter's estimate that each token is accepted if those before it are. Only the order
    # matters, because the length policy learns the actual acceptance rates.
    confidence: tuple[float, ...] = ()


class Drafter(Protocol):
    """A drafter for sequences of the scheduler whose tokens have all been read."""

    def propose(self, seqs: Seq[Sequence]) -> list[Draft]:
        """Return a draft for each sequence, which may be empty."""
        ...

    def predict_confidence(self, seqs: Seq[Sequence]) -> list[Seq[float]]:
        """Predict the confidence of `propose` cheaply, one step early.

        The last token of each sequence is sampled, but not read yet. The values are those of the
        tokens after it. The first value is the probability that both it and the unread token match
        the drafter's prediction.
        """
        ...

    def ingest(self, limit: int) -> bool:
        """Learn at most `limit` tokens of outputs, for later sequences.

        Returns:
          True if there are more.
        """
        ...

    def end(self, seq: Sequence) -> None:
        """Release the state of a sequence that has ended, if there is any."""
        ...

    def reset(self) -> None:
        """Drop the device state, after a step has raised. The sequences continue."""
        ...


class TextDrafter(Protocol):
    """A drafter that uses the tokens of live and, optionally, earlier sequences.

    `propose` and `ingest` read the tokens, so a sequence without drafts costs almost nothing.
    """

    def propose(self, key: Hashable, tokens: Seq[int], prompt_len: int, salt: str) -> Draft:
        """Return a draft of the tokens after `tokens`, as long as there is evidence for it.

        All calls for one key pass the same list, which grows at its end.

        Args:
          key: the sequence.
          tokens: prompt and output tokens. The drafter neither changes nor keeps the list.
          prompt_len: the number of prompt tokens.
          salt: the draft must not depend on sequences with another salt.
        """
        ...

    def ingest(self, limit: int) -> bool:
        """Learn at most `limit` tokens of outputs, for other sequences; True if there are more."""
        ...

    def end(self, key: Hashable, tokens: Seq[int], prompt_len: int, salt: str) -> None:
        """Release the state of a sequence that has ended with these tokens, if there is any."""
        ...


class OneByOne:
    """A `Drafter` that calls a `TextDrafter` for each sequence.

    If the first token of a predicted draft was right, the rest of it becomes the draft.
    """

    def __init__(self, drafter: TextDrafter):
        self._drafter = drafter
        self._foreseen: dict[Hashable, tuple[int, Draft]] = {}  # (known tokens, predicted draft)

    def propose(self, seqs: Seq[Sequence]) -> list[Draft]:
        return [self._propose(seq) for seq in seqs]

    def predict_confidence(self, seqs: Seq[Sequence]) -> list[Seq[float]]:
        foreseen: list[Seq[float]] = []
        self._foreseen.clear()
        for seq in seqs:
            draft = self._ask(seq)
            if len(draft.token_ids) > 1:
                self._foreseen[seq.key] = len(seq.tokens), draft
                # If the prediction of the token in flight is wrong, so is the rest.
                first, second, *rest = draft.confidence
                foreseen.append([first * second, *rest])
            else:
                foreseen.append([])
        return foreseen

    def ingest(self, limit: int) -> bool:
        return self._drafter.ingest(limit)

    def end(self, seq: Sequence) -> None:
        self._foreseen.pop(seq.key, None)
        self._drafter.end(seq.key, seq.tokens, seq.prompt_len, seq.salt)

    def reset(self) -> None:
        """Do nothing, because there is no device state."""

    def _propose(self, seq: Sequence) -> Draft:
        known, draft = self._foreseen.pop(seq.key, (0, Draft()))
        if known + 1 == len(seq.tokens) and seq.tokens[-1] == draft.token_ids[0]:
            return Draft(draft.token_ids[1:], draft.confidence[1:])
        return self._ask(seq)

    def _ask(self, seq: Sequence) -> Draft:
        return self._drafter.propose(seq.key, seq.tokens, seq.prompt_len, seq.salt)
