"""What proposes drafts: tokens that a sequence may well go on with.

A draft is only a guess: the target model verifies it, and what is put out does not depend on it. A
drafter is asked by the thread that schedules, so its time is the device's idle time.

Drafters of two kinds: a `TextDrafter` looks at one text at a time; what runs a model is asked for
all sequences of a step together, as every `Drafter` is.
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

from forge_jax.schedule.request import Sequence


class Draft(NamedTuple):
    token_ids: tuple[int, ...] = ()
    # For each token: how likely it is to be accepted if those before it are, by the drafter's
    # own reckoning. Only their order matters: the length policy learns what they are worth.
    confidence: tuple[float, ...] = ()


class Drafter(Protocol):
    """Drafts for sequences of the scheduler, whose tokens have all been read."""

    def propose(self, seqs: Seq[Sequence]) -> list[Draft]:
        """A draft, maybe an empty one, for each of them."""
        ...

    def predict_confidence(self, seqs: Seq[Sequence]) -> list[Seq[float]]:
        """What the confidence of `propose` would be, one step early and cheaply.

        The last token of each sequence has been sampled and not been read. The values are of the
        tokens after it: the first, that it and the one before are what the drafter thinks.
        """
        ...

    def ingest(self, limit: int) -> bool:
        """Takes in so many tokens, at most, of what has ended, for those that come later.

        Returns whether there are more.
        """
        ...

    def end(self, seq: Sequence) -> None:
        """The sequence has ended. It may never have been asked for."""
        ...

    def reset(self) -> None:
        """A step has raised: what the device holds is lost. The sequences go on."""
        ...


class TextDrafter(Protocol):
    """Knows the tokens of live sequences, by key, and those of earlier ones as it sees fit.

    Tokens are taken in by `propose` and `ingest`: a sequence that is never asked for costs next to
    nothing.
    """

    def propose(self, key: Hashable, tokens: Seq[int], prompt_len: int, salt: str) -> Draft:
        """Guesses what follows `tokens` (prompt, then output): as much as it has a reason for.

        Calls for one key come with the same list, grown at its end.

        Args:
          tokens: of the sequence, known to the host; not changed, and not kept beyond the call.
          prompt_len: how many of them are the prompt's.
          salt: nothing that came with another salt may show in the draft.
        """
        ...

    def ingest(self, limit: int) -> bool:
        """Takes in so many tokens, at most, of what was put out, for others: are there more?"""
        ...

    def end(self, key: Hashable, tokens: Seq[int], prompt_len: int, salt: str) -> None:
        """The sequence has ended, with these tokens. Unknown keys are fine."""
        ...


class OneByOne:
    """A `Drafter` of a `TextDrafter`.

    What was foreseen is the draft, but for its first token, where that came true.
    """

    def __init__(self, drafter: TextDrafter):
        self._drafter = drafter
        self._foreseen: dict[Hashable, tuple[int, Draft]] = {}  # tokens known then, and the draft

    def propose(self, seqs: Seq[Sequence]) -> list[Draft]:
        return [self._propose(seq) for seq in seqs]

    def predict_confidence(self, seqs: Seq[Sequence]) -> list[Seq[float]]:
        foreseen: list[Seq[float]] = []
        self._foreseen.clear()
        for seq in seqs:
            draft = self._ask(seq)
            if len(draft.token_ids) > 1:
                self._foreseen[seq.key] = len(seq.tokens), draft
                # If the guess of the token in flight is wrong, so is the rest.
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
        """Knows nothing of the device."""

    def _propose(self, seq: Sequence) -> Draft:
        known, draft = self._foreseen.pop(seq.key, (0, Draft()))
        if known + 1 == len(seq.tokens) and seq.tokens[-1] == draft.token_ids[0]:
            return Draft(draft.token_ids[1:], draft.confidence[1:])
        return self._ask(seq)

    def _ask(self, seq: Sequence) -> Draft:
        return self._drafter.propose(seq.key, seq.tokens, seq.prompt_len, seq.salt)
