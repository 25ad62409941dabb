"""The chat of a user at a terminal: reads messages and commands, and shows answers."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_jax.config.suggest import did_you_mean
from forge_jax.errors import ConfigError, ForgeError, RequestError
from forge_serve.cli.chat.prompt import (
    early_end,
    message_of,
    new_prompt,
    no_history,
    open_history,
)
from forge_serve.cli.commands.sampling import SamplingFlags, with_word
from forge_serve.cli.exit_status import say_error
from forge_serve.cli.terminal import Answer

if TYPE_CHECKING:
    from forge_serve.cli.chat.conversation import Answered, Conversation, Output

MARKDOWN = "markdown"  # the only setting that is not of sampling
KEYS_HELP = '''\
Enter            send the message; a pasted text is one message, with all its lines
Alt-Enter        begin a new line, as does Enter after \\ or between triple quotes (""")
Up, Ctrl-R       earlier messages, and search in them
Tab              complete a command
Ctrl-X Ctrl-E    edit the message in $EDITOR
Ctrl-C           stop the answer. Its text so far stays in the conversation
//TEXT           send /TEXT, which is not a command'''


class Session:
    """A chat at a terminal.

    Args:
      runner: runs the answers.
      conversation: the conversation.
      output: returns a new output for one answer; the argument is False for plain text.
      markdown: True to show answers as Markdown.
      history: True to keep messages in a file for later chats.
    """

    def __init__(
        self,
        runner: asyncio.Runner,
        conversation: Conversation,
        output: Callable[[bool], Output],
        *,
        markdown: bool,
        history: bool,
    ):
        self._runner = runner
        self._conversation = conversation
        self._output = output
        self._markdown = markdown
        self._terminal = Answer()
        self._prompt = new_prompt(
            self._history() if history else no_history(),
            [command.name for command in COMMANDS],
            words={"/set": self._setting_names()},
            files=("/save", "/load"),
        )

    def run(self) -> None:
        """Read and answer messages until the user ends the chat."""
        model = self._conversation.backend.model
        self._note(f"{model}: /help lists the commands, Ctrl-D ends the chat")
        with early_end():
            self._read_and_answer()

    def _read_and_answer(self) -> None:
        while True:
            text = None
            try:
                text = self._prompt.prompt()
                self._handle(text)
            except EOFError:
                return
            except KeyboardInterrupt:
                self._note("(Ctrl-D or /exit ends the chat)" if text is None else "(stopped)")
            except ForgeError as error:
                say_error(error)

    def _handle(self, text: str) -> None:
        """Answer a message or run a command.

        Raises:
          EOFError: the command ends the chat.
          ForgeError: the command or the request is invalid, or the request failed.
        """
        text = message_of(text)
        if text.startswith("//"):
            text = text[1:]
        elif text.startswith("/"):
            name, _, argument = text.strip().partition(" ")
            _command(name).run(self, argument.strip())
            return
        if text.strip():
            self._show(lambda out: self._conversation.answer(text, out))

    def _show(self, answer: Callable[[Output], Coroutine[Any, Any, Answered]]) -> None:
        answered = self._runner.run(answer(self._output(self._markdown)))
        self._note(f"({answered})")

    def _note(self, text: str) -> None:
        self._terminal.write(text + "\n", dim=True)

    def _history(self) -> Any:
        try:
            return open_history()
        except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
            self._note(f"(messages are not kept for later chats: {error})")
            return no_history()

    def _setting_names(self) -> list[str]:
        return [*(field.name for field in dataclasses.fields(SamplingFlags)), MARKDOWN]

    def help(self, _: str) -> None:
        width = max(len(command.usage) for command in COMMANDS)
        lines = [f"{command.usage:{width}}  {command.doc}" for command in COMMANDS]
        self._note("\n".join([*lines, "", KEYS_HELP]))

    def clear(self, _: str) -> None:
        self._conversation.clear()
        self._note("(conversation cleared)")

    def regenerate(self, _: str) -> None:
        self._show(self._conversation.regenerate)

    def system(self, text: str) -> None:
        self._conversation.system = text or None
        self._note("(system message set)" if text else "(system message removed)")

    def set(self, argument: str) -> None:
        name, _, word = argument.partition(" ")
        if not name:
            self._show_settings()
            return
        if not word.strip():
            raise RequestError(f"/set {name} needs a value, or auto for the default")
        if name == MARKDOWN:
            if word not in ("on", "off"):
                raise RequestError(f"markdown must be on or off, not {word!r}")
            self._markdown = word == "on"
        else:
            settings = with_word(self._conversation.settings, name, word.strip())
            self._conversation.settings = settings
        self._note(f"({name} is {word.strip()})")

    def _show_settings(self) -> None:
        settings = self._conversation.settings
        width = max(map(len, self._setting_names()))
        for name in self._setting_names():
            value = getattr(settings, name, None)
            if name == MARKDOWN:
                value = "on" if self._markdown else "off"
            elif value in (None, ()):
                value = "auto"
            elif isinstance(value, tuple):
                value = ", ".join(map(repr, value))
            self._note(f"{name:{width}}  {value}")

    def save(self, name: str) -> None:
        file = _path("/save", name)
        self._conversation.save(file)
        self._note(f"(saved in {file})")

    def load(self, name: str) -> None:
        file = _path("/load", name)
        self._conversation.load(file)
        count = len(self._conversation.messages)
        self._note(f"({count} message{'s' * (count != 1)} loaded from {file})")


@dataclass(frozen=True)
class Command:
    """A command of the chat; `run` takes the text after its name."""

    name: str
    argument: str
    doc: str
    run: Callable[[Session, str], None]

    @property
    def usage(self) -> str:
        return f"{self.name} {self.argument}".rstrip()


def _end(session: Session, argument: str) -> None:
    raise EOFError


COMMANDS = (
    Command("/help", "", "show this text", Session.help),
    Command("/clear", "", "clear the conversation and keep the system message", Session.clear),
    Command("/regen", "", "generate the last answer again", Session.regenerate),
    Command("/system", "TEXT", "set the system message; without TEXT, remove it", Session.system),
    Command("/set", "NAME VALUE", "set temperature, seed, …; alone, show all values", Session.set),
    Command("/save", "FILE", "write the conversation and its settings to a file", Session.save),
    Command("/load", "FILE", "continue a saved conversation", Session.load),
    Command("/exit", "", "end the chat, as does Ctrl-D", _end),
)


def _command(name: str) -> Command:
    for command in COMMANDS:
        if command.name == name:
            return command
    raise ConfigError(
        f"unknown command {name}{did_you_mean(name, [each.name for each in COMMANDS])} "
        f"(see: /help; to send it as a message, type /{name})"
    )


def _path(command: str, name: str) -> Path:
    if not name:
        raise RequestError(f"{command} needs a file: {command} chat.json")
    return Path(name).expanduser()
