"""Drafts from a smaller model of the same vocabulary, which runs on the device too.

The host's part: which sequences have blocks of the draft model's KV cache, and how many of their
tokens are computed in it. What a wrong draft wrote there is written over: a sequence is computed
from the first token on that is another than the one in the cache.
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

TAKEN_IN = 2  # tokens of a sequence that `draft` computes itself
PRIOR_CONFIDENCE = 0.9  # confidence that is expected before anything is known
WEIGHT = 0.05  # of new confidence


@dataclass(slots=True)
class _Computed:
    """What the draft model's cache holds of a sequence."""

    seq: Sequence
    params: np.ndarray  # i32[NUM_PARAMS]
    blocks: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # in the blocks, in order; drafts at the end
    num_known: int = 0  # of them are known to be the sequence's

    def align(self) -> int:
        """Drops what is not the sequence's; returns how many of its tokens are computed.

        Its last token never counts: what follows comes from computing it.
        """
        tokens, known = self.tokens, self.seq.tokens
        end = min(len(tokens), len(known) - 1)
        while self.num_known < end and tokens[self.num_known] == known[self.num_known]:
            self.num_known += 1
        self.num_known = min(self.num_known, end)
        del tokens[self.num_known :]
        return self.num_known


class ModelDrafter:
    """A `Drafter` that asks a model.

    A sequence gets blocks when it is first asked for, and loses them when it ends, or when they are
    needed and it does not run; where there are none, there is no draft. Prompts are computed in
    chunks, one call for each `propose`, and a sequence has no drafts before its turn has come.
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
        """Tells nothing from the texts: what is typical, where there can be drafts at all."""
        if not self._model.can_draft:
            return [()] * len(seqs)
        typical = self._typical.tolist()
        return [typical[: self._draft_room(seq)] if self._may(seq) else () for seq in seqs]

    def ingest(self, limit: int) -> bool:
        """Learns nothing from texts."""
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
        """Gives the sequence the blocks for its tokens and for drafts; None if there are none."""
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
        """Blocks that nobody has; then those of sequences that do not run."""
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
        """Whether there are blocks for the sequence, as far as can be told now."""
        length = seq.num_tokens
        if length > self._model.context:
            return False
        computed = self._computed.get(seq.key)
        held = 0 if computed is None else len(computed.blocks)
        return self._num_blocks(length) - held <= self._pool.num_free

    def _draft_room(self, seq: Sequence) -> int:
        """How many drafts could be verified."""
        return max(min(self._most, seq.max_len - seq.num_tokens - 1), 0)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._pool.block_size)

    def _tell(self, seq: Sequence) -> None:
        if not self._told:
            self._told = True
            log.warning(
                "request %s is longer than the draft model's context of %d tokens: no more drafts "
                "for it, nor for others that get so long",
                seq.request_id,
                self._model.context,
            )

    # ---- calls ---------------------------------------------------------------------------------

    def _catch_up(self, served: list[_Computed]) -> None:
        """Computes what is too much for `draft`: one call, those of the first rank first."""
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
        """A draft for each, in one call or a few."""
        rows, rooms = [], []
        for computed in served:
            tokens, start = computed.seq.tokens, len(computed.tokens)
            end = min(len(computed.blocks) * self._pool.block_size, self._model.context)
            # As many as are computed, and one more; `end` is at least the number of tokens.
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
            # The device writes all drafts that have a place, but the last.
            computed.tokens += drafted[: min(self._most - 1, row.end - known)]
            if self._model.proposes and not computed.seq.params.greedy:
                # How many are verified must not depend on what was drawn: the first value does
                # not, and of the others what was typical before is told.
                values = [values[0], *typical[1:]]
            yield Draft(tuple(drafted[:room]), tuple(values[:room]))


def _missing(computed: _Computed) -> int:
    """How many tokens of the sequence are not computed."""
    return len(computed.seq.tokens) - len(computed.tokens)
