"""`Executables`: what an engine has compiled, by name, from shapes alone.

Tracing is Python, so one thread does it for all, in the order in which they are wanted; XLA's part
runs in as many threads as there are cores. Nothing here knows what the executables compute.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import jax

from forge_jax.host import supervise
from forge_jax.step.kv_cache import GIB
from forge_jax.telemetry.compilations import expected

log = logging.getLogger(__name__)


class Executables:
    """Lowers and compiles in the background, first come, first compiled.

    Args:
      compiler_options: XLA's, for all of them.
    """

    def __init__(self, compiler_options: Mapping[str, str | bool | int] | None = None):
        self._options = dict(compiler_options or {})
        self._tracing = ThreadPoolExecutor(1, thread_name_prefix="forge-trace")
        self._compiling = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="forge-compile")
        self._calling = ThreadPoolExecutor(1, thread_name_prefix="forge-call")
        self._futures: dict[str, Future[jax.stages.Compiled]] = {}
        self._resumed = threading.Event()

    def add(self, name: str, function: Callable[..., Any], *args: Any, **jit_options: Any) -> None:
        """Queues `function` at the shapes `args`; the options are those of `jax.jit`."""
        jitted = jax.jit(function, **jit_options)
        lowered = self._tracing.submit(jitted.lower, *args)
        self._futures[name] = self._compiling.submit(self._compile, lowered)

    def call(self, name: str) -> Future[Any]:
        """What `name`, which takes no arguments, returns: called as soon as it is compiled."""
        return self._calling.submit(lambda: self[name]())

    def pause(self, seconds: float) -> None:
        """What is added after this waits so long, or until `resume`."""
        self._tracing.submit(self._resumed.wait, seconds)

    def resume(self) -> None:
        self._resumed.set()

    def __getitem__(self, name: str) -> jax.stages.Compiled:
        """Waits for it; raises what its compilation raised."""
        return self._futures[name].result()

    def __iter__(self) -> Iterable[str]:
        return iter(self._futures)

    def wait(self, name: str) -> None:
        """Until `is_done`."""
        self._futures[name].exception()

    def is_done(self, name: str) -> bool:
        """Whether it is there, or never will be."""
        return self._futures[name].done()

    def on_done(self, name: str, call: Callable[[], None]) -> None:
        """Has `call` called once `is_done`: by the thread that compiled it, or now."""
        call = supervise.guarded(call, f"adopting {name}", None)
        self._futures[name].add_done_callback(lambda _: call())

    def memory_bytes(self, name: str) -> int:
        """What the device must hold while it runs, its arguments included, by XLA's analysis."""
        memory = self[name].memory_analysis()
        if memory is None:  # this backend does not tell
            return 0
        return (
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
            + memory.temp_size_in_bytes
            + memory.generated_code_size_in_bytes
        )

    def cancel(self) -> None:
        """Begins no further compilation; what XLA is at cannot be interrupted."""
        self._resumed.set()
        self._tracing.shutdown(wait=False, cancel_futures=True)
        self._compiling.shutdown(wait=False, cancel_futures=True)
        self._calling.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """Nothing more will be added: the threads end when they have done what there is."""
        self._tracing.shutdown(wait=False)
        self._compiling.shutdown(wait=False)
        self._calling.shutdown(wait=False)

    def _compile(self, lowered: Future[jax.stages.Lowered]) -> jax.stages.Compiled:
        with expected():
            return lowered.result().compile(compiler_options=self._options or None)


class Shape(Protocol):
    """What an executable is compiled for."""

    @property
    def name(self) -> str: ...


class LateShapes[S: Shape]:
    """Shapes whose executables come while others run already, until they are adopted.

    Args:
      memory_limit: what an executable may need while it runs, in bytes. None: not known.
      flags: of which less makes room.
    """

    def __init__(
        self, executables: Executables, shapes: Iterable[S], memory_limit: int | None, flags: str
    ):
        self.shapes = list(shapes)
        self._executables = executables
        self._memory_limit = memory_limit
        self._flags = flags

    def __bool__(self) -> bool:
        return bool(self.shapes)

    def arrived(self) -> Iterator[S]:
        """Those that have been compiled since; what failed to, or needs too much, is left out."""
        for shape in [shape for shape in self.shapes if self._executables.is_done(shape.name)]:
            self.shapes.remove(shape)
            try:
                needed = self._executables.memory_bytes(shape.name)
            except Exception:
                log.exception("%s could not be compiled: it is left out", shape.name)
                continue
            if self._memory_limit is None or needed <= self._memory_limit:
                yield shape
                continue
            log.warning(
                "%s needs %.2f GiB, and there is %.2f: it is left out (less %s makes room)",
                shape.name,
                needed / GIB,
                self._memory_limit / GIB,
                self._flags,
            )

    def on_compiled(self, call: Callable[[], None]) -> None:
        """Has `call` called, in another thread, whenever something arrives."""
        for shape in self.shapes.copy():
            self._executables.on_done(shape.name, call)

    def wait(self) -> None:
        """Until everything that is left has arrived."""
        for shape in self.shapes.copy():
            self._executables.wait(shape.name)

    def cancel(self) -> None:
        """Compiles nothing more: what has not been adopted never will be."""
        self._executables.cancel()
        self.shapes.clear()
