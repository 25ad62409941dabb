"""Engines in this process: which switches this version has, and an `Engine` behind the same clock
as the HTTP client."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.metrics import Measured
from benchmarks.workloads import Request
from forge_jax.config import EngineConfig
from forge_jax.engine import Engine
from forge_jax.errors import ConfigError
from forge_jax.sampling_params import SamplingParams


def why_not(**options: Any) -> str | None:
    """Why this engine does not take the options; None if it does."""
    try:
        EngineConfig.from_options(**options)
    except ConfigError as error:
        return str(error)
    return None


def sampling_params(request: Request) -> SamplingParams:
    """Greedy, of exactly the length asked for."""
    return SamplingParams(max_tokens=request.max_tokens, temperature=0.0, ignore_eos=True)


class Submitter:
    """Answers a workload's requests on an engine; also notes how many sequences ran at once."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.most_running = 0  # seen when news came; whoever starts a run sets it to 0
        self._count = 0

    async def submit(self, request: Request) -> Measured:
        self._count += 1
        result = Measured(tokens_known=True, prompt_tokens=len(request.prompt))
        start = time.perf_counter()
        stream = self.engine.submit(
            request.prompt, sampling_params(request), request_id=f"bench-{self._count}"
        )
        async for deltas in stream:
            now = time.perf_counter() - start
            self.most_running = max(self.most_running, self.engine.stats().num_running)
            for delta in deltas:
                self._take(delta, result, now)
        result.end_s = time.perf_counter() - start
        return result

    @staticmethod
    def _take(delta: Any, result: Measured, now: float) -> None:
        if delta.error is not None:
            result.error = str(delta.error)
        result.finish_reason = delta.finish_reason or result.finish_reason
        result.cached_tokens = max(result.cached_tokens, delta.num_cached_tokens)
        if not delta.token_ids:
            return
        result.completion_tokens += len(delta.token_ids)
        result.events += 1
        if result.last_s is None:
            result.ttft_s = now
        else:
            result.gaps_s.append(now - result.last_s)
        result.last_s = now
