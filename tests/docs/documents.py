"""What the documents show: blocks of commands and code, with what the tests must know of them.

A comment of HTML right before a block, which no reader sees, says it:

    <!-- not run: REASON -->     it cannot be run here
    <!-- from: FILE -->          it stands so in a file
    <!-- before: COMMAND -->     what the reader has done before
    <!-- server: COMMAND -->     the server that it talks to
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
RUN = ("bash", "python")
COMMANDS = ("forge-jax", "make", "curl", "python", "pip", "docker", "kubectl", "git", ".venv/")

_COMMENT = re.compile(r"<!-- (not run|from|before|server): (.*?) -->")


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    line: int  # of the page, of its first line
    notes: dict[str, str] = field(default_factory=dict)


def pages() -> list[str]:
    found = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")]
    found += ROOT.glob("training/*/README.md")
    return sorted(str(page.relative_to(ROOT)) for page in found)


def blocks(page: str) -> Iterator[Block]:
    """The fenced blocks of a page, in order.

    Raises:
      ValueError: a fence without its end, or a comment that no block follows.
    """
    return blocks_of((ROOT / page).read_text())


def blocks_of(text: str) -> Iterator[Block]:
    notes: dict[str, str] = {}
    lines = enumerate(text.splitlines(), start=1)
    for number, line in lines:
        if noted := _COMMENT.fullmatch(line.strip()):
            notes[noted[1]] = noted[2]
        elif line.lstrip().startswith("```"):
            indent = len(line) - len(line.lstrip())
            inside = []
            for _, each in lines:
                if each.strip() == "```":
                    break
                inside.append(each[indent:])
            else:
                raise ValueError(f"line {number}: the block has no end")
            yield Block(line.strip("` "), "\n".join(inside), number + 1, notes)
            notes = {}
        elif notes and line.strip():
            raise ValueError(f"line {number}: no block follows the comment")


def hidden_commands(text: str) -> list[str]:
    """Commands in indented blocks, which look like those in fences, but nobody runs them."""
    found, fenced, before = [], False, ""
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        begins = not before.strip() and line.startswith("    ")
        if not fenced and begins and line.strip().startswith(COMMANDS):
            found.append(line.strip())
        before = line
    return found


def commands(text: str) -> list[str]:
    """A block's commands: lines, with those that they go on in, and the texts they are given."""
    found: list[str] = []
    lines = iter(text.splitlines())
    for line in lines:
        if not line.strip():
            continue
        whole = line
        while whole.endswith("\\") or _quotes_open(whole):
            whole += "\n" + next(lines)
        if end := re.search(r"<<'?(\w+)'?", whole):
            for each in lines:
                whole += "\n" + each
                if each == end[1]:
                    break
        found.append(whole)
    return found


def _quotes_open(text: str) -> bool:
    return text.count("'") % 2 == 1 and "<<'" not in text
