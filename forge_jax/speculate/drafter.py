"""What proposes drafts: tokens that a sequence may well go on with.

A draft is only a guess: the target model verifies it, and what is put out does not depend on it. A
drafter is asked by the thread that schedules, so its time is the device's idle time.
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol


class Draft(NamedTuple):
    token_ids: tuple[int, ...] = ()
    # For each token: how likely it is to be accepted if those before it are, by the drafter's
    # own reckoning. Only their order matters: the length policy learns what they are worth.
    confidence: tuple[float, ...] = ()


class Drafter(Protocol):
    """Knows the tokens of live sequences, by key, and those of earlier ones as it sees fit.

    Nothing is done for a sequence that is never asked for: tokens are taken in by `propose`.
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

    def end(self, key: Hashable, tokens: Seq[int], prompt_len: int, salt: str) -> None:
        """The sequence has ended, with these tokens. Unknown keys are fine."""
        ...
