"""Prompt of the chat: line editing, several lines, history and completion, by prompt_toolkit."""

from __future__ import annotations

import os
import sys
import termios
import tty
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import (
    CompleteEvent,
    Completer,
    Completion,
    PathCompleter,
    WordCompleter,
)
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.shortcuts import CompleteStyle

BLOCK = '"""'
HISTORY_BYTES = 1 << 20  # when the file is larger, the older half is dropped


def new_prompt(
    history: History,
    commands: Sequence[str],
    *,
    words: Mapping[str, Sequence[str]],
    files: Sequence[str],
) -> PromptSession[str]:
    """Return the prompt. Its `prompt` method returns a message as it was typed or pasted.

    Args:
      history: the earlier messages.
      commands: names to complete at the beginning of a message.
      words: arguments to complete, by command.
      files: commands whose argument is a path.
    """
    arguments: dict[str, Completer] = {
        **{name: WordCompleter(words[name]) for name in words},
        **{name: PathCompleter(expanduser=True) for name in files},
    }
    return PromptSession(
        "> ",
        multiline=True,
        prompt_continuation="… ",
        key_bindings=_key_bindings(),
        history=history,
        completer=_Commands(commands, arguments),
        complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,
        enable_open_in_editor=True,
    )


def message_of(text: str) -> str:
    """Return the message that was typed: without triple quotes around it."""
    stripped = text.strip()
    if stripped.startswith(BLOCK) and _is_complete(text):
        return stripped.removeprefix(BLOCK).removesuffix(BLOCK).strip("\n")
    return text


def open_history() -> History:
    """Return the history of earlier chats, which only this user can read.

    It is in `$XDG_STATE_HOME/forge-jax/chat_history`, and `~/.local/state` is the default of
    XDG_STATE_HOME.

    Raises:
      OSError: the file cannot be written.
    """
    base = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    file = base / "forge-jax" / "chat_history"
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "r+b") as opened:
        os.fchmod(descriptor, 0o600)
        if os.fstat(descriptor).st_size > HISTORY_BYTES:
            kept = opened.read()[-HISTORY_BYTES // 2 :]
            kept = kept[kept.find(b"\n# ") :]  # an entry begins with the comment of its time
            opened.seek(0)
            opened.write(kept)
            opened.truncate()
    return FileHistory(file)


def no_history() -> History:
    """Return a history of this chat alone."""
    return InMemoryHistory()


@contextmanager
def early_end() -> Iterator[None]:
    """Let the next prompt read a Ctrl-D that is typed while an answer is shown.

    Between prompts, the terminal reads lines and turns Ctrl-D into an end of file. The prompt reads
    single keys, and would read this end of file as NUL.
    """
    before = termios.tcgetattr(sys.stdin)
    changed = termios.tcgetattr(sys.stdin)
    no_character = bytes([os.fpathconf(sys.stdin.fileno(), "PC_VDISABLE")])
    changed[tty.CC][termios.VEOF] = no_character
    termios.tcsetattr(sys.stdin, termios.TCSANOW, changed)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


def _is_complete(text: str) -> bool:
    """Return True if Enter sends the text, False if it begins another line."""
    stripped = text.strip()
    if stripped.startswith(BLOCK):
        return len(stripped) >= 2 * len(BLOCK) and stripped.endswith(BLOCK)
    return not text.endswith("\\")


def _key_bindings() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if _is_complete(buffer.text):
            buffer.validate_and_handle()
            return
        if buffer.text.endswith("\\"):
            buffer.text = buffer.text[:-1]
        buffer.cursor_position = len(buffer.text)
        buffer.insert_text("\n")

    @bindings.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings


class _Commands(Completer):
    """Completion of commands and of their arguments."""

    def __init__(self, commands: Sequence[str], arguments: Mapping[str, Completer]):
        self._commands = commands
        self._arguments = arguments

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterator[Completion]:
        before = document.text_before_cursor
        command, space, argument = before.partition(" ")
        if space and command in self._arguments:
            completer = self._arguments[command]
            yield from completer.get_completions(Document(argument), complete_event)
        elif before.startswith("/"):
            for name in self._commands:
                if name.startswith(before):
                    yield Completion(name, start_position=-len(before))
