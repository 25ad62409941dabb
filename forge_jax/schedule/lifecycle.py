"""The lifecycle of a sequence: its statuses, and the transitions between them.

    status          event    next        when
    QUEUED          follow   FOLLOWING   another sample of its request computes their prompt first
    QUEUED          hold     HELD        admissions are restricted to other sequences
    QUEUED          load     LOADING     blocks of its prefix are copied from host memory
    LOADING         release  QUEUED      these blocks are in the prefix cache, or void
    FOLLOWING       release  QUEUED      the prompt is cached, or the other sample has finished
    HELD            release  QUEUED      the restriction has been lifted or changed
    QUEUED          admit    PREFILLING  it gets a slot, and blocks for its first chunk
    PREFILLING      prefill  PREFILLING  the chunk leaves more than one token to compute
    PREFILLING      prefill  DECODING    one token is left to compute; the chunk may sample it
    PREFILLING      prefill  DRAINING    the chunk computes all that the request needs
    DECODING        decode   DECODING    the step computes one token and samples the next
    DECODING        decode   DRAINING    the next is the last that the sequence may have
    DECODING        verify   VERIFYING   the step computes one token, and drafts after it
    VERIFYING       settle   DECODING    the step has been read: the sequence's length is known
    any with slot   requeue  QUEUED      it was preempted, or a step failed
    any unfinished  finish   FINISHED    it ended by itself, was aborted, or failed

    status                             holds
    QUEUED, FOLLOWING, HELD, LOADING   its tokens
    PREFILLING                         also a slot, blocks, and several tokens to compute
    DECODING                           also a slot, blocks, and one token to compute
    VERIFYING                          also a slot, blocks, and drafts in flight
    DRAINING                           also a slot, blocks, and results in flight
    FINISHED                           its tokens, and its finish reason

A sequence begins QUEUED. The events are methods of `Sequence`, which check `TRANSITIONS`; `decode`
is a function over all sequences that decode in a step. A status depends on the steps that have been
scheduled, not on those that have been read. While a sequence decodes, the value of its last token
may exist only on the device (`Sequence.num_pending`).
"""

from __future__ import annotations

import enum


class Status(enum.Enum):
    QUEUED = "queued"
    FOLLOWING = "following"
    HELD = "held"
    LOADING = "loading"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    VERIFYING = "verifying"
    DRAINING = "draining"
    FINISHED = "finished"

    # `Enum.__hash__` is a Python function, and each change of status takes three hashes.
    __hash__ = object.__hash__


WAITING = frozenset({Status.QUEUED, Status.FOLLOWING, Status.HELD, Status.LOADING})
RUNNING = frozenset({Status.PREFILLING, Status.DECODING, Status.VERIFYING, Status.DRAINING})

_END = frozenset({Status.FINISHED})
_LEAVE = frozenset({Status.QUEUED, Status.FINISHED})  # release slot and blocks

TRANSITIONS: dict[Status, frozenset[Status]] = {
    Status.QUEUED: _END | {Status.FOLLOWING, Status.HELD, Status.LOADING, Status.PREFILLING},
    Status.FOLLOWING: _END | {Status.QUEUED},
    Status.HELD: _END | {Status.QUEUED},
    Status.LOADING: _END | {Status.QUEUED},
    Status.PREFILLING: _LEAVE | {Status.PREFILLING, Status.DECODING, Status.DRAINING},
    Status.DECODING: _LEAVE | {Status.DECODING, Status.DRAINING, Status.VERIFYING},
    Status.VERIFYING: _LEAVE | {Status.DECODING},
    Status.DRAINING: _LEAVE,
    Status.FINISHED: frozenset(),
}
