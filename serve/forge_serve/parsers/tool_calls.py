"""Tool calls in a text that arrives in pieces: the part that all model families share.

A family's syntax is a `ToolCallFormat`: the markers that open a call, and a reader for the text
after them. This module handles text around calls, partial markers and malformed calls.
"""

from __future__ import annotations

import logging
import random
import string
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import ClassVar

from forge_serve.parsers.markers import begun_at_end, find_first
from forge_serve.parsers.parts import Parts
from forge_serve.parsers.reading import Malformed, Read, short_string, space, value

log = logging.getLogger(__name__)

MAX_HELD_CHARS = 64 * 1024  # limit on withheld text that may become a call

_ids = random.Random()


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The literal texts of a format: `marker first call (between call)* last`.

    Each call is `begin(name)`, its arguments and `end`. Calls without a marker, and free text
    around calls with one, are possible unless `final` opens every answer without calls.
    """

    begin: Callable[[str], str]
    end: str = ""
    marker: str = ""
    first: str = ""
    between: str = ""
    last: str = ""
    preamble: tuple[str, str] = ("", "")  # around free text before the calls
    final: str = ""


class ToolCallFormat:
    """A model family's tool call format."""

    name: ClassVar[str]  # value of --tool-call-parser
    markers: ClassVar[tuple[str, ...]] = ()  # open a call anywhere
    bare: ClassVar[str] = ""  # characters that open a call at the start
    syntax_tokens: ClassVar[tuple[str, ...]] = ()  # other possible special tokens

    def read(self, calls: CallSink) -> Read[None]:
        """Read the text after a marker, or from a `bare` character.

        The reader returns after the last call. At the end of the text, closing syntax may be
        missing.

        Raises:
          Malformed: at the first invalid character.
        """
        raise NotImplementedError

    @property
    def markup(self) -> tuple[str, ...]:
        """The texts that may be special tokens."""
        return (*self.markers, *self.syntax_tokens)

    def written(self, special_tokens: Collection[str]) -> Written | None:
        """Return the texts for a grammar that enforces calls; None: no grammar can express it."""
        return None

    def new_id(self) -> str:
        return f"call_{_ids.getrandbits(96):024x}"


class CallSink:
    """The receiver of a reader's calls, one at a time from `begin` to `end`."""

    def check(self, name: str) -> None:
        """Raise `Malformed` if text that looks like a call of this function is most likely none."""
        raise NotImplementedError

    def begin(self, name: str) -> None:
        raise NotImplementedError

    def arguments(self, piece: str) -> None:
        """Take a piece of the arguments' JSON object."""
        raise NotImplementedError

    def end(self) -> None:
        raise NotImplementedError


