"""The unfinished requests and their sequences."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from forge_jax.errors import RequestError
from forge_jax.schedule.config import SchedulerConfig
from forge_jax.schedule.lifecycle import Status
from forge_jax.schedule.request import (
    FinishReason,
    Request,
    Sequence,
    first_returned,
    output_room,
    sequence_seed,
)
from forge_jax.schedule.slots import Slots


class LiveRequests:
    """The sequences of each request, from its arrival until all of them have finished.

    Args:
      rng: draws the seeds of requests that have none.
    """

    def __init__(self, slots: Slots, rng: random.Random):
        self.by_id: dict[str, list[Sequence]] = {}  # in order of arrival
        self._pool = slots.pool
        self._slots = slots
        self._backlog = slots.backlog
        self._rng = rng
        self._orders = itertools.count()

    def add(self, request: Request, config: SchedulerConfig, now_s: float) -> list[Sequence]:
        """Queue the sequences of a new request. Raises as `Scheduler.add`."""
        kv_tokens = self._pool.num_blocks * self._pool.block_size
        max_tokens = output_room(request, config.max_model_len, kv_tokens)
        if request.request_id in self.by_id:
            raise RequestError(f"request ID {request.request_id!r} is in use", param="request_id")
        seqs = self._sequences(request, max_tokens, config, now_s)
        self.by_id[request.request_id] = seqs
        self._backlog.push(seqs[0])
        num_shared = (len(request.prompt_token_ids) - 1) // self._pool.block_size
        # A static batch takes all samples at once: followers would miss it.
        follows = self._pool.prefix_cache and num_shared and config.batching == "continuous"
        if len(seqs) > 1 and follows:
            self._backlog.follow(request.request_id, seqs[1:])
        else:
            for seq in seqs[1:]:
                self._backlog.push(seq)
        return seqs.copy()

    def _sequences(
        self, request: Request, max_tokens: int, config: SchedulerConfig, now_s: float
    ) -> list[Sequence]:
        params, prompt_len = request.params, len(request.prompt_token_ids)
        outputs = request.outputs
        if outputs is None:
            outputs = {index: () for index in range(params.n)}
        seed = request.seed if request.seed is not None else params.seed
        if seed is None:
            seed = self._rng.getrandbits(64)
        # A grammar determines where the output may end.
        ends = params.constrained or not params.ignore_eos
        stop_ids = config.eos_token_ids if ends else frozenset()
        if params.stop_token_ids and not params.constrained:
            # Without stop_token_ids, all sequences share one set.
            stop_ids = stop_ids.union(params.stop_token_ids)
        seqs = [
            Sequence(
                request=request,
                index=index,
                seed=sequence_seed(seed, index),
                stop_ids=stop_ids,
                max_tokens=max_tokens,
                tokens=[*request.prompt_token_ids, *output],
                max_blocks=self._slots.blocks_for(max(prompt_len, prompt_len + max_tokens - 1)),
                scores_prompt=params.prompt_logprobs is not None and index == 0,
                # Prompt logprobs come before the first output token.
                num_scored=prompt_len if output else 0,
                num_returned=first_returned(request, index, len(output)),
                order=next(self._orders),
                queued_s=now_s,
            )
            for index, output in outputs.items()
        ]
        for seq in seqs[1:]:
            seq.leads = False
        if config.pools_apart and request.pooling is not None:
            for seq in seqs:
                seq.salt += "\0pooling"  # its blocks were written by other executables
        return seqs

    def finish(
        self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        """End an unfinished sequence. Drop its request if it was the last one."""
        if seq.slot is not None:
            self._slots.finish(seq, reason, stop_reason)
        else:
            status = seq.status
            seq.finish(reason, stop_reason)
            self._backlog.forget(seq, status)
        request_id = seq.request_id
        if seq.leads:
            self._backlog.release_followers(request_id)
        if all(other.status is Status.FINISHED for other in self.by_id[request_id]):
            del self.by_id[request_id]

    def abort(self, request_id: str) -> list[Sequence]:
        live = [seq for seq in self.by_id.get(request_id, ()) if not seq.finished]
        for seq in live:
            self.finish(seq, "abort")
        return live

    def sequences(self) -> Iterator[Sequence]:
        """Yield all sequences of unfinished requests, finished ones too, in order of arrival."""
        for seqs in self.by_id.values():
            yield from seqs

    def waiting(self) -> Iterator[Sequence]:
        for seq in self.sequences():
            if seq.slot is None and seq.status is not Status.FINISHED:
                yield seq
