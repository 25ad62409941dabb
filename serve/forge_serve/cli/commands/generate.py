"""`forge-jax generate`: continue a text with an engine in this process."""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from forge_jax.errors import RequestError
from forge_serve.cli.commands.engine import add_engine, load
from forge_serve.cli.commands.sampling import CompletionFlags
from forge_serve.cli.flags import MODEL, Commands, add_sections, taken
from forge_serve.cli.terminal import Answer

if TYPE_CHECKING:
    from forge_serve.cli.backends import LocalBackend

DESCRIPTION = """\
Continue a text without starting a server. The model's output is streamed to stdout, which contains
nothing else."""
EPILOG = """\
examples:
  forge-jax generate forge-tiny "Once upon a time"
  forge-jax generate Qwen/Qwen3-0.6B - < beginning.txt --temperature 0 --max-tokens 64
  forge-jax generate forge-tiny "The dog" --n 3 --json"""


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "generate",
        help="continue a text",
        usage="forge-jax generate MODEL PROMPT [options]",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL.metadata["doc"])
    parser.add_argument("prompt", metavar="PROMPT", help="the text, or - to read it from stdin")
    parser.add_argument(
        "--json",
        action="store_true",
        help="write the response of /v1/completions as one JSON object instead of streaming",
    )
    add_sections(parser, {"sampling": CompletionFlags}, all_essential=True)
    add_engine(parser)
    parser.set_defaults(run=run)


def run(options: dict[str, Any]) -> int:
    prompt, as_json = options.pop("prompt"), options.pop("json")
    sampling = CompletionFlags(**taken(options, CompletionFlags))
    if prompt == "-":
        prompt = read_stdin()
    if not prompt:
        raise RequestError("PROMPT is empty: pass a text, or - to read it from stdin")
    backend = load(options)
    body = {"prompt": prompt, **sampling.body()}
    from forge_serve.cli.backends import end_with

    with asyncio.Runner() as runner:
        try:
            if as_json:
                runner.run(_write_json(backend, body))
            else:
                runner.run(_write_samples(backend, body, sampling.n))
        finally:
            runner.run(backend.close())
    return end_with(0, backend)


async def _write_json(backend: LocalBackend, body: dict[str, Any]) -> None:
    sys.stdout.write((await backend.whole("completions", body)).decode() + "\n")


async def _write_samples(backend: LocalBackend, body: dict[str, Any], n: int) -> None:
    """Stream the first sample, then write the others, which are generated at the same time."""
    answer = Answer()
    texts = [""] * n
    if n > 1:
        answer.write(_heading(0, n))
    async with aclosing(backend.events("completions", body)) as events:
        async for event in events:
            for choice in event["choices"]:
                if choice["index"] == 0:
                    answer.write(choice["text"])
                texts[choice["index"]] += choice["text"]
    for index, text in enumerate(texts[1:], start=1):
        answer.write(f"\n{_heading(index, n)}{text}")
    answer.write("\n")


def _heading(index: int, n: int) -> str:
    return f"--- {index + 1} of {n} ---\n"


def read_stdin() -> str:
    """Return all of stdin.

    Raises:
      RequestError: stdin is not text.
    """
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise RequestError(f"stdin is not {error.encoding} text: {error.reason}") from error
