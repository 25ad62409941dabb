"""`forge-jax chat`: chat in the terminal with an engine in this process or with a server."""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forge_jax.config import option
from forge_jax.errors import ForgeError, RequestError
from forge_serve.cli.commands.engine import add_engine, load, model_at
from forge_serve.cli.commands.generate import read_stdin
from forge_serve.cli.commands.sampling import SamplingFlags
from forge_serve.cli.exit_status import say_error
from forge_serve.cli.flags import Commands, add_model, add_sections, taken
from forge_serve.cli.terminal import Answer

if TYPE_CHECKING:
    from forge_serve.cli.backends import HttpBackend, LocalBackend

DESCRIPTION = """\
Chat with a model loaded in this process, or on a server if --url is set. Answers are streamed.
If stdin or stdout is not a terminal, all of stdin is one message and only the answer is written."""
EPILOG = """\
Ctrl-C stops the answer, Ctrl-D ends the chat, /help lists the commands.

examples:
  forge-jax chat Qwen/Qwen3-0.6B --system "Answer in one sentence."
  forge-jax chat --url http://127.0.0.1:8000 --api-key-file key.txt
  echo "What is 2+2?" | forge-jax chat --temperature 0"""
COMMANDS_HELP = """\
/help          show this text
/system TEXT   set the system message; without TEXT, remove it
/reset         clear the conversation and keep the system message
/quit          end the chat (also Ctrl-D)
\\ at line end  continue the message on the next line
\"\"\"            start or end a multiline message
Ctrl-C stops an answer. Its text so far stays in the conversation."""
BLOCK = '"""'


@dataclass(frozen=True, kw_only=True)
class ChatFlags:
    url: str | None = option(
        None, "URL of a server, such as http://127.0.0.1:8000; MODEL is then one of its models"
    )
    api_key_file: str | None = option(
        None, "file with the server's API key, in the format of serve's --api-key-file"
    )
    system: str | None = option(None, "system message: instructions for the model")


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
    with asyncio.Runner() as runner:
        backend = _backend(runner, flags, options)
        try:
            chat = Chat(backend, sampling.body(), flags.system)
            if interactive:
                _converse(runner, chat)
            else:
                runner.run(chat.answer(message, Answer()))
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


class Chat:
    """Conversation: the messages so far and the backend that answers the next one."""

    def __init__(
        self, backend: LocalBackend | HttpBackend, sampling: dict[str, Any], system: str | None
    ):
        self.backend = backend
        self.system = system
        self._sampling = sampling
        self._messages: list[dict[str, str]] = []

    def reset(self) -> None:
        self._messages.clear()

    async def answer(self, text: str, out: Answer) -> None:
        """Stream the answer to a message. On a terminal its reasoning comes first.

        The partial text of a stopped answer stays in the conversation. A message without an
        answer is dropped.

        Raises:
          ForgeError: the request was rejected or failed.
        """
        asked = [*self._messages, {"role": "user", "content": text}]
        instructions = [{"role": "system", "content": self.system}] if self.system else []
        body = {"messages": [*instructions, *asked], **self._sampling}
        content, thinking = "", False
        try:
            async with aclosing(self.backend.events("chat", body)) as events:
                async for event in events:
                    for choice in event.get("choices") or ():
                        delta = choice.get("delta") or {}
                        thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
                        if thought and out.on_terminal:
                            out.write(thought, dim=True)
                            thinking = True
                        piece = delta.get("content") or ""
                        if piece and thinking:
                            out.write("\n\n")
                            piece, thinking = piece.lstrip("\n"), False
                        out.write(piece)
                        content += piece
        finally:
            if content or thinking:
                out.write("\n")
            if content:
                self._messages = [*asked, {"role": "assistant", "content": content}]


def _converse(runner: asyncio.Runner, chat: Chat) -> None:
    with suppress(ImportError):  # importing readline gives `input` line editing and a history
        import readline  # noqa: F401

    out = Answer()
    out.write(f"{chat.backend.model}: /help lists the commands, Ctrl-D ends the chat\n", dim=True)
    while True:
        text = None
        try:
            text = read_message()
            if not text.startswith("/"):
                if text.strip():
                    runner.run(chat.answer(text, out))
            elif not _obey(text, chat, out):
                return
        except EOFError:
            out.write("\n")
            return
        except KeyboardInterrupt:
            stopped = "\n(Ctrl-D or /quit ends the chat)\n" if text is None else "(stopped)\n"
            out.write(stopped, dim=True)
        except ForgeError as error:
            say_error(error)


def _obey(text: str, chat: Chat, out: Answer) -> bool:
    """Run a slash command. Return False if it ends the chat."""
    command, _, rest = text.strip().partition(" ")
    match command:
        case "/quit" | "/exit":
            return False
        case "/reset":
            chat.reset()
            out.write("(conversation cleared)\n", dim=True)
        case "/system":
            chat.system = rest.strip() or None
            out.write(
                "(system message set)\n" if chat.system else "(system message removed)\n", dim=True
            )
        case "/help":
            out.write(COMMANDS_HELP + "\n", dim=True)
        case _:
            out.write(f"(unknown command {command}: /help lists the commands)\n", dim=True)
    return True


def read_message() -> str:
    """Read a message: one line, lines joined by backslashes, or a block between triple quotes.

    Raises:
      EOFError: Ctrl-D.
      KeyboardInterrupt: Ctrl-C.
    """
    line = input("> ")
    if line.strip() == BLOCK:
        lines = []
        while (line := input("… ")).strip() != BLOCK:
            lines.append(line)
        return "\n".join(lines)
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input("… "))
    return "\n".join(lines)
