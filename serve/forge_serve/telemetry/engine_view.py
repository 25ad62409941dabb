"""`GET /engine_state`: what the engine holds and does, for those who look at it while it runs.

Looks cost the engine little, however many clients look how often: one look serves all who ask
within `LEAST_S`, or within longer if it took long. Of other tenants a client learns how much they
have, and of which requests not.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import TYPE_CHECKING, Any

from forge_jax.errors import ForgeError
from forge_jax.host import supervise
from forge_serve.errors import NotReadyError

if TYPE_CHECKING:
    from forge_jax.engine.async_engine import AsyncEngine
    from forge_jax.telemetry.engine_state import EngineState, SequenceState

LEAST_S = 0.1  # between two looks
PART = 0.02  # of the time, that looks may take
LONGEST_S = 5.0  # for a look to wait until a step ends
SECRET_ID, SHOWN_CHARS = "resp_", 13  # whoever knows a response's id may read it: its beginning


class EngineView:
    """Looks at an engine; its answers are what `answers.EngineStateAnswer` says."""

    def __init__(self) -> None:
        self._look: asyncio.Task[EngineState] | None = None  # that is under way, or the last
        self._next_s = 0.0  # from when on the last is too old

    async def answer(self, engine: AsyncEngine, tenant: str, after_step: int) -> dict[str, Any]:
        """The state for a tenant ("" where there are no keys), with the steps behind that number.

        Raises:
          NotReadyError: the engine has not ended a step for long.
          EngineError: it is not there.
        """
        state, stats = await self._state(engine), engine.stats()
        speculation = stats.speculation
        return {
            "time_s": state.time_s,
            "num_running": state.num_running,
            "num_waiting": state.num_waiting,
            "num_slots": stats.num_slots,
            "prompt_tokens": stats.prompt_tokens,
            "generation_tokens": stats.generation_tokens,
            "preemptions": stats.preemptions,
            "prefix_cache_queries": stats.prefix_cache_queries,
            "prefix_cache_hits": stats.prefix_cache_hits,
            "speculation": None if speculation is None else dataclasses.asdict(speculation),
            "sequences": [_sequence(seq, tenant) for seq in state.sequences],
            "blocks": vars(state.blocks),
            "steps": [record for record in state.steps if record.step > after_step],
        }

    async def _state(self, engine: AsyncEngine) -> EngineState:
        look = self._look
        if look is None or (look.done() and time.monotonic() >= self._next_s):
            look = self._look = supervise.start_task(
                self._take(engine), "a look at the engine", None, expected=(ForgeError,)
            )
        try:
            async with asyncio.timeout(LONGEST_S):
                return await asyncio.shield(look)
        except TimeoutError as error:
            raise NotReadyError(f"the engine has not ended a step for {LONGEST_S:.0f} s") from error

    async def _take(self, engine: AsyncEngine) -> EngineState:
        cost_s = 0.0
        try:
            state = await engine.look()
            cost_s = state.cost_s
            return state
        finally:
            self._next_s = time.monotonic() + max(LEAST_S, cost_s / PART)


def _sequence(seq: SequenceState, tenant: str) -> dict[str, Any]:
    request_id, prompt = answer_id(seq.request_id)
    if request_id.startswith(SECRET_ID):
        request_id = request_id[:SHOWN_CHARS]
    return {
        "request_id": request_id if seq.cache_salt.startswith(tenant) else None,
        "prompt": prompt,
        "sample": seq.index,
        "status": seq.status,
        "prompt_tokens": seq.prompt_tokens,
        "output_tokens": seq.output_tokens,
        "computed_tokens": seq.computed_tokens,
        "cached_tokens": seq.cached_tokens,
        "blocks": seq.blocks,
        "shared_blocks": seq.shared_blocks,
        "preemptions": seq.preemptions,
        "draft_tokens": seq.draft_tokens,
        "accepted_tokens": seq.accepted_tokens,
    }


def answer_id(engine_id: str) -> tuple[str, int]:
    """The id of the answer, and which prompt of its request it is, of an engine's request id."""
    name, _, prompt = engine_id.rpartition("-")
    return name.rpartition("-")[0], int(prompt)
