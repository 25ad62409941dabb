"""The distributions that draft tokens were drawn from, passed from a draft model to the step.

They stay on the device. The host has only the draft tokens, which it may truncate and reorder. A
token's distribution is found by its slot and its position in the draft.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from forge_jax.step.slots import PADDING

SUPPORT = 64  # a draft token is drawn from this many most likely tokens


class Proposed(NamedTuple):
    """The candidates of each slot's last draft, token by token. See `Drafts`."""

    token_ids: jax.Array  # i32[slots, k, K]
    probability: jax.Array  # f32[slots, k, K]


class DraftProbs:
    """The current arrays. The draft model replaces `latest`, steps read it, neither donates it.

    Args:
      max_drafts: k.
      vocab_size: K is the smaller of this and `SUPPORT`.
      device: where to put the arrays; with several devices they are replicated.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        max_drafts: int,
        vocab_size: int,
        device: jax.Device | jax.sharding.Sharding,
    ):
        self._device = device
        self._shape = (num_slots, max_drafts, min(SUPPORT, vocab_size))
        self._latest: Proposed | None = None

    @property
    def shapes(self) -> Any:
        """The shapes of the arrays, as a `Proposed`."""
        shape: Any = jax.ShapeDtypeStruct
        return Proposed(shape(self._shape, np.int32), shape(self._shape, np.float32))

    @property
    def latest(self) -> Proposed:
        if self._latest is None:
            self.reset()
        assert self._latest is not None
        return self._latest

    @latest.setter
    def latest(self, proposed: Proposed) -> None:
        self._latest = proposed

    def reset(self) -> None:
        """Recreate the arrays without any draft."""
        token_ids = np.full(self._shape, PADDING, np.int32)
        probability = np.zeros(self._shape, np.float32)
        self._latest = Proposed(*jax.device_put((token_ids, probability), self._device))
