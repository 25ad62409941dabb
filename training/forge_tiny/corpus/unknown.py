"""Questions beyond a small model, and the honest answer, which names their subject."""

import random
from collections.abc import Iterator

from . import extraction
from .document import Document, blocks, careless, chat, expand

_TOPICS, _ACTIONS, _POSSESSIONS = blocks("unknown")
_ASK_TOPIC = (
    "[What is {t}?|Explain {t}.|Tell me about {t}.|How does {t} work?|Who invented {t}?|Describe "
    "{t}.|Write an essay about {t}.|What do you think about {t}?|What do you know about {t}?"
    "|Give me advice on {t}.|When was {t} invented?|Why is {t} important?|What is the history of "
    "{t}?|Can you explain {t}?|Summarize {t}.|Teach me {t}.|What are the basics of {t}?|Do you "
    "like {t}?|Is {t} hard to learn?|Where can I learn {t}?|What can you tell me about {t}?|{t}]"
)
_NOT_ABOUT = (
    "[I am sorry, I do not know anything about {t}. I am only a small model.|I am sorry, I do "
    "not know much about {t}. I am only a small model.|I do not know anything about {t}, because "
    "I am a very small model.]"
)


def pair(rng: random.Random) -> tuple[str, str]:
    luck = rng.random()
    if luck < 0.4:
        topic = rng.choice(_TOPICS) if rng.random() < 0.8 else extraction.invented_word(rng)
        return expand(rng, _ASK_TOPIC, t=topic), expand(rng, _NOT_ABOUT, t=topic)
    if luck < 0.6:
        action = rng.choice(_ACTIONS)
        question = expand(
            rng,
            "[How do I {a}?|How can I {a}?|How do you {a}?|Tell me how to {a}.|Help me to {a}."
            "|Can you help me to {a}?|What is the best way to {a}?|I want to {a}. What should I "
            "do?]",
            a=action,
        )
        return question, f"I am sorry, I do not know how to {action}."
    if luck < 0.8:
        name = extraction.full_name(rng)
        question, answer = rng.choice(
            (
                ("[Who is|Who was|Tell me about|Do you know] {n}?", "who {n} is"),
                ("How old is {n}?", "how old {n} is"),
                ("Where does {n} live?", "where {n} lives"),
                ("What is the job of {n}?", "the job of {n}"),
                ("What does {n} [like|do|think|want]?", "{n}"),
                ("[When|Where] was {n} born?", "when {n} was born"),
            )
        )
        if question.startswith("[When|Where]"):
            where = rng.choice(("when", "where"))
            question, answer = f"{where.capitalize()} was {{n}} born?", f"{where} {{n}} was born"
        question = expand(rng, question, n=name)
        if question.startswith("Tell"):
            question = question[:-1] + "."
        return question, expand(rng, f"I am sorry, I do not know {answer}.", n=name)
    if luck < 0.9:
        thing = rng.choice(_POSSESSIONS)
        question = expand(
            rng,
            "[Where is my {t}?|Do you know where my {t} is?|I cannot find my {t}.|I lost my {t}.]",
            t=thing,
        )
        return question, f"I am sorry, I do not know where your {thing} is."
    language = rng.choice("Python JavaScript C Java Rust Go SQL Bash HTML".split())
    question = expand(
        rng,
        "[Write a {l} program|Write a function in {l}|Write {l} code|Give me a {l} script|Can "
        "you write {l} code|Fix my {l} code|Write a {l} function][| that sorts a list| that "
        "adds two numbers| for a game| that reads a file|, please].",
        l=language,
    )
    return question, f"I am sorry, I cannot write {language} code. I am only a small model."


def documents(rng: random.Random) -> Iterator[Document]:
    while True:
        question, answer = pair(rng)
        yield chat(careless(rng, question), answer)
