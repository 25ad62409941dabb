"""Measurement of an engine in this process, with the same clock as the HTTP client."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from forge_jax.errors import EngineError
from forge_jax.sampling_params import SamplingParams
from forge_serve.bench.metrics import Measured
from forge_serve.bench.workload import Request

if TYPE_CHECKING:
    from forge_jax.engine.async_engine import AsyncEngine

READY_POLL_S = 0.05


def sampling_params(request: Request) -> SamplingParams:
    """Return greedy parameters with exactly the requested output length."""
    return SamplingParams(max_tokens=request.max_tokens, temperature=0.0, ignore_eos=True)


async def ready(engine: AsyncEngine) -> None:
    """Wait until everything is compiled, because compilation would slow down the measurement.

    Raises:
      EngineError: the engine has failed or stopped.
    """
    while (state := engine.stats().state) != "ready":
        if state in ("failed", "stopped"):
            raise EngineError(f"the engine is {state}")
        await asyncio.sleep(READY_POLL_S)


class Submitter:
    """Submitter of a workload's requests to an engine. It also records the peak concurrency."""

    def __init__(self, engine: AsyncEngine):
        self.engine = engine
        self.most_running = 0  # peak of running sequences, sampled at updates; callers reset it
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
        if delta.token_ids:
            result.completion_tokens += len(delta.token_ids)
            result.heard(now)
