"""Sums: addition and subtraction with 0 to 99, products up to 12 times 12 and their quotients."""

import random
from collections.abc import Iterator

from .document import Document, careless, chat, expand, text

_VERBS = {
    "+": ("plus", "[Add {a} and {b}.|What is the sum of {a} and {b}?|If you add {a} and {b}, "
                  "what do you get?]"),
    "-": ("minus", "[Subtract {b} from {a}.|What is {a} take away {b}?|What is the difference "
                   "of {a} and {b}?]"),
    "*": ("times", "[Multiply {a} by {b}.|What is the product of {a} and {b}?|What is {a} "
                   "multiplied by {b}?]"),
    "/": ("divided by", "[Divide {a} by {b}.|How often does {b} go into {a}?|What is {a} over "
                        "{b}?]"),
}  # fmt: skip
_THINGS = "apples books coins eggs pens balls cookies stamps pears shells".split()
_NAMES = "Tom Anna Ben Mia Sara Leo Nina Max Emma Paul".split()


def numbers(rng: random.Random) -> tuple[int, str, int, int]:
    operator = rng.choices("+-*/", (45, 30, 20, 5))[0]
    top = 10 if rng.random() < 0.35 else 20 if rng.random() < 0.3 else 99
    a, b = rng.randint(0, top), rng.randint(0, top)
    if operator == "-" and a < b and rng.random() < 0.9:
        a, b = b, a
    if operator in "*/":
        a, b = rng.randint(0, 12), rng.randint(0 if operator == "*" else 1, 12)
    if operator == "/":
        a = a * b
    result = {"+": a + b, "-": a - b, "*": a * b, "/": a // max(b, 1)}[operator]
    return a, operator, b, result


def pair(rng: random.Random) -> tuple[str, str]:
    if rng.random() < 0.06:
        return word_problem(rng)
    a, operator, b, result = numbers(rng)
    verb, request = _VERBS[operator]
    sign = "x" if operator == "*" and rng.random() < 0.3 else operator
    tight = rng.random() < 0.4
    written = f"{a}{sign}{b}" if tight else f"{a} {sign} {b}"
    question = expand(
        rng,
        "[What is {w}?|What is {w}?|What is {w}?|What is {a} {v} {b}?|What is {a} {v} {b}?"
        "|What's {w}?|What's {a} {v} {b}?|{w} =|{w}=|{w} = ?|{w}|{w}?|Calculate {w}.|Calculate "
        "{a} {v} {b}.|Compute {w}.|How much is {w}?|How much is {a} {v} {b}?|Solve {w}.|Can you "
        "tell me what {w} is?|Tell me {w}.|what does {w} equal?|{a} {v} {b}|" + request[1:],
        w=written, a=a, b=b, v=verb,
    )  # fmt: skip
    return question, f"{a} {operator} {b} = {result}."


def word_problem(rng: random.Random) -> tuple[str, str]:
    name, thing = rng.choice(_NAMES), rng.choice(_THINGS)
    a, b = rng.randint(1, 20), rng.randint(1, 20)
    if rng.random() < 0.5:
        question = expand(
            rng,
            "{n} has {a} {t} and [gets|finds|buys] {b} more. How many {t} does {n} have [now|in "
            "total|]?",
            n=name, a=a, b=b, t=thing,
        )  # fmt: skip
        return question.replace(" ?", "?"), f"{a} + {b} = {a + b}. {name} has {a + b} {thing}."
    a, b = a + b, b
    question = expand(
        rng,
        "{n} has {a} {t} and [gives away|loses|sells] {b}. How many {t} [are left|does {n} have "
        "now|remain]?",
        n=name, a=a, b=b, t=thing,
    )  # fmt: skip
    return question, f"{a} - {b} = {a - b}. {name} has {a - b} {thing}."


def documents(rng: random.Random) -> Iterator[Document]:
    while True:
        if rng.random() < 0.06:
            lines = (numbers(rng) for _ in range(rng.randint(1, 5)))
            yield text(
                "\n".join(f"{a} {operator} {b} = {result}" for a, operator, b, result in lines)
            )
        else:
            question, answer = pair(rng)
            yield chat(careless(rng, question), answer)