class ToolCallParser(CallSink):
    """Splits a text into content and calls. `push` it piece by piece, then `finish`.

    A call is emitted as it arrives, from the beginning of its arguments. A malformed call becomes
    content, except for the part that has been emitted. If `whole` is True, a call is emitted only
    at its end, so all of a malformed call becomes content.

    If the text ends inside a call's arguments, the call is emitted with the arguments so far, even
    if `whole` is True. It does not count as complete. An incomplete constant or escape sequence at
    the end is dropped. If the text ends before the arguments, the call is content.

    Whitespace between and after calls is dropped, and so is whitespace before a call that begins
    the text.

    Args:
      functions: the names of the request's tools. A call without a marker must name one of them.
      whole: True if calls must be emitted whole.
      parallel: False drops all calls but the first.
    """

    def __init__(
        self, form: ToolCallFormat, functions: frozenset[str], *, whole: bool, parallel: bool = True
    ):
        self.num_calls = 0  # complete calls
        self._form = form
        self._markers = form.markers
        self._functions = functions
        self._whole = whole
        self._parallel = parallel
        self._parts = Parts()
        self._marker_part = ""
        self._blank: list[str] = []  # whitespace, dropped if a call follows
        self._said = False  # content since the start or the last call
        self._bare = True  # a call without a marker may begin here
        self._bare_call = False
        self._reader: Read[None] | None = None
        self._raw: list[str] = []  # consumed by the reader, but not emitted
        self._num_raw = 0
        self._handed_on = False  # the current character has emitted something
        self._open = False  # between `begin` and `end`
        self._call = Parts()  # the open call, while it is withheld
        self._index = 0  # index of the open or the next call

    def push(self, text: str, parts: Parts) -> None:
        self._parts = parts
        while text:
            text = self._content(text) if self._reader is None else self._read(text)

    @property
    def reads(self) -> bool:
        """True within a call."""
        return self._reader is not None

    def end_call(self, parts: Parts) -> None:
        """End the call that is being read, if any, as at the end of the text."""
        self._parts = parts
        reader, self._reader = self._reader, None
        if reader is not None and not self._at_end(reader):
            if self._open:
                self._cut_off()
            elif self._dropping:
                self._raw.clear()
            else:
                self._give_up("")

    def finish(self, parts: Parts) -> None:
        self.end_call(parts)
        held, self._marker_part = self._marker_part, ""
        self._say(held)
        if not self.num_calls:
            parts.content += self._blank
        self._blank = []

    # ---- content -------------------------------------------------------------------------------

    def _content(self, text: str) -> str:
        """Read content up to a possible call, and return the text from there."""
        text, self._marker_part = self._marker_part + text, ""
        if not self._said:
            text = self._without_blank(text)
            if self._bare and text and text[0] in self._form.bare:
                self._begin_reading("", bare=True)
                return text
        at, marker = find_first(text, self._markers)
        if marker:
            self._say(text[:at])
            self._begin_reading(marker, bare=False)
            return text[at + len(marker) :]
        at = len(text) - begun_at_end(text, self._markers)
        self._say(text[:at])
        self._marker_part = text[at:]
        return ""

    def _say(self, text: str) -> None:
        if not self._said:
            text = self._without_blank(text)
        if text:
            self._parts.content += [*self._blank, text]
            self._blank = []
            self._said, self._bare = True, False

    def _without_blank(self, text: str) -> str:
        rest = text.lstrip()
        if len(rest) < len(text):
            self._blank.append(text[: len(text) - len(rest)])
        return rest

    # ---- calls ---------------------------------------------------------------------------------

    def _begin_reading(self, marker: str, *, bare: bool) -> None:
        self._bare, self._bare_call = False, bare
        self._raw, self._num_raw = [marker], len(marker)
        self._reader = self._form.read(self)
        next(self._reader)

    def _read(self, text: str) -> str:
        """Read one or several calls, and return the text after them."""
        assert self._reader is not None
        begin, send = 0, self._reader.send
        for n, c in enumerate(text):
            self._num_raw += 1
            try:
                if self._num_raw > MAX_HELD_CHARS and not self._open:
                    raise Malformed
                send(c)
            except StopIteration:
                self._reader = None
                return text[n + 1 :]
            except Exception as error:
                if not isinstance(error, Malformed):
                    self._fail(error)
                if self._handed_on:  # everything before this character has been emitted
                    self._raw.clear()
                    begin = n
                self._give_up(text[begin:n])
                return text[n:]
            if self._handed_on:
                self._handed_on, self._num_raw = False, 0
                self._raw.clear()
                begin = n + 1
        self._raw.append(text[begin:])
        return ""

    def _at_end(self, reader: Read[None]) -> bool:
        """Return True if the reader accepts the end of the text as the end of its calls."""
        try:
            reader.send("")
        except StopIteration:
            return True
        except Malformed:
            return False
        except Exception as error:
            self._fail(error)
        return False

    def _cut_off(self) -> None:
        """Emit a call whose arguments the end of the text has cut off."""
        if self._whole and not self._dropping:
            self._parts.add(self._call)
        self._raw.clear()
        self._open, self._handed_on, self._said = False, False, False
        self._call, self._blank = Parts(), []
        self._index += 1

    def _give_up(self, last: str) -> None:
        """Turn the text that has not been emitted, and `last`, into content."""
        text = "".join([*self._raw, last])
        self._reader, self._handed_on = None, False
        self._raw.clear()
        if self._open:
            self._open = False
            self._call = Parts()
            if not self._holds_back:
                self._index += 1
        self._said = self._said or bool(text.strip())
        self._parts.content += [*self._blank, text] if self._said else []
        self._blank = [] if self._said else [*self._blank, text]

    def _fail(self, error: Exception) -> None:
        """Log a defect of the reader, and stop looking for calls in this answer."""
        self._markers = ()
        place = traceback.extract_tb(error.__traceback__)[-1]
        log.error(
            "the parser %s raised %s in %s, line %s: the text is delivered as content",
            self._form.name, type(error).__name__, place.name, place.lineno,
        )  # fmt: skip

    # ---- called by readers ---------------------------------------------------------------------

    @property
    def _holds_back(self) -> bool:
        return self._whole or self._dropping

    @property
    def _dropping(self) -> bool:
        return not self._parallel and self._index > 0

    def check(self, name: str) -> None:
        if not name or (self._bare_call and name not in self._functions):
            raise Malformed

    def begin(self, name: str) -> None:
        assert not self._open, "a call begins inside another"
        self._open = True
        self._call = Parts()
        piece = self._out.call(self._index)
        piece.id, piece.name = self._form.new_id(), name
        if not self._holds_back:
            self._handed_on, self._blank = True, []

    def arguments(self, piece: str) -> None:
        self._out.call(self._index).arguments.append(piece)
        self._handed_on = self._handed_on or not self._holds_back

    def end(self) -> None:
        if self._whole and not self._dropping:
            self._parts.add(self._call)
        self._open, self._said = False, False
        self._call, self._blank = Parts(), []
        self._index += 1
        self.num_calls += 1
        self._handed_on = True

    @property
    def _out(self) -> Parts:
        return self._call if self._holds_back else self._parts


