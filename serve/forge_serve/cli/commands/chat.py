"""`forge-jax chat`: chat in the terminal with an engine in this process or with a server."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forge_jax.config import option
from forge_jax.errors import RequestError
from forge_serve.cli.commands.engine import add_engine, load, model_at
from forge_serve.cli.commands.generate import read_stdin
from forge_serve.cli.commands.sampling import SamplingFlags
from forge_serve.cli.flags import Commands, add_model, add_sections, taken

if TYPE_CHECKING:
    from forge_serve.cli.backends import HttpBackend, LocalBackend
    from forge_serve.cli.chat.conversation import Conversation, Output

DESCRIPTION = """\
Chat with a model loaded in this process, or on a server if --url is set. Answers are streamed.
If stdin or stdout is not a terminal, all of stdin is one message and only the answer is written."""
EPILOG = """\
Ctrl-C stops the answer, Ctrl-D ends the chat, /help lists the commands.

examples:
  forge-jax chat Qwen/Qwen3-0.6B --system "Answer in one sentence."
  forge-jax chat --url http://127.0.0.1:8000 --api-key-file key.txt
  echo "What is 2+2?" | forge-jax chat --temperature 0"""


@dataclass(frozen=True, kw_only=True)
class ChatFlags:
    url: str | None = option(
        None,
        "URL of a server, such as http://127.0.0.1:8000; MODEL is then one of its models",
        metavar="URL",
    )
    api_key_file: str | None = option(
        None,
        "file with the server's API key, in the format of serve's --api-key-file",
        metavar="FILE",
    )
    system: str | None = option(None, "system message: instructions for the model")
    markdown: bool = option(
        True, "show answers as plain text instead of Markdown", flag="--no-markdown"
    )
    history: bool = option(
        True,
        "keep messages for this chat only. By default, they are kept for later chats, in "
        "~/.local/state/forge-jax/chat_history",
        flag="--no-history",
    )


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "chat",
        help="chat with a model in the terminal",
        usage="forge-jax chat [MODEL] [options]",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    add_model(parser)
    add_sections(parser, {"chat": ChatFlags, "sampling": SamplingFlags}, all_essential=True)
    add_engine(parser)
    parser.set_defaults(run=run)


def run(options: dict[str, Any]) -> int:
    flags = ChatFlags(**taken(options, ChatFlags))
    sampling = SamplingFlags(**taken(options, SamplingFlags))
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    message = "" if interactive else read_stdin()
    if not interactive and not message.strip():
        raise RequestError("stdin has no message: pipe text to it")
    from forge_serve.cli.chat.conversation import Conversation

    with asyncio.Runner() as runner:
        backend = _backend(runner, flags, options)
        try:
            conversation = Conversation(backend, sampling, flags.system)
            if interactive:
                _converse(runner, conversation, flags)
            else:
                runner.run(conversation.answer(message, _output(flags.markdown)))
        finally:
            runner.run(backend.close())
    from forge_serve.cli.backends import end_with

    return end_with(0, backend)


def _backend(
    runner: asyncio.Runner, flags: ChatFlags, options: dict[str, Any]
) -> LocalBackend | HttpBackend:
    if flags.url is None:
        if flags.api_key_file is not None:
            raise RequestError("--api-key-file requires --url")
        return load(options)
    model = model_at(flags.url, options)
    from forge_serve.cli.backends import HttpBackend
    from forge_serve.http.client import api_key_of

    key = api_key_of(flags.api_key_file)
    return runner.run(HttpBackend.connect(flags.url, model=model, api_key=key))


def _converse(runner: asyncio.Runner, conversation: Conversation, flags: ChatFlags) -> None:
    from forge_serve.cli.chat.session import Session

    Session(runner, conversation, _output, markdown=flags.markdown, history=flags.history).run()


def _output(markdown: bool) -> Output:
    """Return the output of one answer on stdout."""
    if sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
        from forge_serve.cli.chat.markdown import Screen

        return Screen(markdown=markdown)
    from forge_serve.cli.chat.plain import PlainText

    return PlainText()
