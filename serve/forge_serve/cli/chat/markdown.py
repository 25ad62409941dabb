"""Markdown on a terminal while it is being generated.

Completed blocks are printed once. The last block is drawn again with each update, because its
next characters can change how it looks.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import termios
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import ClassVar, cast

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, ConsoleRenderable, Group, RenderResult
from rich.live import Live
from rich.markdown import CodeBlock, Heading, Markdown, MarkdownElement
from rich.segment import Segment
from rich.syntax import Syntax
from rich.text import Text

from forge_jax.host import supervise
from forge_serve.cli.terminal import harmless, replace_unencodable

REFRESH_S = 0.08  # shortest interval between two updates
DRAWING_SHARE = 0.1  # share of the time, at most; a long block is updated less often

# Raw HTML stays text: Rich would drop it.
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])


class _Heading(Heading):
    LEVEL_ALIGN: ClassVar = dict.fromkeys(Heading.LEVEL_ALIGN, "left")


class _CodeBlock(CodeBlock):
    """Code in the terminal's own colors and without margins, so that it can be copied."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Syntax(
            str(self.text).rstrip(),
            self.lexer_name,
            theme="ansi_dark",
            background_color="default",
            word_wrap=True,
        )


class _Block(Markdown):
    """One block of Markdown. A line break in a paragraph stays a line break.

    Links show their addresses, because the text of a link could name another site.
    """

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "heading_open": _Heading,
        "fence": _CodeBlock,
        "code_block": _CodeBlock,
    }

    def __init__(self, markup: str):
        super().__init__("", hyperlinks=False)
        self.parsed = _PARSER.parse(markup)
        for token in self.parsed:
            for child in token.children or ():
                if child.type == "softbreak":
                    child.type = "hardbreak"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rendered = super().__rich_console__(console, options)
        lines = list(Segment.split_lines(cast("Iterable[Segment]", rendered)))
        filled = [i for i, line in enumerate(lines) if any(each.text.strip() for each in line)]
        for line in lines[filled[0] : filled[-1] + 1] if filled else ():
            yield from line
            yield Segment.line()


def markdown_blocks(text: str) -> tuple[list[str], str]:
    """Return the completed blocks of a beginning of a text, and the rest, which may still change.

    A block is complete when another one has begun after it.
    """
    starts = [token.map[0] for token in _PARSER.parse(text) if token.level == 0 and token.map]
    bounds = [0, *starts[1:]]
    lines = text.split("\n")
    return (
        ["\n".join(lines[a:b]).rstrip() for a, b in itertools.pairwise(bounds)],
        "\n".join(lines[bounds[-1] :]),
    )


def lines_of(text: str) -> tuple[list[str], str]:
    """Return the completed lines of a beginning of a text, and the rest."""
    *lines, rest = text.split("\n")
    return lines, rest


@dataclass(frozen=True)
class _Kind:
    """Kind of text: how it is split into parts, how a part is rendered, and the space after it."""

    split: Callable[[str], tuple[list[str], str]]
    render: Callable[[str], ConsoleRenderable]
    spaced: bool  # a blank line separates its parts


_MARKDOWN = _Kind(markdown_blocks, _Block, spaced=True)
_PLAIN = _Kind(lines_of, Text, spaced=False)
_THOUGHT = _Kind(lines_of, lambda text: Text(text, style="dim"), spaced=False)


class _Harmless:
    """Rendered content without control characters, which entities of Markdown can contain.

    Args:
      content: the content.
      max_lines: show only the last lines; None: all.
    """

    def __init__(self, content: ConsoleRenderable, max_lines: int | None = None):
        self._content = content
        self._max_lines = max_lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._content, options.update(height=None), pad=False)
        if self._max_lines is not None:
            lines = lines[-self._max_lines :]
        for line in lines:
            yield from (Segment(harmless(each.text), each.style) for each in line)
            yield Segment.line()


class Screen:
    """Output of one answer on a terminal: reasoning is dim text, and the answer is Markdown.

    It is a context manager. Call its methods from a running event loop.

    Args:
      markdown: False to show the answer as plain text.
    """

    def __init__(self, *, markdown: bool):
        replace_unencodable(sys.stdout)
        self._console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
        self._answer = _MARKDOWN if markdown else _PLAIN
        self._kind: _Kind | None = None  # kind of the rest
        self._rest = ""  # text that is not printed yet
        self._gap = False  # a blank line precedes the next part
        self._timer: asyncio.TimerHandle | None = None
        self._drawing_s = 0.0  # duration of the last update
        self._live = Live(
            Text("…", style="dim"),
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._open = ExitStack()

    def __enter__(self) -> None:
        self._open.enter_context(_no_echo())
        self._open.enter_context(self._live)

    def __exit__(self, *_: object) -> None:
        with self._open:
            self._print_rest()
            self._live.update(Text(""))

    def thought(self, piece: str) -> None:
        self._write(piece, _THOUGHT)

    def text(self, piece: str) -> None:
        self._write(piece, self._answer)

    def _write(self, piece: str, kind: _Kind) -> None:
        if kind is not self._kind:
            piece = piece.lstrip("\n")
            if not piece:
                return
            self._print_rest()
            self._gap = self._kind is not None
            self._kind = kind
        self._rest += harmless(piece)
        if self._timer is None:
            delay_s = max(REFRESH_S, self._drawing_s / DRAWING_SHARE)
            self._timer = asyncio.get_running_loop().call_later(
                delay_s, supervise.guarded(self._draw, "drawing the answer", None)
            )

    def _draw(self) -> None:
        """Print the completed parts, and draw the last one."""
        assert self._kind is not None
        self._timer = None
        begin_s = time.perf_counter()
        parts, self._rest = self._kind.split(self._rest)
        done = self._rendered(parts)
        gap = self._gap
        last = self._rendered([self._rest])
        self._gap = gap
        with self._console:  # one write to the terminal
            self._console.print(_Harmless(Group(*done)))
            self._live.update(_Harmless(Group(*last), self._console.height - 1), refresh=True)
        self._drawing_s = time.perf_counter() - begin_s

    def _print_rest(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._kind is not None:
            parts, rest = self._kind.split(self._rest)
            self._rest = ""
            content = self._rendered([*parts, rest] if rest else parts)
            with self._console:
                self._console.print(_Harmless(Group(*content)))
                self._live.update(Text(""), refresh=True)

    def _rendered(self, parts: list[str]) -> list[ConsoleRenderable]:
        """Render parts of the current kind, with blank lines between them."""
        assert self._kind is not None
        content: list[ConsoleRenderable] = []
        for part in parts:
            if self._kind.spaced and not part.strip():
                continue
            if self._gap:
                content.append(Text(""))
            content.append(self._kind.render(part))
            self._gap = self._kind.spaced
        return content


@contextmanager
def _no_echo() -> Iterator[None]:
    """Hide typed characters, which would disturb the screen. Ctrl-C still interrupts."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    quiet = [*before]
    quiet[3] &= ~termios.ECHO
    termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)
