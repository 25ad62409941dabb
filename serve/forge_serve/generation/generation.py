"""One client request in the engine: its prompts, their merged streams, and its counters.

A request has P prompts with n samples each. Choices are numbered `prompt * n + sample`.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from forge_jax.errors import EngineError
from forge_jax.host import supervise
from forge_jax.sampling_params import SamplingParams
from forge_serve.errors import AbortedError, DeadlineError, RestartedError, StoppingError
from forge_serve.generation.progress import PromptProgress
from forge_serve.generation.prompts import Prompt
from forge_serve.openapi.payload import Payload
from forge_serve.parsers.reasoning import TokenCounter
from forge_serve.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from forge_jax.config import Pooling
    from forge_jax.engine.async_engine import AsyncEngine
    from forge_jax.engine.streams import Stream
    from forge_jax.schedule.outputs import Delta

_serials = itertools.count()


class PromptTokensDetails(Payload):
    cached_tokens: int


class CompletionTokensDetails(Payload):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    reasoning_tokens: int


class Usage(Payload):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The engine's options for a request other than the sampling parameters.

    Attributes:
      request_id: the id of the response. Several requests may have the same id.
      priority: lower values run first.
      cache_salt: requests share cached prefixes only with requests of the same salt.
      pooling: how hidden states are pooled; None: the request generates text.
      lora: the LoRA adapter; None: the base model.
    """

    request_id: str
    priority: int = 0
    cache_salt: str = ""
    pooling: Pooling | None = None
    lora: str | None = None


type Updates = list[tuple[int, Delta]]  # (choice, delta) pairs of one or more steps