def json_call(
    c: str, calls: CallSink, argument_keys: tuple[str, ...], *, strict: bool
) -> Read[None]:
    """Read `{"name": "f", "arguments": {...}}` with the keys in any order.

    Args:
      strict: True if the only other keys allowed are "type" and "id".
    """
    if c != "{":
        raise Malformed
    name: str | None = None
    early: list[str] = []  # arguments that precede the name
    have_arguments = False
    c = yield from space((yield))
    while True:
        key = yield from short_string(c)
        c = yield from space((yield))
        if c != ":":
            raise Malformed
        c = yield from space((yield))
        after: str | None = None
        if key == "name":
            if name is not None:
                raise Malformed
            name = yield from short_string(c)
            calls.check(name)
            if have_arguments:
                calls.begin(name)
                calls.arguments("".join(early))
        elif key in argument_keys:
            if have_arguments or c != "{":
                raise Malformed
            have_arguments = True
            if name is not None:
                calls.begin(name)
            yield from value(c, early.append if name is None else calls.arguments)
        elif strict and key not in ("type", "id"):
            raise Malformed
        else:
            after = yield from value(c, lambda text: None)
        c = yield from space((yield) if after is None else after)
        if c == "}":
            break
        if c != ",":
            raise Malformed
        c = yield from space((yield))
    if not have_arguments or name is None:
        raise Malformed
    calls.end()


def call_begin(name: str, argument_key: str) -> str:
    """Return the beginning of a call for `json_call`, up to the arguments."""
    return f'{{"name": "{name}", "{argument_key}": '


def short_id(length: int = 9) -> str:
    """Return a random id of letters and digits."""
    return "".join(_ids.choices(string.ascii_letters + string.digits, k=length))
