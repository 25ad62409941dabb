"""Progress of one prompt's samples: token counts and times for the metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from forge_serve.telemetry.request_histograms import PromptTimes

if TYPE_CHECKING:
    from forge_jax.schedule.outputs import Delta


@dataclass(slots=True)
class PromptProgress:
    """Progress of the samples of one prompt. Times are in seconds since the submission.

    Attributes:
      queue_s: start of the first step.
      first_s: arrival of the first token.
      last_s: arrival of the latest token.
      end_s: end of the last sample.
      lengths: output tokens by sample; empty if there is only one.
      engine: index of the engine that computes them.
    """

    prompt_tokens: int
    unfinished: int
    queue_s: float | None = None
    first_s: float | None = None
    last_s: float | None = None
    end_s: float | None = None
    cached: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    lengths: dict[int, int] = field(default_factory=dict)
    engine: int = 0

    @property
    def longest_output(self) -> int:
        return max(self.lengths.values(), default=self.output_tokens)

    def add(self, delta: Delta) -> None:
        """Count one delta, except for its output tokens."""
        if delta.num_cached_tokens:
            self.cached = max(self.cached, delta.num_cached_tokens)
        if delta.queue_s is not None and self.queue_s is None:
            self.queue_s = delta.queue_s
        if delta.finish_reason is not None:
            self.unfinished -= 1
            self.preemptions += delta.num_preemptions

    def times(self, now_s: float) -> PromptTimes:
        """Return the values for the metrics of a finished request."""
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
            engine=self.engine,
        )
