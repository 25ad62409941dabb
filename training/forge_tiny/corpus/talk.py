"""Small talk of one turn or several, and popular first words of raw texts."""

import random
from collections.abc import Iterator

from . import engine, extraction, facts, stories, sums, unknown
from .document import (
    Document,
    article,
    blocks,
    capitalize,
    careless,
    chat,
    expand,
    questions_and_answers,
    text,
    with_system,
)

_SMALL_TALK = tuple(
    (question, answer) for (question,), answer in questions_and_answers("small_talk")
)
_OPENINGS = blocks("openings")[0]
_SYSTEMS = (
    "You are a helpful assistant.", "You are a helpful assistant.", "You are a helpful assistant.",
    "You are forge-tiny, a small language model.", "You are a friendly assistant.",
    "You are a kind teacher.",
    "You are a helpful AI assistant.", "Answer the questions of the user.",
    "You are an assistant. Be friendly.",
    "You help the user.", "Answer in English.", "You are a chatbot.", "Be polite and helpful.",
    "Keep your answers short.", "You are a concise assistant.",
)  # fmt: skip


def small_talk(rng: random.Random) -> tuple[str, str]:
    question, answer = _SMALL_TALK[0] if rng.random() < 0.12 else rng.choice(_SMALL_TALK)
    return expand(rng, question), expand(rng, answer)


def poem(rng: random.Random) -> tuple[str, str]:
    thing = rng.choice(blocks("poem_things")[0])
    ask = (
        "[Write a poem about|Write a short poem about|Tell me a poem about|A poem about|Can you "
        "write a poem about]"
    )
    verse = "\n".join(rng.choice(blocks("poems")))
    return expand(rng, ask) + rng.choice((f" the {thing}.", f" {article(thing)}.")), expand(
        rng, verse, thing=thing
    )


def repeat(rng: random.Random) -> tuple[str, str]:
    """Return an exercise that copies words without sense, the plainest use of attention."""
    if rng.random() < 0.5:
        words = " ".join(extraction.invented_word(rng) for _ in range(rng.randint(1, 5)))
    else:
        words = rng.choice((facts.fact(rng)[1], small_talk(rng)[0], extraction.full_name(rng)))
    ask = expand(
        rng,
        "[Say|Repeat|Repeat after me:|Repeat this:|Say this:|Please repeat:|Echo:|Write:|Copy "
        "this:]",
    )
    return f"{ask} {words}", words


def named(rng: random.Random) -> list[tuple[str, str]]:
    """Return a chat that tests recall of a name that the user gave."""
    name = extraction.first_name(rng)
    turns = [(
        expand(rng, "[My name is {n}.|I am {n}.|Hello, my name is {n}.|Hi, I'm {n}."
                    "|I'm {n}, nice to meet you.]", n=name),
        expand(rng, "[Nice to meet you, {n}!|Hello, {n}! Nice to meet you.] How can I "
                    "help you?", n=name),
    )]  # fmt: skip
    if rng.random() < 0.6:
        turns.append(short_turn(rng))
    if rng.random() < 0.8:
        question = (
            "[What is my name?|What's my name?|Do you know my name?|Who am I?|Do you remember my "
            "name?]"
        )
        turns.append((expand(rng, question), f"Your name is {name}."))
    return turns


def follow_up(rng: random.Random) -> list[tuple[str, str]]:
    """Return a follow-up: a capital, then "And of Italy?"; a sum, then "And 3 + 4?"."""
    if rng.random() < 0.5:
        turns = []
        for i in range(rng.randint(2, 3)):
            name = (
                rng.choice(facts.FAMOUS)
                if rng.random() < 0.5
                else rng.choice(tuple(facts.COUNTRIES))
            )
            ask = "[And of {c}?|And {c}?|What about {c}?|And the capital of {c}?|How about {c}?]"
            turns.append((
                expand(rng, ask if i else "What is the capital of {c}?", c=name),
                f"The capital of {name} is {facts.COUNTRIES[name][0]}.",
            ))  # fmt: skip
        return turns
    turns = []
    for i in range(rng.randint(2, 3)):
        a, operator, b, result = sums.numbers(rng)
        ask = "[And {w}?|What about {w}?|And what is {w}?|Now {w}.]"
        question = expand(rng, ask if i else "What is {w}?", w=f"{a} {operator} {b}")
        turns.append((question, f"{a} {operator} {b} = {result}."))
    return turns


def short_turn(rng: random.Random) -> tuple[str, str]:
    make = rng.choices(
        (
            facts.fact,
            sums.pair,
            small_talk,
            engine.pair,
            unknown.pair,
            poem,
            extraction.pair,
            repeat,
        ),
        (30, 18, 24, 10, 6, 2, 10, 6),
    )[0]
    question, answer = make(rng)
    copied = make in (extraction.pair, repeat)  # copied letter by letter
    return question if copied else careless(rng, question), answer


def dialogue(rng: random.Random) -> Document:
    """Return some turns on various subjects; the longest fill a row of training."""
    luck = rng.random()
    if luck < 0.15:
        turns = named(rng)
    elif luck < 0.35:
        turns = follow_up(rng)
    else:
        turns = [short_turn(rng) for _ in range(rng.choice((1, 2, 2, 3, 3, 4, 5, 6, 8, 14)))]
    if rng.random() < 0.25 and luck >= 0.35:
        turns.insert(0, tuple(expand(rng, side) for side in _SMALL_TALK[0]))
    if rng.random() < 0.08:
        turns = turns[:2]
        for i in range(rng.randint(1, 3)):
            told = stories.story(rng)
            ask = f"Tell me a story about {article(told.child or told.kind)}."
            more = "[Tell me another story.|Another story, please.|Another one!|One more story!]"
            again = i > 0 and rng.random() < 0.5
            turns.append((expand(rng, more) if again else ask, told.content))
            if rng.random() < 0.4:
                turns.append(stories.question_about(rng, told))
    if rng.random() < 0.25:
        thanks = next(pair for pair in _SMALL_TALK if "Thank you!" in pair[0])
        turns.append(tuple(expand(rng, side) for side in thanks))
    contents = [
        turn for question, answer in turns for turn in (("user", question), ("assistant", answer))
    ]
    document = Document(tuple(contents))
    return with_system(rng.choice(_SYSTEMS), document) if rng.random() < 0.35 else document


def raw(rng: random.Random) -> str:
    fields = ("name", "age", "city", "job", "animal", "pet", "colour")
    values = {field: extraction.value(rng, field) for field in fields}
    return capitalize(expand(rng, rng.choice(_OPENINGS), **values))


def documents(rng: random.Random) -> Iterator[Document]:
    while True:
        luck = rng.random()
        if luck < 0.3:
            question, answer = small_talk(rng)
            yield chat(careless(rng, question) if rng.random() < 0.5 else question, answer)
        elif luck < 0.38:
            yield chat(*repeat(rng))
        elif luck < 0.4:
            yield chat(*poem(rng))
        elif luck < 0.48:
            yield text(raw(rng))
        else:
            yield dialogue(rng)
