"""Drafts from a smaller model of the same vocabulary: the host's part.

It manages the blocks of the draft model's KV cache, and records which tokens of a sequence are
computed in them. A sequence is computed again from the first token that differs from the cache, so
wrong drafts are overwritten.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from forge_jax.schedule.block_pool import BlockPool
from forge_jax.schedule.request import Sequence
from forge_jax.speculate.draft_step import Row, pack_params
from forge_jax.speculate.drafter import Draft
from forge_jax.step.slots import PADDING

if TYPE_CHECKING:
    from forge_jax.speculate.draft_model import DraftModel

log = logging.getLogger(__name__)

TAKEN_IN = 2  # Known tokens per sequence that `draft` computes itself.
PRIOR_CONFIDENCE = 0.9  # Initial estimate of the confidence.
WEIGHT = 0.05  # Weight of new confidence in the mean.


@dataclass(slots=True)
class _Computed:
    """The state of a sequence in the draft model's cache."""

    seq: Sequence
    params: np.ndarray  # i32[NUM_PARAMS]
    blocks: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # tokens in the blocks; drafts at the end
    num_known: int = 0  # how many of `tokens` are known to match the sequence

    def align(self) -> int:
        """Drop tokens that differ from the sequence, and return how many are computed.

        The sequence's last token never counts, because it must be computed to predict the next.
        """
        tokens, known = self.tokens, self.seq.tokens
        end = min(len(tokens), len(known) - 1)
        while self.num_known < end and tokens[self.num_known] == known[self.num_known]:
            self.num_known += 1
        self.num_known = min(self.num_known, end)
        del tokens[self.num_known :]
        return self.num_known


