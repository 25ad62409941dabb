"""What drafts were drawn from, on its way from a draft model to the step that verifies them.

It stays on the device: the host knows the drafts alone, cuts them and orders them as it likes, and
each is found again by its slot and its place in the draft.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np

from forge_jax.step.slots import PADDING

SUPPORT = 64  # tokens that a draft is drawn from, the likeliest


class Proposed(NamedTuple):
    """Of each slot's last draft, token by token: those that could have been drawn, see `Drafts`."""

    token_ids: jax.Array  # i32[slots, k, K]
    probability: jax.Array  # f32[slots, k, K]


class DraftProbs:
    """Holds the arrays. The draft model replaces `latest`, steps read it; neither donates it.

    Args:
      max_drafts: k. vocab_size: K is that or `SUPPORT`, whichever is less.
      device: where they lie; with several devices they are whole on each.
    """

    latest: Proposed

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
        self.reset()

    def reset(self) -> None:
        """Makes the arrays anew: no draft is known."""
        token_ids = np.full(self._shape, PADDING, np.int32)
        probability = np.zeros(self._shape, np.float32)
        self.latest = Proposed(*jax.device_put((token_ids, probability), self._device))