class Generation:
    """One request's prompts in the engine. `begin` delivers their deltas after each step.

    The caller must always call `close` at the end. It aborts samples that still run.

    Args:
      timeout_s: the time limit of the request; None: no limit.
      reasoning: counters of reasoning tokens by choice; empty: they are not counted.
      whole: deliver everything at the end, so that samples can restart with new weights. Otherwise,
        the request fails if one does.

    Raises:
      RequestError: a prompt cannot be served. No prompt has been submitted.
      OverloadedError: the engine's queue is full.
      EngineError: the engine accepts no requests.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        options: EngineOptions,
        *,
        timeout_s: float | None,
        metrics: Metrics,
        reasoning: Sequence[TokenCounter] = (),
        whole: bool = False,
    ):
        self.request_id = options.request_id
        self.params = params
        self.num_prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        self.num_output_tokens = 0
        self.num_drafted = self.num_accepted = 0
        self.unfinished = len(prompts) * params.n
        self.finish_reasons: dict[str, None] = {}  # distinct, in order of first occurrence
        self.failure: Exception | None = None
        self._n = params.n
        self._metrics = metrics
        self._reasoning = reasoning
        self._timeout_s = timeout_s
        self._submitted_s = time.monotonic()
        self._progress = [PromptProgress(len(prompt.token_ids), params.n) for prompt in prompts]
        self._streams: list[Stream] = []
        self._receive: Callable[[Updates], None] | None = None
        self._lifecycle = engine.lifecycle
        self._retained: Updates | None = [] if whole else None  # without voided deltas
        self._deadline: asyncio.TimerHandle | None = None
        self._gathered: Updates = []  # updates of this step, until all prompts have delivered
        self._delivery_due = False
        self._submit(engine, prompts, options)
        for progress, stream in zip(self._progress, self._streams, strict=True):
            progress.engine = stream.engine
            max_tokens = None if options.pooling else params.max_tokens
            metrics.submitted(params.n, max_tokens, stream.engine)

    def _submit(
        self, engine: AsyncEngine, prompts: Sequence[Prompt], options: EngineOptions
    ) -> None:
        # `submit` checks the first prompt. The others are checked before, so that either all
        # prompts are submitted or none.
        for prompt in prompts[1:]:
            engine.check(prompt.token_ids, self.params)
        serial = next(_serials)  # clients may reuse an id
        try:
            for i, prompt in enumerate(prompts):
                self._streams.append(
                    engine.submit(
                        prompt.token_ids,
                        self.params,
                        request_id=f"{options.request_id}-{serial}-{i}",
                        priority=options.priority,
                        cache_salt=options.cache_salt,
                        pooling=options.pooling,
                        lora=options.lora,
                    )
                )
        except BaseException:
            self._abort()
            raise

    @property
    def num_cached_tokens(self) -> int:
        return sum(progress.cached for progress in self._progress)

    @property
    def num_preemptions(self) -> int:
        """Preemptions of the finished samples."""
        return sum(progress.preemptions for progress in self._progress)

    @property
    def queue_s(self) -> float | None:
        """Seconds until the first step of any prompt; None: no prompt has been scheduled."""
        waits = [each.queue_s for each in self._progress if each.queue_s is not None]
        return min(waits, default=None)

    def stages(self) -> Iterator[tuple[str, float, float]]:
        """Yield the stages that the first prompt has reached, as (name, begin, end).

        The names are "queue", "prefill" and "decode". Times are on the clock of `time.monotonic`.
        """
        began = [each for each in self._progress if each.queue_s is not None]
        if not began:
            return
        first = min(began, key=lambda each: each.queue_s or 0.0)
        scheduled_s = self._submitted_s + (first.queue_s or 0.0)
        yield "queue", self._submitted_s, scheduled_s
        if first.first_s is not None and first.last_s is not None:
            token_s = self._submitted_s + first.first_s
            yield "prefill", min(scheduled_s, token_s), token_s
            yield "decode", token_s, self._submitted_s + first.last_s

    @property
    def first_token_at_s(self) -> float | None:
        """Arrival time of the first token on the clock of `time.monotonic`; None: not yet."""
        firsts = [each.first_s for each in self._progress if each.first_s is not None]
        return self._submitted_s + min(firsts) if firsts else None

    @property
    def over(self) -> bool:
        """True if all samples have finished, or there is a `failure`. No more deltas follow."""
        return not self.unfinished or self.failure is not None

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=self.num_output_tokens,
            total_tokens=self.num_prompt_tokens + self.num_output_tokens,
            prompt_tokens_details=PromptTokensDetails(self.num_cached_tokens),
            completion_tokens_details=CompletionTokensDetails(
                accepted_prediction_tokens=self.num_accepted,
                rejected_prediction_tokens=self.num_drafted - self.num_accepted,
                reasoning_tokens=sum(counter.number for counter in self._reasoning),
            ),
        )

    def begin(self, receive: Callable[[Updates], None]) -> None:
        """Register `receive`, which gets the deltas of all prompts after each step.

        It runs on the event loop, without waking a task. `over` is True in the last call. Failed
        and aborted samples set `failure` and deliver no delta. If `receive` raises, the exception
        becomes the `failure`, and `receive` is called once more.
        """
        self._receive = receive
        if self._timeout_s is not None:
            left_s = self._submitted_s + self._timeout_s - time.monotonic()
            loop = asyncio.get_running_loop()
            expire = supervise.guarded(self._expire, "a request's deadline", self._broken)
            self._deadline = loop.call_later(max(left_s, 0.0), expire)
        for prompt, stream in enumerate(self._streams):
            arrived = partial(self._arrived, prompt)
            stream.push_to(supervise.guarded(arrived, "taking a request's deltas", self._broken))

    def close(self) -> None:
        """Abort running samples and record the metrics of the request."""
        self._receive = None
        if self._deadline is not None:
            self._deadline.cancel()
        if self.unfinished:
            for progress in self._progress:
                self._metrics.finished("abort", progress.engine, progress.unfinished)
            self.finish_reasons["abort"] = None
            self.unfinished = 0
        self._abort()
        self._streams.clear()  # breaks a reference cycle
        now_s = time.monotonic() - self._submitted_s
        for progress in self._progress:
            self._metrics.prompt(progress.times(now_s))

    def _abort(self) -> None:
        for stream in self._streams:
            stream.abort()

    def _expire(self) -> None:
        if not self.over:
            self.failure = DeadlineError(f"the request took longer than {self._timeout_s:g} s")
            self._deliver(self._gathered)

    def _broken(self, error: BaseException) -> None:
        """Fail the request with the error of a callback, which has no caller to propagate to."""
        receive, self._receive = self._receive, None
        self.failure = error if isinstance(error, Exception) else EngineError(str(error))
        self._abort()
        if receive is not None:
            receive([])

    def _arrived(self, prompt: int, deltas: list[Delta]) -> None:
        if self._receive is None:
            return
        updates = self._account(prompt, deltas)
        if self._retained is not None:
            self._retain(self._retained, updates)
            return
        if len(self._streams) == 1:
            self._deliver(updates)
            return
        self._gathered += updates
        if not self._delivery_due:  # deltas of the other prompts arrive before the call runs
            self._delivery_due = True
            deliver = supervise.guarded(
                self._deliver_gathered, "delivering a request's deltas", self._broken
            )
            asyncio.get_running_loop().call_soon(deliver)

    def _retain(self, retained: Updates, updates: Updates) -> None:
        for choice, delta in updates:
            if delta.restarted:
                retained[:] = [update for update in retained if update[0] != choice]
            else:
                retained.append((choice, delta))
        if not self.over:
            return
        self.num_output_tokens = 0
        for choice, delta in retained:
            self._count(choice, delta)
        self._deliver(retained)

    def _count(self, choice: int, delta: Delta) -> None:
        self.num_output_tokens += len(delta.token_ids)
        if self._reasoning:
            self._reasoning[choice].push(delta.token_ids)

    def _deliver_gathered(self) -> None:
        updates, self._gathered = self._gathered, []
        self._delivery_due = False
        self._deliver(updates)

    def _deliver(self, updates: Updates) -> None:
        receive = self._receive
        if receive is None:
            return
        if self.over:
            self._receive = None
        try:
            receive(updates)
        except Exception as error:
            self.failure, self._receive = error, None
            receive([])

    def _account(self, prompt: int, deltas: list[Delta]) -> Updates:
        """Count one prompt's deltas and return the updates for `receive`."""
        first_choice, progress = prompt * self._n, self._progress[prompt]
        num_tokens = 0
        updates = []
        for delta in deltas:
            num_tokens += len(delta.token_ids)
            if self._n > 1:
                lengths = progress.lengths
                lengths[delta.index] = lengths.get(delta.index, 0) + len(delta.token_ids)
            if self._retained is None:
                if delta.restarted:
                    self.failure = RestartedError(
                        "new weights restarted the request after a part of its output had been "
                        "sent: send it again"
                    )
                    self._abort()
                    break
                self._count(first_choice + delta.index, delta)
            progress.add(delta)
            if delta.finish_reason is not None:
                self._finish(delta, delta.finish_reason, progress.engine)
                if delta.finish_reason in ("error", "abort"):
                    continue
            updates.append((first_choice + delta.index, delta))
        if num_tokens:
            self._observe_tokens(progress, num_tokens, deltas)
        if not progress.unfinished:
            progress.end_s = time.monotonic() - self._submitted_s
        return updates

    def _finish(self, delta: Delta, reason: str, engine: int) -> None:
        self.unfinished -= 1
        self.num_drafted += delta.num_draft_tokens
        self.num_accepted += delta.num_accepted_tokens
        self._metrics.finished(reason, engine)
        self.finish_reasons[reason] = None
        if reason == "error":
            self.failure = delta.error or EngineError("the engine reported no reason")
        elif reason == "abort":
            self.failure = (
                StoppingError("the engine is shutting down")
                if self._lifecycle.state in ("stopping", "stopped")
                else AbortedError("the request was aborted by a client: send it again")
            )

    def _observe_tokens(
        self, progress: PromptProgress, num_tokens: int, deltas: list[Delta]
    ) -> None:
        progress.output_tokens += num_tokens
        now_s = time.monotonic() - self._submitted_s
        if progress.last_s is None:
            progress.first_s = now_s
            self._metrics.first_token(now_s, progress.engine)
        else:
            self._metrics.later_tokens(now_s - progress.last_s, deltas, progress.engine)
        progress.last_s = now_s
