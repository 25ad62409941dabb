"""One client request in the engine: its prompts, their streams merged, and what was counted.

A request has P prompts with n samples each; its choices are numbered `prompt * n + sample`.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from forge_jax.errors import EngineError
from forge_jax.host import supervise
from forge_jax.sampling_params import SamplingParams
from forge_serve.errors import DeadlineError, StoppingError
from forge_serve.generation.prompts import Prompt
from forge_serve.parsers.reasoning import ReasoningTokens
from forge_serve.telemetry.metrics import Metrics, PromptTimes

if TYPE_CHECKING:
    from forge_jax.config import Pooling
    from forge_jax.engine.async_engine import AsyncEngine
    from forge_jax.engine.streams import Stream
    from forge_jax.schedule.outputs import Delta

_serials = itertools.count()


class Usage(msgspec.Struct):
    """Tokens of a request, in OpenAI's words."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: dict[str, int]


@dataclass(slots=True)
class _Progress:
    """How far the samples of one prompt are; times since the submission, in seconds."""

    prompt_tokens: int
    unfinished: int
    queue_s: float | None = None
    first_s: float | None = None  # its first token
    last_s: float | None = None  # its last one, so far
    end_s: float | None = None
    cached: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    lengths: dict[int, int] = field(default_factory=dict)  # tokens by sample; only if n > 1

    @property
    def longest_output(self) -> int:
        return max(self.lengths.values(), default=self.output_tokens)

    def times(self, now_s: float) -> PromptTimes:
        return PromptTimes(
            e2e_s=now_s if self.end_s is None else self.end_s,
            queue_s=self.queue_s,
            first_token_s=self.first_s,
            last_token_s=self.last_s,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached,
            generation_tokens=self.output_tokens,
            longest_output=self.longest_output,
            preemptions=self.preemptions,
        )


type Updates = list[tuple[int, Delta]]  # (choice, delta) pairs of one step, or of several


