"""What the engine hands out: one `Delta` per sequence and step that brought it something."""

from __future__ import annotations

from dataclasses import dataclass

from forge_jax.errors import ForgeError
from forge_jax.schedule.plan import TokenLogprobs
from forge_jax.schedule.request import FinishReason


# Made once per sequence and step: never changed, but not frozen, which would take 0.7 us longer.
@dataclass(slots=True)
class Delta:
    """News of sample `index` of a request.

    `text` is whole characters and never a part of a stop string; it may lag behind `token_ids`.
    The last delta of a sample has a `finish_reason`; with "error" it has an `error`.
    `prompt_logprobs` comes once; entry i is of prompt token i + 1. How many drafts were verified,
    and how many of them were right, comes with the last delta, and so does how often the sample was
    preempted. The first delta says how many prompt tokens were cached and how long the sample
    waited for its first step.
    """

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: ForgeError | None = None
    num_cached_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    pooled: bytes | None = None  # f32[d], of a request with `pooling`; not normalised
    queue_s: float | None = None
    num_preemptions: int = 0


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One finished sample; with finish reason "error", why, and what it had until then."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    error: ForgeError | None = None
    num_draft_tokens: int = 0  # that were verified
    num_accepted_tokens: int = 0  # of them; these are part of `token_ids`


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """A finished request: its prompt and its `n` samples."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...] | None
    num_cached_tokens: int
    outputs: tuple[Completion, ...]

    @property
    def text(self) -> str:
        """The first sample's text."""
        return self.outputs[0].text
