"""What to trace: the flags of `forge-jax profile` beside the engine's."""

from __future__ import annotations

from dataclasses import dataclass

from forge_jax.config import option
from forge_jax.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Workload:
    steps: int = option(20, "steps that are traced, of decodes and of prompts each")
    warmup_steps: int = option(8, "steps before them that are not")
    sequences: int = option(4, "sequences that decode together; at most --max-num-seqs")
    prompt_tokens: int = option(128, "tokens of a prompt")

    def __post_init__(self) -> None:
        for name in ("steps", "sequences", "prompt_tokens"):
            if getattr(self, name) < 1:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} must be at least 1, not {getattr(self, name)}")
        if self.warmup_steps < 0:
            raise ConfigError(f"--warmup-steps must not be negative, not {self.warmup_steps}")
