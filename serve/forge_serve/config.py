"""The server's own configuration, beside the engine's: frozen, every default written once."""

from __future__ import annotations

from dataclasses import dataclass

from forge_jax.config import option
from forge_jax.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0: all of the machine's")
    port: int = option(8000, "port to listen on; 0: any free one")
    served_model_name: str | None = option(
        None, "name of the model in requests and answers; default: MODEL as given"
    )
    request_log: bool = option(True, "do not log a line per request", flag="--no-request-log")
    drain_timeout_s: float = option(
        30.0, "seconds that running requests get to finish on SIGTERM", flag="--drain-timeout"
    )
    request_timeout_s: float | None = option(
        None,
        "seconds that a request may take at most; its own timeout may be shorter",
        flag="--request-timeout",
    )
    max_queued_requests: int = option(
        4096, "samples that may wait for their first token; more are refused with 503"
    )
    max_queued_tokens: int = option(
        8 * 1024 * 1024, "prompt tokens that may wait for their first output, likewise"
    )
    memory_watermark: float = option(
        0.95, "part of the host's memory in use from which on requests are refused; 1: never"
    )
    stall_timeout_s: float = option(
        60.0,
        "seconds without a completed step, while there is work, after which /health fails",
        flag="--stall-timeout",
    )
    engine_process: bool = option(
        False, "run the engine in a process of its own, which is started again if it dies"
    )
    fake: bool = option(
        False, "serve a fake device without weights: deterministic text at any speed"
    )
    fake_step_time_ms: float = option(0.0, "milliseconds that a step of the fake device takes")

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must be between 0 and 65535, not {self.port}")
        if self.served_model_name is not None and not self.served_model_name.strip():
            raise ConfigError("--served-model-name must not be empty: leave it out for MODEL")
        if not 0.0 < self.memory_watermark <= 1.0:
            raise ConfigError(f"--memory-watermark must be in (0, 1], not {self.memory_watermark}")
        for flag, value in (
            ("--drain-timeout", self.drain_timeout_s),
            ("--stall-timeout", self.stall_timeout_s),
            ("--request-timeout", self.request_timeout_s or 0.0),
            ("--max-queued-requests", self.max_queued_requests),
            ("--max-queued-tokens", self.max_queued_tokens),
            ("--fake-step-time-ms", self.fake_step_time_ms),
        ):
            if not value >= 0:
                raise ConfigError(f"{flag} must not be negative, not {value}")
