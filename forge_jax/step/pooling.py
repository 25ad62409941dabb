"""`Pooling`: the steps that pool hidden states, compiled for the first request that needs them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from forge_jax.errors import EngineError
from forge_jax.step.executables import Executables
from forge_jax.step.kv_cache import GIB
from forge_jax.step.step_shapes import pool_shapes

if TYPE_CHECKING:
    from forge_jax.step.inputs import StepShape
    from forge_jax.step.options import RunnerOptions
    from forge_jax.step.state import StepState
    from forge_jax.step.step_builder import StepBuilder


class Pooling:
    """The pooling steps: compiled in any thread, activated in the thread that dispatches."""

    def __init__(self, options: RunnerOptions):
        self.ready: list[StepShape] = []  # active, smallest first
        self._shapes = pool_shapes(list(options.shapes))
        self._compiler_options = options.compiler_options
        self._store = options.store
        self._memory_limit = options.memory_limit
        self._executables: Executables | None = None
        self._lock = threading.Lock()

    def compile(self, builder: StepBuilder) -> None:
        """Compile the steps. Further calls only wait. Thread-safe.

        Raises:
          EngineError: if the device has too little memory for them.
        """
        with self._lock:
            if self._executables is None:
                self._executables = Executables(self._compiler_options, store=self._store)
                for shape in self._shapes:
                    builder.add_step(self._executables, shape)
                self._executables.close()
        for shape in self._shapes:
            needed = self._executables.memory_bytes(shape.name)
            if self._memory_limit is not None and needed > self._memory_limit:
                raise EngineError(
                    f"embeddings need {needed / GIB:.2f} GiB, but only "
                    f"{self._memory_limit / GIB:.2f} GiB are available: lower --num-blocks"
                )

    def activate(self, state: StepState) -> None:
        """Run each compiled step once. Call it between steps."""
        if self.ready:
            return
        assert self._executables is not None
        state.new_sums()
        for shape in self._shapes:
            state.activate(shape, self._executables)
        self.ready = self._shapes
