"""Pause an engine, and free its device memory, while a trainer replaces its weights.

A paused engine computes no step. Requests that arrive meanwhile wait at the gate, and start after
`resume`. A sleeping engine is paused, and has freed the memory of its weights and KV cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Literal, get_args

from forge_jax.errors import RequestError

if TYPE_CHECKING:
    from forge_jax.engine.parts import EngineParts
    from forge_jax.engine.thread import EngineThread

PauseMode = Literal["abort", "wait", "keep"]
Resident = Literal["weights", "kv_cache"]  # arguments of `wake_up`
LEVELS = (1, 2)
_ALIVE_S = 1.0  # interval between checks that the engine thread is alive


class Control:
    """Pauses, sleep and cache resets of one engine. Use it on the engine's event loop.

    Every change runs in the engine thread, between two steps.
    """

    def __init__(self, parts: EngineParts, thread: EngineThread):
        self._core = parts.core
        self._offload = parts.offload
        self._thread = thread
        self._reasons: set[str] = set()  # "pause" and "sleep"; the engine runs without any
        self._absent: set[Resident] = set()

    @property
    def paused(self) -> bool:
        """True from a pause until `resume`, and while the engine sleeps."""
        return bool(self._reasons)

    @property
    def sleeping(self) -> bool:
        return "sleep" in self._reasons

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Stop computing. Requests that arrive from now on wait until `resume`.

        Args:
          mode: "abort" ends unfinished requests, "wait" finishes them first, and "keep" freezes
            them until `resume`. If the engine is paused already, "wait" leaves them frozen.

        Raises:
          RequestError: if the mode is unknown, or `resume` ended the wait.
          EngineError: if the engine is not running.
        """
        await self._pause(mode, "pause")

    async def resume(self) -> None:
        """Continue to compute. No effect if the engine is not paused.

        Raises:
          RequestError: if the engine sleeps.
          EngineError: if the engine is not running.
        """
        await self._in_thread(self._resume)

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Pause, and free the device memory of weights and KV cache.

        Args:
          level: 1 copies the weights to host memory, 2 drops them until an update.
          mode: as in `pause`. Kept requests compute their keys and values again after `wake_up`.

        Raises:
          RequestError: if an argument is invalid, or the engine was resumed meanwhile.
          EngineError: if the engine is not running.
        """
        if level not in LEVELS:
            raise RequestError("level must be 1 or 2", param="level")
        await self._pause(mode, "sleep")
        await self._in_thread(lambda: self._release(level))

    async def wake_up(self, tags: Iterable[str] = ()) -> None:
        """Restore the weights, the KV cache or both. Continue once the engine has both.

        Args:
          tags: "weights" and "kv_cache". Default: both. After level 2, the tag "weights"
            restores nothing: the next update installs the weights.

        Raises:
          RequestError: if a tag is unknown, or level 2 has dropped the weights and no tag is given.
          EngineError: if the engine is not running.
        """
        wanted = set(tags)
        unknown = wanted - set(get_args(Resident))
        if unknown:
            raise RequestError("tags must be weights or kv_cache", param="tags")
        await self._in_thread(lambda: self._wake_up(wanted))

    async def reset_prefix_cache(self, *, running: bool = False) -> None:
        """Empty the prefix cache, except for blocks of running requests.

        Args:
          running: also recompute the keys and values of running requests.
        """
        core = self._core
        await self._in_thread(core.drop_kv if running else core.empty_prefix_cache)

    def weights_installed(self) -> None:
        """Note that an update has put weights on the device. Call it in the engine thread."""
        if self._offload is None or "weights" not in self._absent:
            return
        self._offload.drop_copy()
        self._offload.restore_draft()
        self._absent.discard("weights")
        self._wake_if_complete()

    # ---- in the engine thread --------------------------------------------------------------------

    async def _in_thread(self, call: Callable[[], None]) -> None:
        await asyncio.to_thread(self._thread.between_steps, call)

    async def _pause(self, mode: str, reason: str) -> None:
        if mode not in get_args(PauseMode):
            raise RequestError(f"mode must be {', '.join(get_args(PauseMode))}", param="mode")
        idle: Future[None] = Future()
        await self._in_thread(lambda: self._close(mode, reason, idle))
        finished = asyncio.wrap_future(idle)
        while not finished.done():
            await asyncio.wait([finished], timeout=_ALIVE_S)
            self._thread.check_alive()
        finished.result()

    def _close(self, mode: str, reason: str, idle: Future[None]) -> None:
        core, gate = self._core, self._thread.gate
        if mode == "wait" and not core.paused:
            gate.when_idle(idle)
        else:
            core.pause()
            idle.set_result(None)
        if mode == "abort":
            core.abort_all()
        gate.closed = True
        self._reasons.add(reason)

    def _resume(self) -> None:
        if self._absent:
            raise RequestError("the engine sleeps: wake it up with POST /wake_up")
        self._reasons.clear()
        self._thread.reopen()

    def _release(self, level: int) -> None:
        if not self._core.paused:
            raise RequestError("the engine was resumed before it could sleep: try again")
        if self._absent:
            if level == 2 and self._offload is not None and "weights" in self._absent:
                self._offload.drop_copy()
            return
        self._core.drop_kv()
        if self._offload is not None:
            self._offload.release(keep=level == 1)
        self._thread.gate.holds_activations = True
        self._absent = set(get_args(Resident))

    def _wake_up(self, wanted: set[str]) -> None:
        offload = self._offload
        if "weights" in self._absent and (not wanted or "weights" in wanted):
            if offload is None:
                self._absent.discard("weights")
            elif offload.has_copy:
                offload.restore_weights()
                self._absent.discard("weights")
            elif not wanted:
                raise RequestError(
                    "sleep at level 2 has dropped the weights: call POST /update_weights first"
                )
        if "kv_cache" in self._absent and (not wanted or "kv_cache" in wanted):
            if offload is None:
                self._core.device.reset()
            else:
                offload.restore_kv()
            self._absent.discard("kv_cache")
        self._wake_if_complete()

    def _wake_if_complete(self) -> None:
        if self._absent or not self.sleeping:
            return
        if self._core.speculator is not None:
            self._core.speculator.reset()
        self._reasons.discard("sleep")
        self._thread.activate_held()
        if not self._reasons:
            self._thread.reopen()
