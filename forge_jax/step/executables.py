"""Compilation in threads: `Executables` by name, and `BackgroundCompile` for late ones.

Tracing runs Python, so one thread traces everything, in the order in which it was added. XLA
compiles in as many threads as there are cores. This module does not depend on what the executables
compute.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import jax

from forge_jax.host import supervise
from forge_jax.step.kv_cache import GIB
from forge_jax.telemetry.compilations import expected

if TYPE_CHECKING:
    from forge_jax.step.bundle import Stored

log = logging.getLogger(__name__)

# If the first executables are cached, they are ready within this time. The others then wait until
# those run, because tracing would only slow them down. Otherwise there is time to trace.
PATIENCE_S = 1.0


class Store(Protocol):
    """Executables that are loaded instead of compiled, from a bundle or an earlier start."""

    def find(self, name: str, args: tuple[Any, ...]) -> Stored | None:
        """Return an executable for the shapes `args`; None if there is none."""
        ...

    def save(self, name: str, compiled: jax.stages.Compiled) -> None:
        """Keep an executable that was not found. A bundle does not. Thread-safe."""
        ...


class Executables:
    """Executables that are lowered and compiled in threads, in the order in which they are added.

    Args:
      compiler_options: XLA's options of each compilation.
      store: holds executables that are loaded instead. Default: everything is compiled.
      within: returns a context in which everything is traced.
    """

    def __init__(
        self,
        compiler_options: Mapping[str, str | bool | int] | None = None,
        *,
        store: Store | None = None,
        within: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ):
        self._options = dict(compiler_options or {})
        self._store = store
        self._within = within
        self._tracing = ThreadPoolExecutor(1, thread_name_prefix="forge-trace")
        self._compiling = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="forge-compile")
        self._calling = ThreadPoolExecutor(1, thread_name_prefix="forge-call")
        self._futures: dict[str, Future[jax.stages.Compiled]] = {}
        self._resumed = threading.Event()
        self._one_at_a_time = threading.Lock()  # tracing that is not in its thread

    def add(self, name: str, function: Callable[..., Any], *args: Any, **jit_options: Any) -> None:
        """Queue `function` for the shapes `args`. The options are those of `jax.jit`."""
        jitted = jax.jit(function, **jit_options)
        stored = None if self._store is None else self._store.find(name, args)
        if stored is None:
            lowered = self._tracing.submit(self._lower, jitted, args)
            self._futures[name] = self._compiling.submit(self._compile, name, lowered)
        else:
            turn = self._tracing.submit(lambda: None)  # after the pauses that were added before
            self._futures[name] = self._compiling.submit(
                self._load, name, stored, turn, jitted, args
            )

    def call(self, name: str) -> Future[Any]:
        """Call `name`, which takes no arguments, as soon as it is compiled."""
        return self._calling.submit(lambda: self[name]())

    def pause(self, seconds: float) -> None:
        """Delay everything added after this by `seconds`, or until `resume`."""
        self._tracing.submit(self._resumed.wait, seconds)

    def resume(self) -> None:
        self._resumed.set()

    def __getitem__(self, name: str) -> jax.stages.Compiled:
        """Wait for an executable and return it. Raise the error of its compilation, if any."""
        return self._futures[name].result()

    def __iter__(self) -> Iterator[str]:
        return iter(self._futures)

    def wait(self, name: str) -> None:
        """Block until `is_done`."""
        self._futures[name].exception()

    def is_done(self, name: str) -> bool:
        """Return True if it has been compiled, or has failed to compile."""
        return self._futures[name].done()

    def on_done(self, name: str, call: Callable[[], None]) -> None:
        """Run `call` once `is_done`: in the thread that compiled it, or now."""
        call = supervise.guarded(call, f"adopting {name}", None)
        self._futures[name].add_done_callback(lambda _: call())

    def memory_bytes(self, name: str) -> int:
        """Return the device memory of a call, including arguments, as XLA reports it. Waits."""
        memory = self[name].memory_analysis()
        if memory is None:  # this backend does not report it
            return 0
        return (
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
            + memory.temp_size_in_bytes
            + memory.generated_code_size_in_bytes
        )

    def cancel(self) -> None:
        """Start no further compilation. XLA cannot interrupt one that has started."""
        self._resumed.set()
        self._tracing.shutdown(wait=False, cancel_futures=True)
        self._compiling.shutdown(wait=False, cancel_futures=True)
        self._calling.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """Accept no more functions. The threads end when the queue is empty."""
        self._tracing.shutdown(wait=False)
        self._compiling.shutdown(wait=False)
        self._calling.shutdown(wait=False)

    def _lower(self, jitted: Any, args: tuple[Any, ...]) -> jax.stages.Lowered:
        with self._within():
            return jitted.lower(*args)

    def _load(
        self, name: str, stored: Stored, turn: Future[None], jitted: Any, args: tuple[Any, ...]
    ) -> jax.stages.Compiled:
        """Load a stored executable, or compile it if that fails."""
        turn.result()
        loaded = stored.load(self._options)
        if loaded is not None:
            return loaded
        lowered: Future[jax.stages.Lowered] = Future()
        with self._one_at_a_time:
            lowered.set_result(self._lower(jitted, args))
        return self._compile(name, lowered)

    def _compile(self, name: str, lowered: Future[jax.stages.Lowered]) -> jax.stages.Compiled:
        with expected() as compilations:
            compiled = lowered.result().compile(compiler_options=self._options or None)
        # XLA:CPU does not serialize all of an executable that was itself loaded.
        if self._store is not None and compilations.count and not compilations.reads:
            self._store.save(name, compiled)
        return compiled


@dataclass(frozen=True, kw_only=True)
class _Pending:
    """An executable that has not been activated."""

    name: str
    executables: Executables
    activate: Callable[[], None]
    memory_limit: int | None
    remedy: str

    def usable(self) -> bool:
        """Return True if it has been compiled and fits into the memory."""
        try:
            needed = self.executables.memory_bytes(self.name)
        except Exception:
            log.exception("%s could not be compiled and is not used", self.name)
            return False
        if self.memory_limit is None or needed <= self.memory_limit:
            return True
        log.warning(
            "%s needs %.2f GiB, but only %.2f GiB are available: it is not used. Lower %s",
            self.name,
            needed / GIB,
            self.memory_limit / GIB,
            self.remedy,
        )
        return False


class BackgroundCompile:
    """Executables that compile while the engine already runs without them.

    Their owners `add` them. The thread that ticks calls `activate` between two steps. The other
    methods are thread-safe.
    """

    def __init__(self) -> None:
        self._sources: list[Executables] = []
        self._pending: dict[str, _Pending] = {}
        self._after_activation: list[Callable[[], None]] = []

    @property
    def complete(self) -> bool:
        """True if nothing is left to activate."""
        return not self._pending

    def add(
        self,
        executables: Executables,
        activations: Mapping[str, Callable[[], None]],
        *,
        memory_limit: int | None = None,
        remedy: str = "",
    ) -> None:
        """Add executables, each with the function that makes the engine use it.

        Args:
          activations: functions by the executable's name, in the order of activation.
          memory_limit: maximum bytes of one executable; None: no limit.
          remedy: flags to lower if one needs more, for the log.
        """
        self._sources.append(executables)
        for name, activate in activations.items():
            self._pending[name] = _Pending(
                name=name,
                executables=executables,
                activate=activate,
                memory_limit=memory_limit,
                remedy=remedy,
            )

    def after_activation(self, call: Callable[[], None]) -> None:
        """Run `call` at the end of each `activate`."""
        self._after_activation.append(call)

    def activate(self) -> bool:
        """Activate everything compiled since the last call. Return `complete`.

        An executable that failed to compile, or needs too much memory, is logged and not used.
        """
        pending = list(self._pending.values())
        for late in [late for late in pending if late.executables.is_done(late.name)]:
            # `cancel` in another thread may have removed it meanwhile.
            if self._pending.pop(late.name, None) is not None and late.usable():
                late.activate()
        for call in self._after_activation:
            call()
        return self.complete

    def on_compiled(self, call: Callable[[], None]) -> None:
        """Run `call`, in any thread, whenever a new executable is ready to be activated."""
        for late in list(self._pending.values()):
            late.executables.on_done(late.name, call)

    def wait(self) -> None:
        """Block until compilation finishes. `activate` then activates everything."""
        for late in list(self._pending.values()):
            late.executables.wait(late.name)

    def finish(self) -> None:
        """Block until everything is compiled, and activate it."""
        self.wait()
        self.activate()

    def cancel(self) -> None:
        """Stop compiling. Executables that are not active never will be."""
        for executables in self._sources:
            executables.cancel()
        self._pending.clear()
