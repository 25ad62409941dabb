"""A training document, and the two small tools that every part of the corpus uses."""

import random
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_TEXTS = Path(__file__).parent / "texts"
_INNERMOST_CHOICE = re.compile(r"\[([^\[\]]*)\]")


@dataclass(frozen=True)
class Document:
    """A chat (system, user and assistant turns), or a raw text, whose one role is "text"."""

    turns: tuple[tuple[str, str], ...]  # (role, content)


def text(content: str) -> Document:
    return Document((("text", content),))


def chat(prompt: str, answer: str) -> Document:
    return Document((("user", prompt), ("assistant", answer)))


def with_system(system: str, document: Document) -> Document:
    return Document((("system", system), *document.turns))


def expand(rng: random.Random, template: str, **slots: object) -> str:
    """Replace each [one|of|these], innermost first, then each {slot}."""
    count = 1
    while count:
        template, count = _INNERMOST_CHOICE.subn(
            lambda choice: rng.choice(choice.group(1).split("|")), template
        )
    return template.format(**slots)


@cache
def blocks(name: str) -> tuple[tuple[str, ...], ...]:
    """Return the blocks of lines of `texts/<name>.txt`, separated by empty lines."""
    content = (_TEXTS / f"{name}.txt").read_text(encoding="utf-8").strip()
    return tuple(tuple(block.splitlines()) for block in content.split("\n\n"))


@cache
def questions_and_answers(name: str) -> tuple[tuple[tuple[str, ...], str], ...]:
    """Return blocks of questions, one per line, with the answer from the last line, after "= "."""
    return tuple(
        (tuple(questions), answer.removeprefix("= ").replace("\\n", "\n"))
        for *questions, answer in blocks(name)
    )


def article(noun: str) -> str:
    return f"an {noun}" if noun[0].lower() in "aeiou" else f"a {noun}"


_PLURALS = {"mouse": "mice", "sheep": "sheep", "wolf": "wolves", "goose": "geese", "fox": "foxes"}


def plural(noun: str) -> str:
    return _PLURALS.get(noun, f"{noun}s")


def capitalize(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def careless(rng: random.Random, prompt: str) -> str:
    """Return the prompt as people type it: lower case, no final mark, a typo, or politely."""
    if rng.random() < 0.04 and len(prompt) > 12:  # one letter is missing
        at = rng.randrange(1, len(prompt) - 1)
        if prompt[at].islower():
            prompt = prompt[:at] + prompt[at + 1 :]
    luck = rng.random()
    if luck < 0.12:
        prompt = prompt.lower()
    elif luck < 0.18:
        prompt = expand(
            rng, "[Please|Hi!|Hello,|Hey,|OK,|So,|Can you tell me:|Quick question:] "
        ) + (prompt if rng.random() < 0.5 else prompt[:1].lower() + prompt[1:])
    if rng.random() < 0.12 and prompt[-1] in ".?!":
        prompt = prompt[:-1]
    return prompt
