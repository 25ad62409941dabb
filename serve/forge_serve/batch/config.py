"""Options of `forge-jax batch` in addition to the engine's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from forge_jax.config import option
from forge_jax.errors import ConfigError

# Server flags that also apply to batch runs.
SERVER_FLAGS = (
    "served_model_name",
    "tool_call_parser",
    "reasoning_parser",
    "request_timeout_s",
    "max_new_tokens",
    "max_queued_requests",
    "max_queued_tokens",
    "engine_process",
    "fake",
    "fake_step_time_ms",
)


@dataclass(frozen=True, kw_only=True)
class BatchRunConfig:
    """Files of a batch run and how it processes them."""

    input: Path = option(Path("in.jsonl"), "batch file: one request per line", flag=None)
    output: Path = option(Path("out.jsonl"), "file for the responses", flag=None)
    in_flight: int | None = option(
        None,
        "maximum number of requests in progress, at least 1; auto: --max-num-seqs running, plus as "
        "many waiting (at least 64)",
    )
    quiet: bool = option(False, "print only warnings and errors, no progress bar and no summary")

    def __post_init__(self) -> None:
        if self.in_flight is not None and self.in_flight < 1:
            raise ConfigError(f"--in-flight must be at least 1, not {self.in_flight}")
