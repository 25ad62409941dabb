"""Options shared by the commands that run an engine in their own process or call a server."""

from __future__ import annotations

import logging
import secrets
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from forge_jax.config import EngineConfig
from forge_jax.errors import ConfigError
from forge_serve.cli.flags import ENGINE_SECTIONS, MODEL, Flag, Parser, chosen, flags
from forge_serve.config import ServerConfig

if TYPE_CHECKING:
    from forge_serve.cli.backends import LocalBackend

# Server flags that also apply to an engine in the command's own process.
OF_SERVER = ("reasoning_parser", "fake", "fake_step_time_ms")
# Engine flags that do not apply: the sampling flags have their own seed, and the commands request
# neither embeddings, adapters nor steering vectors.
LEFT_OUT = (
    *("seed", "pooling", "lora", "max_loras", "max_lora_rank", "steering_vectors"),
    *("activations", "max_activation_mib"),
)


def add_engine(parser: Parser) -> None:
    """Add the flags of an engine."""
    for title, section_flags in _groups():
        parser.add_flags(title, section_flags)


def configs(options: dict[str, Any]) -> tuple[EngineConfig, ServerConfig]:
    """Return the configurations made of the options, which must contain nothing else."""
    options = {**options, "seed": secrets.randbits(63)}  # a different text in each run
    server = ServerConfig(**{name: options.pop(name) for name in OF_SERVER})
    return EngineConfig.from_options(**options, saved_executables=True), server


def check_model(config: EngineConfig) -> None:
    """Check the model's name before heavy imports, so that a wrong one fails at once.

    Raises:
      ModelError: the model is neither a local path nor a well-formed Hugging Face id.
    """
    from forge_jax.checkpoint.hub import local

    local(config.model.model)


def load(options: dict[str, Any]) -> LocalBackend:
    """Load the engine of the options. On a terminal, print which model is being loaded.

    Raises:
      ForgeError: the engine cannot be loaded.
    """
    engine, server = configs(options)
    if not server.fake:
        check_model(engine)
    quiet_logs()
    if sys.stderr.isatty() and not server.fake:
        print(f"loading {engine.model.model} …", file=sys.stderr)
    from forge_serve.cli.backends import LocalBackend

    return LocalBackend.load(engine, server)


def quiet_logs() -> None:
    """Log only warnings and errors, because the terminal is for the command's output."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")


def model_at(url: str, options: dict[str, Any]) -> str | None:
    """Return the server's model that MODEL names, or None if MODEL is omitted.

    Raises:
      ConfigError: a flag of the engine is set.
    """
    given = [
        flag.flag
        for _, section_flags in _groups()
        for flag in section_flags
        if options[flag.name] != flag.default
    ]
    if given:
        raise ConfigError(
            f"{', '.join(given)} can only be set for an engine in this process, but --url is "
            f"{url}: omit one of them"
        )
    return None if options["model"] == MODEL.default else options["model"]


def _groups() -> Iterator[tuple[str, list[Flag]]]:
    for title, section in ENGINE_SECTIONS.items():
        yield title, [flag for flag in flags(section) if flag.name not in LEFT_OUT]
    yield "same as serve", list(chosen(ServerConfig, OF_SERVER))
