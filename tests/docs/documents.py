"""Commands and code in the documents, with annotations for the tests.

An HTML comment right before a block is invisible to readers and annotates it:

    <!-- not run: REASON -->     cannot run here
    <!-- from: FILE -->          occurs verbatim in a file
    <!-- before: COMMAND -->     command that the reader ran before
    <!-- server: COMMAND -->     server that it uses
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
    line: int  # number of its first line in the page
    notes: dict[str, str] = field(default_factory=dict)


def pages() -> list[str]:
    found = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")]
    found += ROOT.glob("training/*/README.md")
    names = sorted(str(page.relative_to(ROOT)) for page in found)
    return [name for name in names if not name.startswith(".")]  # such as .pytest_cache


def blocks(page: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page, in order.

    Raises:
      ValueError: A fence has no end, or a comment is not followed by a block.
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
    """Return commands in indented blocks, which look like fenced ones but are never run."""
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
    """Return a block's commands, with continuation lines and here-documents."""
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
