"""What the commands have in common that run an engine in their own process, or ask a server."""

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

# Flags of the server's that mean the same for an engine in the command's own process.
OF_SERVER = ("reasoning_parser", "fake", "fake_step_time_ms")
# Flags of the engine's that mean nothing here: there is one for the seed of the text itself, nobody
# asks for embeddings, and no request names an adapter.
LEFT_OUT = ("seed", "pooling", "lora", "max_loras", "max_lora_rank")


def add_engine(parser: Parser) -> None:
    """The flags of an engine."""
    for title, section_flags in _groups():
        parser.add_flags(title, section_flags)


def configs(options: dict[str, Any]) -> tuple[EngineConfig, ServerConfig]:
    """Takes them out of the options, which must hold nothing else."""
    options = {**options, "seed": secrets.randbits(63)}  # another text each time
    server = ServerConfig(**{name: options.pop(name) for name in OF_SERVER})
    return EngineConfig.from_options(**options), server


def check_model(config: EngineConfig) -> None:
    """Fails at once for a model that cannot be, before anything heavy is imported.

    Raises:
      ModelError: it is neither here nor the form of a Hugging Face id.
    """
    from forge_jax.checkpoint.hub import local

    local(config.model.model)


def load(options: dict[str, Any]) -> LocalBackend:
    """The engine that the options ask for. Says on a terminal what it waits for.

    Raises:
      ForgeError: it cannot be had.
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
    """Warnings only: the terminal is for what was asked for."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")


def model_at(url: str, options: dict[str, Any]) -> str | None:
    """The model of a server that MODEL names; None if it is left out.

    Raises:
      ConfigError: a flag is given that is an engine's.
    """
    given = [
        flag.flag
        for _, section_flags in _groups()
        for flag in section_flags
        if options[flag.name] != flag.default
    ]
    if given:
        raise ConfigError(
            f"{', '.join(given)}: that is for an engine in this process, and {url} has its own: "
            "leave it out, or --url"
        )
    return None if options["model"] == MODEL.default else options["model"]


def _groups() -> Iterator[tuple[str, list[Flag]]]:
    for title, section in ENGINE_SECTIONS.items():
        yield title, [flag for flag in flags(section) if flag.name not in LEFT_OUT]
    yield "as of the server", list(chosen(ServerConfig, OF_SERVER))
