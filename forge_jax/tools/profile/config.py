"""The flags of `forge-jax profile` in addition to the engine's."""

from __future__ import annotations

from dataclasses import dataclass

from forge_jax.config import option
from forge_jax.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Workload:
    steps: int = option(
        20, "number of steps in each trace, one trace of decodes and one of prompts; at least 1"
    )
    warmup_steps: int = option(8, "number of steps before each trace; at least 0")
    sequences: int = option(4, "number of sequences that decode together, 1 to --max-num-seqs")
    prompt_tokens: int = option(128, "number of tokens per prompt; at least 1")

    def __post_init__(self) -> None:
        for name in ("steps", "sequences", "prompt_tokens"):
            if getattr(self, name) < 1:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} must be at least 1, not {getattr(self, name)}")
        if self.warmup_steps < 0:
            raise ConfigError(f"--warmup-steps must be at least 0, not {self.warmup_steps}")
