"""`EngineParts`: an assembled engine, for `LLM` and `Engine` to run."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from forge_jax.config import Pooling
from forge_jax.engine.core import EngineCore
from forge_jax.telemetry.startup import StartupTimes

if TYPE_CHECKING:
    import jax

    from forge_jax.engine.adapters import Adapters
    from forge_jax.engine.offload import Offload
    from forge_jax.engine.weights import EngineWeights
    from forge_jax.step.executables import BackgroundCompile
    from forge_jax.text import ChatTemplate, Tokenizer


class Steps(Protocol):
    """The device's steps, as needed by a profile."""

    def compiled(self) -> Mapping[str, jax.stages.Compiled]:
        """Return the active executables by name. Thread-safe."""
        ...

    def settle(self) -> None:
        """Block until the device has finished everything that was dispatched."""
        ...

    @property
    def command_buffers(self) -> bool:
        """True if the executables may use XLA's command buffers (CUDA graphs)."""
        ...


class Pooler(Protocol):
    """The executables that pool hidden states, compiled for the first request that needs them."""

    @property
    def can_pool(self) -> bool:
        """True once compiled and active."""
        ...

    def compile_pooling(self) -> None:
        """Compile them. Further calls only wait. Do not call it in the engine thread.

        Raises:
          EngineError: if the device has too little memory for them.
        """
        ...

    def activate_pooling(self) -> None:
        """Activate the compiled executables. Call it in the engine thread, between two ticks."""
        ...


@dataclass(kw_only=True)
class EngineParts:
    """An assembled engine."""

    name: str
    core: EngineCore
    max_model_len: int
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    rng: random.Random
    # Returns the context in which every `tick` runs.
    guard: Callable[[], AbstractContextManager[Any]] = nullcontext
    compilations: Callable[[], int] = lambda: 0  # the count since the engine became ready
    clock: Callable[[], float] = time.monotonic
    system_fingerprint: str | None = None  # None outside the deterministic tier
    architecture: str | None = None
    shards: int = 1  # devices that share the model
    pooling: Pooling = "last"
    adapters: Adapters | None = None  # None: LoRA is off
    pooler: Pooler | None = None  # None: the device can pool from the start
    steps: Steps | None = None  # None: the device is fake
    weights: EngineWeights | None = None  # None: the device is fake
    offload: Offload | None = None  # None: the device is fake
    late: BackgroundCompile | None = None  # None: everything is compiled and active
    startup: StartupTimes = field(default_factory=StartupTimes)

    def finish_compiling(self) -> None:
        """Block until every executable is compiled, and activate them all."""
        if self.late is not None:
            self.late.finish()
