"""A conversation with a model: messages, sampling settings, and files that keep both."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from forge_jax.errors import ConfigError, RequestError
from forge_serve.cli.commands.sampling import SamplingFlags, with_value

if TYPE_CHECKING:
    from forge_serve.cli.backends import Backend

MIN_RATED_TOKENS = 8  # the rate of a shorter answer depends on how its text is split into events
ROLES = ("system", "user", "assistant")


class Output(AbstractContextManager[None], Protocol):
    """Sink of one answer, which arrives piece by piece. Leaving its context completes it."""

    def thought(self, piece: str) -> None: ...
    def text(self, piece: str) -> None: ...


class Answered:
    """Figures of an answer, which `str` returns as one line."""

    def __init__(self) -> None:
        self._begin_s = time.monotonic()
        self._first_s: float | None = None  # when the first text arrived
        self._end_s = self._begin_s
        self._tokens: int | None = None  # generated tokens
        self._finish_reason: str | None = None

    def add(self, event: dict[str, Any]) -> tuple[str, str]:
        """Take the figures of an event; return its reasoning and its text."""
        self._end_s = time.monotonic()
        thought = piece = ""
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            thought += delta.get("reasoning_content") or delta.get("reasoning") or ""
            piece += delta.get("content") or ""
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
        if self._first_s is None and (thought or piece):
            self._first_s = self._end_s
        self._tokens = (event.get("usage") or {}).get("completion_tokens", self._tokens)
        return thought, piece

    def __str__(self) -> str:
        parts = []
        if self._tokens is not None:
            parts.append(f"{self._tokens} token{'s' * (self._tokens != 1)}")
        if self._first_s is not None:
            if self._tokens is not None and self._tokens >= MIN_RATED_TOKENS:
                rate = (self._tokens - 1) / max(self._end_s - self._first_s, 1e-3)
                parts.append(f"{rate:,.0f} tokens/s" if rate >= 10 else f"{rate:.1f} tokens/s")
            parts.append(f"first token after {self._first_s - self._begin_s:.2f} s")
        if self._finish_reason == "length":
            parts.append("length limit reached")
        return ", ".join(parts) or "no text"


class Conversation:
    """Messages so far, the settings, and the backend that answers the next message.

    Attributes:
      system: the system message, or None.
      settings: the sampling settings of the next answers.
      messages: alternating messages of user and assistant in OpenAI's format.
    """

    def __init__(self, backend: Backend, settings: SamplingFlags, system: str | None):
        self.backend = backend
        self.settings = settings
        self.system = system
        self.messages: list[dict[str, str]] = []

    def clear(self) -> None:
        """Remove all messages except the system message."""
        self.messages = []

    async def answer(self, text: str, out: Output) -> Answered:
        """Stream the answer to a message.

        The partial text of a stopped answer stays in the conversation. A message without an
        answer is dropped.

        Raises:
          ForgeError: the request was rejected or failed.
        """
        return await self._answer([*self.messages, {"role": "user", "content": text}], out)

    async def regenerate(self, out: Output) -> Answered:
        """Stream another answer to the last message, which replaces the previous one.

        Raises:
          ForgeError: there is no message, or the request was rejected or failed.
        """
        asked = list(self.messages)
        if asked and asked[-1]["role"] == "assistant":
            asked.pop()
        if not asked:
            raise RequestError("there is no message to answer: send one first")
        return await self._answer(asked, out)

    async def _answer(self, asked: list[dict[str, str]], out: Output) -> Answered:
        body = {"messages": [*self._instructions(), *asked], **self.settings.body()}
        answered = Answered()
        content = ""
        try:
            with out:
                async with aclosing(self.backend.events("chat", body)) as events:
                    async for event in events:
                        thought, piece = answered.add(event)
                        out.thought(thought)
                        out.text(piece)
                        content += piece
        finally:
            if content:
                self.messages = [*asked, {"role": "assistant", "content": content}]
        return answered

    def _instructions(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self.system}] if self.system else []

    def save(self, file: Path) -> None:
        """Write messages and settings, as the body of a request to `/v1/chat/completions`.

        Raises:
          RequestError: the file cannot be written, or exists and is not a saved conversation.
        """
        if file.exists():
            try:
                _read(file)
            except RequestError as error:
                raise RequestError(
                    f"{file} exists and is not a saved conversation: choose another name"
                ) from error
        body = {
            "model": self.backend.model,
            "messages": [*self._instructions(), *self.messages],
            **self.settings.body(),
        }
        text = msgspec.json.format(msgspec.json.encode(body), indent=2) + b"\n"
        try:
            file.write_bytes(text)
        except OSError as error:
            raise RequestError(f"cannot write {file}: {error.strerror}") from error

    def load(self, file: Path) -> None:
        """Replace messages and settings by those of a saved conversation.

        Raises:
          RequestError: the file cannot be read or is not a saved conversation.
        """
        messages, self.settings = _read(file)
        begins_with_system = bool(messages) and messages[0]["role"] == "system"
        self.system = messages[0]["content"] if begins_with_system else None
        self.messages = messages[begins_with_system:]


def _read(file: Path) -> tuple[list[dict[str, str]], SamplingFlags]:
    """Return the messages and the settings of a saved conversation.

    Raises:
      RequestError: the file cannot be read or is not a saved conversation.
    """
    try:
        body = msgspec.json.decode(file.read_bytes())
    except OSError as error:
        raise RequestError(f"cannot read {file}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise RequestError(f"{file} is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError(f"{file} must have a JSON object, not {type(body).__name__}")
    body.pop("model", None)
    messages = body.pop("messages", None)
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise RequestError(
            f"{file}: messages must be a list of objects with role ({', '.join(ROLES)}) and "
            "content, both strings"
        )
    settings = SamplingFlags()
    for name, value in body.items():
        try:
            settings = with_value(settings, name, value)
        except ConfigError as error:
            raise RequestError(f"{file}: {error}") from error
    return messages, settings


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"role", "content"}
        and value["role"] in ROLES
        and isinstance(value["content"], str)
    )
