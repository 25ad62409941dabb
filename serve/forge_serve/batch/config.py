"""What `forge-jax batch` takes beside the engine's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from forge_jax.config import option
from forge_jax.errors import ConfigError

# Flags of the server's that mean the same here.
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
    """Files and how they are worked on."""

    input: Path = option(Path("in.jsonl"), "requests, one in each line", flag=None)
    output: Path = option(Path("out.jsonl"), "where the answers go", flag=None)
    in_flight: int | None = option(
        None,
        "lines that are worked on at once; auto: all that the engine can run, and as many again "
        "that wait, at least 64",
    )
    quiet: bool = option(False, "no progress bar and no summary, only warnings and errors")

    def __post_init__(self) -> None:
        if self.in_flight is not None and self.in_flight < 1:
            raise ConfigError(f"--in-flight must be at least 1, not {self.in_flight}")
