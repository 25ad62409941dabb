"""State of a server: its engine, its status, and the objects that endpoints share.

It does not depend on HTTP requests, so `batch` and `chat` use it as well.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from forge_serve.config import ServerConfig
from forge_serve.errors import NotReadyError, UnknownModelError
from forge_serve.generation.workers import TextWork, Workers
from forge_serve.http.auth import ApiKeys
from forge_serve.http.memory import MemoryGuard
from forge_serve.http.timeouts import Timeouts
from forge_serve.responses_api.store import ResponseStore
from forge_serve.server.profiles import Profiles
from forge_serve.server.weight_sync.sync import WeightSync
from forge_serve.telemetry import info
from forge_serve.telemetry.gpus import Gpus
from forge_serve.telemetry.metrics import Metrics
from forge_serve.telemetry.tracing import Tracing

if TYPE_CHECKING:
    from forge_jax.engine.async_engine import AsyncEngine
    from forge_serve.responses_api.websocket import ResponsesSocket

SERVING_STATES = ("serving", "ready")  # "ready": everything is compiled


class Service:
    """State of a server. `engine` is None until it is loaded.

    Args:
      config: the server's options.
      timeouts: network timeouts.
      gpus: the GPUs that the server shows; None: none.

    Raises:
      ConfigError: the API keys cannot be read, or OpenTelemetry is not installed.
    """

    def __init__(
        self, config: ServerConfig, timeouts: Timeouts | None = None, gpus: Gpus | None = None
    ):
        self.config = config
        self.gpus = gpus
        self.timeouts = timeouts or Timeouts()
        self.api_keys = ApiKeys.of(config)
        self.engine: AsyncEngine | None = None
        self.stopping = False
        self._broken = False  # True after an essential task of the server has failed
        self.created_s = int(time.time())
        self.metrics = Metrics(
            lambda: self.model_name, lambda: self.engine, lambda: self.state, gpus
        )
        self.tracing = Tracing.of(config)
        self.memory = MemoryGuard(config.memory_watermark, self._shed)
        self.profiles = Profiles(config.profile_dir)
        self.weight_sync = WeightSync(config.weight_sync_dir)
        self.workers = Workers()
        self.responses = ResponseStore(config.max_stored_responses, config.max_stored_bytes)
        self.sockets: set[ResponsesSocket] = set()  # the open WebSockets

    @property
    def model_name(self) -> str:
        """Name of the served model. Empty until the model is loaded, unless a flag sets it."""
        if self.config.served_model_name is not None:
            return self.config.served_model_name
        return "" if self.engine is None else self.engine.name

    @property
    def state(self) -> info.ServerState:
        """Current state. The server accepts requests in `SERVING_STATES`."""
        if self.stopping:
            return "stopping"
        if self.engine is None:
            return "starting"
        if self._broken:
            return "failed"
        return self._state_of(self.engine)

    @property
    def engine_states(self) -> list[info.ServerState]:
        """State of each engine of --data-parallel. Empty if there is only one engine."""
        engines = () if self.engine is None else self.engine.engines
        return [self._state_of(each) for each in engines] if len(engines) > 1 else []

    def _state_of(self, engine: AsyncEngine) -> info.ServerState:
        stats = engine.stats()
        if stats.state not in SERVING_STATES:
            return stats.state
        if not stats.healthy:
            return "failed"
        return "stalled" if stats.stalled_s > self.config.stall_timeout_s else stats.state

    @property
    def serving(self) -> bool:
        """True if requests are served."""
        return self.state in SERVING_STATES

    def stop(self) -> None:
        """Reject new requests. Close each WebSocket as soon as its current message is answered."""
        self.stopping = True
        for socket in list(self.sockets):
            socket.stop()

    def fail(self, error: BaseException) -> None:
        """Report "failed" in /health, because an essential task of the server has ended."""
        self._broken = True

    def ready_engine(self) -> AsyncEngine:
        """Return the engine.

        Raises:
          NotReadyError: the server is starting or stopping.
        """
        if self.stopping:
            raise NotReadyError("the server is shutting down")
        if self.engine is None:
            raise NotReadyError("the server is starting: the model is being loaded")
        return self.engine

    def timeout_s(self, asked: float | None) -> float | None:
        """Return a request's timeout: the requested one, but at most the server's."""
        most = self.config.request_timeout_s
        return most if asked is None else asked if most is None else min(asked, most)

    def text_work(self, tenant: str) -> TextWork:
        """Return one tenant's access to the threads that tokenize texts."""
        return TextWork(self.workers, tenant, self.config.limits.text_bytes)

    def lora_of(self, name: str | None) -> str | None:
        """Return the LoRA adapter with this model name, or None for the base model.

        Raises:
          UnknownModelError: no model or adapter has this name.
        """
        adapters = [] if self.engine is None else [each.name for each in self.engine.loras]
        if name in adapters and name != self.model_name:
            return name
        if name is None or name == self.model_name or self.config.accept_any_model:
            return None
        raise UnknownModelError.listing([self.model_name, *adapters], name)

    def _shed(self) -> bool:
        return self.engine is not None and self.engine.shed()
