"""The engine's output: one `Delta` per sequence and step that changed it."""

from __future__ import annotations

from dataclasses import dataclass

from forge_jax.errors import ForgeError
from forge_jax.schedule.activations import Activations
from forge_jax.schedule.plan import TokenLogprobs
from forge_jax.schedule.request import FinishReason


# One is created per sequence and step. It is never changed, but not frozen, because creating a
# frozen one takes 0.7 us longer.
@dataclass(slots=True)
class Delta:
    """An increment of sample `index` of a request.

    `text` contains whole characters and never part of a stop string. It may lag behind `token_ids`.
    One delta has `prompt_logprobs`, in which entry i is that of prompt token i + 1.

    The first delta has `num_cached_tokens` and `queue_s`, the seconds until the sample's first
    step. The last delta has a `finish_reason`, and an `error` if that is "error". It also has the
    numbers of verified and accepted draft tokens, and of preemptions.
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
    pooled: bytes | None = None  # f32[d], of a request with `pooling`; not normalized
    queue_s: float | None = None
    num_preemptions: int = 0
    weight_version: int = 0  # the weights that `token_ids` were sampled with
    # Of the positions that `token_ids` were sampled from, after those of the prompt, if requested.
    activations: Activations | None = None
    restarted: bool = False  # all earlier deltas of this sample are void (`update_weights`)


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A finished sample. If it has an `error`, its output is partial."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    error: ForgeError | None = None
    num_draft_tokens: int = 0  # draft tokens that were verified
    num_accepted_tokens: int = 0  # draft tokens that were accepted; they are in `token_ids`
    # Runs of tokens that were sampled with the same weights: (version, number of tokens).
    weight_versions: tuple[tuple[int, int], ...] = ()
    activations: Activations | None = None  # see `ReturnActivations`


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
