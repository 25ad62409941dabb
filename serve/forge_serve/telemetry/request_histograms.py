"""Histograms of requests' latencies and sizes, under vLLM's names."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from forge_serve.telemetry.histogram import ModelHistogram

# The bounds are from vLLM's vllm/v1/metrics/buckets.py.
_REQUEST_LATENCY_S = (
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30),
    *(40, 50, 60, 120, 240, 480, 960, 1920, 7680),
)
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5),
    *(0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
# Small models are faster than vLLM's first bucket of 10 ms, so four buckets precede it.
_INTER_TOKEN_S = (
    *(0.001, 0.0025, 0.005, 0.0075),
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5),
    *(0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
_TOKENS = tuple(m * 10**e for e in range(8) for m in (1, 2, 5))  # exported up to the context length
_SAMPLES = (1, 2, 5, 10, 20)
_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTimes:
    """Measurements of one prompt. Times are in seconds since its submission.

    A time is None if the prompt did not reach that stage.
    """

    e2e_s: float
    queue_s: float | None
    first_token_s: float | None
    last_token_s: float | None
    prompt_tokens: int
    cached_tokens: int
    generation_tokens: int  # total of all samples
    longest_output: int
    preemptions: int
    engine: int = 0


@dataclass(frozen=True, slots=True)
class HistogramFactory:
    """Factory that creates and registers the histograms of one server.

    Attributes:
      registry: the registry of the server's metrics.
      labels: returns the labels of each engine; empty until the model is loaded.
      context: returns the context length in tokens. Larger buckets of tokens are not exported.
    """

    registry: CollectorRegistry
    labels: Callable[[], Sequence[dict[str, str]]]
    context: Callable[[], float]

    def make(
        self,
        name: str,
        doc: str,
        bounds: Sequence[float],
        last_bound: Callable[[], float] = lambda: math.inf,
    ) -> ModelHistogram:
        histogram = ModelHistogram(f"vllm:{name}", doc, bounds, self.labels, last_bound)
        self.registry.register(histogram)
        return histogram

    def latency(self, name: str, doc: str) -> ModelHistogram:
        return self.make(f"{name}_seconds", doc, _REQUEST_LATENCY_S)

    def tokens(self, name: str, doc: str) -> ModelHistogram:
        return self.make(f"request_{name}", doc, _TOKENS, self.context)


class Latencies:
    """Latency histograms of requests, in seconds."""

    def __init__(self, factory: HistogramFactory):
        latency = factory.latency
        self.first_token = factory.make(
            "time_to_first_token_seconds",
            "Time from submission to the first token",
            _FIRST_TOKEN_S,
        )
        self.inter_token = factory.make(
            "inter_token_latency_seconds", "Inter-token latency of a sample", _INTER_TOKEN_S
        )
        self._per_token = factory.make(
            "request_time_per_output_token_seconds",
            "Time per output token after the first",
            _INTER_TOKEN_S,
        )
        self._e2e = latency("e2e_request_latency", "Time from submission to the last token")
        self._queue = latency("request_queue_time", "Time from submission to the first step")
        self._prefill = latency(
            "request_prefill_time", "Time from the first step to the first token"
        )
        self._decode = latency("request_decode_time", "Time from the first token to the last")
        self._inference = latency(
            "request_inference_time", "Time from the first step to the last token"
        )

    def observe(self, times: PromptTimes) -> None:
        """Observe the stages that a finished prompt has reached."""
        self._e2e.observe(times.e2e_s, times.engine)
        if times.queue_s is None:
            return
        self._queue.observe(times.queue_s, times.engine)
        first_s, last_s = times.first_token_s, times.last_token_s
        if first_s is None or last_s is None:
            return
        self._prefill.observe(max(first_s - times.queue_s, 0.0), times.engine)
        self._decode.observe(last_s - first_s, times.engine)
        self._inference.observe(max(last_s - times.queue_s, 0.0), times.engine)
        self._per_token.observe((last_s - first_s) / max(times.longest_output - 1, 1), times.engine)


class Sizes:
    """Histograms of requests' tokens and samples."""

    def __init__(self, factory: HistogramFactory):
        tokens = factory.tokens
        self._prompt_tokens = tokens("prompt_tokens", "Prompt tokens of a request")
        self._generation_tokens = tokens(
            "generation_tokens", "Output tokens of all samples of a request"
        )
        self._longest_output = tokens(
            "max_num_generation_tokens", "Output tokens of the longest sample of a request"
        )
        self._computed_tokens = tokens(
            "prefill_kv_computed_tokens",
            "Prompt tokens of a request that were not in the prefix cache",
        )
        self.max_tokens = tokens("params_max_tokens", "max_tokens of a request")
        self.n = factory.make("request_params_n", "Requested samples per prompt", _SAMPLES)
        self._preemptions = factory.make(
            "request_num_preemptions", "Preemptions of a request", _PREEMPTIONS
        )

    def observe(self, times: PromptTimes) -> None:
        """Observe a finished prompt."""
        self._prompt_tokens.observe(times.prompt_tokens, times.engine)
        self._generation_tokens.observe(times.generation_tokens, times.engine)
        self._longest_output.observe(times.longest_output, times.engine)
        self._preemptions.observe(times.preemptions, times.engine)
        if times.queue_s is not None:
            self._computed_tokens.observe(times.prompt_tokens - times.cached_tokens, times.engine)