class ModelDrafter:
    """A `Drafter` that runs a model.

    A sequence gets blocks with its first `propose`. It loses them when it ends, or when another one
    needs them while it does not run. A sequence without blocks has no drafts. Prompts are computed
    in chunks, one call per `propose`, and a sequence has no drafts until its prompt is computed.
    """

    def __init__(self, model: DraftModel):
        self._model = model
        self._most = model.max_draft_tokens
        kv = model.kv_shape
        self._pool = BlockPool(kv.num_blocks, kv.block_size, prefix_cache=False)
        self._computed: dict[tuple[str, int], _Computed] = {}
        self._typical = np.full(self._most, PRIOR_CONFIDENCE)
        self._told = False

    def propose(self, seqs: Seq[Sequence]) -> list[Draft]:
        if not self._model.can_draft:
            return [Draft()] * len(seqs)
        served = [self._room_for(seq) for seq in seqs]
        self._catch_up([computed for computed in served if computed is not None])
        ready = {
            place: computed
            for place, computed in enumerate(served)
            if computed is not None and _missing(computed) <= TAKEN_IN
        }
        drafts = [Draft()] * len(seqs)
        if ready:
            for place, draft in zip(ready, self._draft([*ready.values()]), strict=True):
                drafts[place] = draft
        return drafts

    def predict_confidence(self, seqs: Seq[Sequence]) -> list[Seq[float]]:
        """Return the typical confidence, for sequences that can have drafts."""
        if not self._model.can_draft:
            return [()] * len(seqs)
        typical = self._typical.tolist()
        return [typical[: self._draft_room(seq)] if self._may(seq) else () for seq in seqs]

    def ingest(self, limit: int) -> bool:
        """Return False, because outputs are not used."""
        return False

    def end(self, seq: Sequence) -> None:
        computed = self._computed.get(seq.key)
        if computed is not None and computed.seq is seq:
            self._pool.release(computed.blocks)
            del self._computed[seq.key]

    def reset(self) -> None:
        self._computed.clear()
        self._pool.reset()
        self._model.reset()

    # ---- blocks --------------------------------------------------------------------------------

    def _room_for(self, seq: Sequence) -> _Computed | None:
        """Allocate blocks for the sequence's tokens and drafts; None if there are too few."""
        computed = self._computed.get(seq.key)
        if computed is None or computed.seq is not seq:
            if computed is not None:
                self.end(computed.seq)
            computed = _Computed(seq, pack_params(seq.seed, seq.params))
            self._computed[seq.key] = computed
        length = len(seq.tokens)
        if length > self._model.context:
            self._tell(seq)
            self.end(seq)
            return None
        # The last draft is not computed.
        wanted = min(length + self._draft_room(seq) - 1, self._model.context)
        missing = self._num_blocks(wanted) - len(computed.blocks)
        if missing > 0:
            blocks = self._allocate(missing)
            least = self._num_blocks(length) - len(computed.blocks)
            if blocks is None and 0 < least < missing:
                blocks = self._allocate(least)
            computed.blocks += blocks or ()
        if self._num_blocks(length) > len(computed.blocks):
            return None
        computed.align()
        return computed

    def _allocate(self, count: int) -> list[int] | None:
        """Allocate blocks, taking them from sequences that do not run if necessary."""
        blocks = self._pool.allocate(count)
        if blocks is None:
            for computed in self._computed.values():
                if computed.blocks and not computed.seq.running:
                    self._pool.release(computed.blocks)
                    computed.blocks, computed.tokens, computed.num_known = [], [], 0
                    if self._pool.num_free >= count:
                        break
            blocks = self._pool.allocate(count)
        return blocks

    def _may(self, seq: Sequence) -> bool:
        """Return True if there are probably enough blocks for the sequence."""
        length = seq.num_tokens
        if length > self._model.context:
            return False
        computed = self._computed.get(seq.key)
        held = 0 if computed is None else len(computed.blocks)
        return self._num_blocks(length) - held <= self._pool.num_free

    def _draft_room(self, seq: Sequence) -> int:
        """Return the number of draft tokens that could be verified."""
        return max(min(self._most, seq.max_len - seq.num_tokens - 1), 0)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._pool.block_size)

    def _tell(self, seq: Sequence) -> None:
        if not self._told:
            self._told = True
            log.warning(
                "request %s exceeds the draft model's context of %d tokens: sequences of this "
                "length get no drafts",
                seq.request_id,
                self._model.context,
            )

    # ---- calls ---------------------------------------------------------------------------------

    def _catch_up(self, served: list[_Computed]) -> None:
        """Compute tokens beyond those that `draft` computes, in one call, in order of rank."""
        rows: list[Row] = []
        left = self._model.extend_tokens
        for computed in served:
            missing = _missing(computed)
            if missing <= TAKEN_IN or not left or len(rows) == self._model.extend_rows:
                continue
            start = len(computed.tokens)
            chunk = computed.seq.tokens[start : start + min(missing - 1, left)]
            rows.append(Row(chunk, start, computed.blocks))
            computed.tokens += chunk
            computed.num_known = len(computed.tokens)
            left -= len(chunk)
        if rows:
            self._model.extend(rows)

    def _draft(self, served: list[_Computed]) -> Iterator[Draft]:
        """Yield a draft for each sequence, from as few calls as possible."""
        rows, rooms = [], []
        for computed in served:
            tokens, start = computed.seq.tokens, len(computed.tokens)
            end = min(len(computed.blocks) * self._pool.block_size, self._model.context)
            # One more draft than positions, because the last draft is not computed. `end` is at
            # least the number of tokens.
            room = min(self._draft_room(computed.seq), end - len(tokens) + 1)
            slot = PADDING if computed.seq.slot is None else computed.seq.slot
            rows.append(Row(tokens[start:], start, computed.blocks, end, computed.params, slot))
            rooms.append(room)
        token_ids, confidence = self._model.draft(rows)
        typical = self._typical.tolist()
        shortest = min(rooms)
        self._typical[:shortest] += WEIGHT * (
            confidence[:, :shortest].mean(axis=0) - self._typical[:shortest]
        )
        drafts = zip(served, rows, rooms, token_ids.tolist(), confidence.tolist(), strict=True)
        for computed, row, room, drafted, values in drafts:
            known = len(computed.seq.tokens)
            computed.num_known = known
            computed.tokens += row.token_ids
            # The device writes all drafts that have a position, except the last.
            computed.tokens += drafted[: min(self._most - 1, row.end - known)]
            if self._model.proposes and not computed.seq.params.greedy:
                # The number of verified drafts must not depend on the drawn tokens. The first value
                # does not, and the others are replaced by the typical ones from before.
                values = [values[0], *typical[1:]]
            yield Draft(tuple(drafted[:room]), tuple(values[:room]))


def _missing(computed: _Computed) -> int:
    """Return how many tokens of the sequence are not computed."""
    return len(computed.seq.tokens) - len(computed.tokens)