class Generation:
    """Submits the prompts of one request; `begin` has their news handed on, step by step.

    `close` must be called at the end, however it comes: it aborts what still runs. `reasoning`
    counts that of each choice; empty: there is none.
    """

    def __init__(  # noqa: PLR0913
        self,
        engine: AsyncEngine,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int,
        cache_salt: str,
        timeout_s: float | None,
        metrics: Metrics,
        reasoning: Sequence[ReasoningTokens] = (),
        pooling: Pooling | None = None,
        lora: str | None = None,
    ):
        self.request_id = request_id
        serial = next(_serials)  # a client may give the same id to several requests
        self.num_prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        self.num_output_tokens = 0
        self.unfinished = len(prompts) * params.n
        self.failure: Exception | None = None
        self._n = params.n
        self._metrics = metrics
        self._submitted_s = time.monotonic()
        self._progress = [_Progress(len(prompt.token_ids), params.n) for prompt in prompts]
        self.num_drafted = self.num_accepted = 0
        self.finish_reasons: dict[str, None] = {}  # of its samples, in the order of their first
        self.params = params
        self._reasoning = reasoning
        self._streams: list[Stream] = []
        self._receive: Callable[[Updates], None] | None = None
        self._timeout_s = timeout_s
        self._deadline: asyncio.TimerHandle | None = None
        self._gathered: Updates = []  # of this step, until all prompts have theirs
        self._hand_on_due = False
        # None is begun if one of them cannot be served; the first is checked as it is submitted.
        for prompt in prompts[1:]:
            engine.check(prompt.token_ids, params)
        try:
            for i, prompt in enumerate(prompts):
                self._streams.append(
                    engine.submit(
                        prompt.token_ids,
                        params,
                        request_id=f"{request_id}-{serial}-{i}",
                        priority=priority,
                        cache_salt=cache_salt,
                        pooling=pooling,
                        lora=lora,
                    )
                )
        except BaseException:
            self._abort()
            raise
        for _ in prompts:
            metrics.submitted(params.n, None if pooling else params.max_tokens)

    @property
    def num_cached_tokens(self) -> int:
        return sum(progress.cached for progress in self._progress)

    @property
    def num_preemptions(self) -> int:
        """Of the samples that have finished."""
        return sum(progress.preemptions for progress in self._progress)

    @property
    def queue_s(self) -> float | None:
        """How long the first prompt waited for its first step; None: none has begun."""
        waits = [each.queue_s for each in self._progress if each.queue_s is not None]
        return min(waits, default=None)

    def stages(self) -> Iterator[tuple[str, float, float]]:
        """What the first prompt went through: (queue, prefill or decode, its begin, its end), on
        `time.monotonic`'s clock, as far as it came.
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
        """When the first token came, on `time.monotonic`'s clock; None: there is none yet."""
        firsts = [each.first_s for each in self._progress if each.first_s is not None]
        return self._submitted_s + min(firsts) if firsts else None

    @property
    def over(self) -> bool:
        """Whether no more news will come: every sample has finished, or there is a `failure`."""
        return not self.unfinished or self.failure is not None

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=self.num_output_tokens,
            total_tokens=self.num_prompt_tokens + self.num_output_tokens,
            prompt_tokens_details={"cached_tokens": self.num_cached_tokens},
            completion_tokens_details={
                "accepted_prediction_tokens": self.num_accepted,
                "rejected_prediction_tokens": self.num_drafted - self.num_accepted,
                "reasoning_tokens": sum(counter.number for counter in self._reasoning),
            },
        )

    def begin(self, receive: Callable[[Updates], None]) -> None:
        """Has `receive` called with the news of each step, of all prompts together, on the event
        loop, until `over` is true in such a call.

        No task wakes for it. News of samples that failed or were given up are not handed on: they
        are the `failure`. An exception of `receive` becomes the failure, too, and is told to it.
        """
        self._receive = receive
        if self._timeout_s is not None:
            left_s = self._submitted_s + self._timeout_s - time.monotonic()
            loop = asyncio.get_running_loop()
            expire = supervise.guarded(self._expire, "a request's deadline", self._broken)
            self._deadline = loop.call_later(max(left_s, 0.0), expire)
        for prompt, stream in enumerate(self._streams):
            arrived = partial(self._arrived, prompt)
            stream.push_to(supervise.guarded(arrived, "taking a request's news", self._broken))

    def close(self) -> None:
        """Aborts what still runs, and counts the request."""
        self._receive = None
        if self._deadline is not None:
            self._deadline.cancel()
        if self.unfinished:
            self._metrics.finished("abort", self.unfinished)
            self.finish_reasons["abort"] = None
            self.unfinished = 0
        self._abort()
        self._streams.clear()  # which hold on to this object
        now_s = time.monotonic() - self._submitted_s
        for progress in self._progress:
            self._metrics.prompt(progress.times(now_s))

    def _abort(self) -> None:
        for stream in self._streams:
            stream.abort()

    def _expire(self) -> None:
        if not self.over:
            self.failure = DeadlineError(f"the request took longer than {self._timeout_s:g} s")
            self._hand_on(self._gathered)

    def _broken(self, error: BaseException) -> None:
        """End the request with the error of a callback, which had no caller to raise it to."""
        receive, self._receive = self._receive, None
        self.failure = error if isinstance(error, Exception) else EngineError(str(error))
        self._abort()
        if receive is not None:
            receive([])

    def _arrived(self, prompt: int, deltas: list[Delta]) -> None:
        if self._receive is None:
            return
        updates = self._account(prompt, deltas)
        if len(self._streams) == 1:
            self._hand_on(updates)
            return
        self._gathered += updates
        if not self._hand_on_due:  # the other prompts get theirs before anything else runs
            self._hand_on_due = True
            hand_on = supervise.guarded(
                self._hand_on_gathered, "handing on a request's news", self._broken
            )
            asyncio.get_running_loop().call_soon(hand_on)

    def _hand_on_gathered(self) -> None:
        updates, self._gathered = self._gathered, []
        self._hand_on_due = False
        self._hand_on(updates)

    def _hand_on(self, updates: Updates) -> None:
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
        first_choice, progress = prompt * self._n, self._progress[prompt]
        num_tokens = 0
        updates = []
        for delta in deltas:
            num_tokens += len(delta.token_ids)
            if self._n > 1:
                lengths = progress.lengths
                lengths[delta.index] = lengths.get(delta.index, 0) + len(delta.token_ids)
            if self._reasoning:
                self._reasoning[first_choice + delta.index].push(delta.token_ids)
            if delta.num_cached_tokens:
                progress.cached = max(progress.cached, delta.num_cached_tokens)
            if delta.queue_s is not None and progress.queue_s is None:
                progress.queue_s = delta.queue_s
            if delta.finish_reason is not None:
                self.unfinished -= 1
                progress.unfinished -= 1
                progress.preemptions += delta.num_preemptions
                self.num_drafted += delta.num_draft_tokens
                self.num_accepted += delta.num_accepted_tokens
                self._metrics.finished(delta.finish_reason)
                self.finish_reasons[delta.finish_reason] = None
                if delta.finish_reason == "error":
                    self.failure = delta.error or EngineError("the engine gave no reason")
                    continue
                if delta.finish_reason == "abort":
                    self.failure = StoppingError("the engine is shutting down")
                    continue
            updates.append((first_choice + delta.index, delta))
        if num_tokens:
            self.num_output_tokens += num_tokens
            progress.output_tokens += num_tokens
            now_s = time.monotonic() - self._submitted_s
            if progress.last_s is None:
                progress.first_s = now_s
                self._metrics.first_token(now_s)
            else:
                self._metrics.later_tokens(now_s - progress.last_s, deltas)
            progress.last_s = now_s
        if not progress.unfinished:
            progress.end_s = time.monotonic() - self._submitted_s
        return updates
