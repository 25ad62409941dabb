"""The model's answers about itself and about the engine that it is bundled with."""

import random
from collections.abc import Iterator

from .document import Document, careless, chat, expand, questions_and_answers, text


def pair(rng: random.Random) -> tuple[str, str]:
    blocks = questions_and_answers("engine")
    questions, answer = rng.choice(blocks)
    if rng.random() < 0.3:  # the two most common questions
        wanted = rng.choice(("Who are you?", "What is forge-jax?"))
        questions, answer = next(block for block in blocks if wanted in block[0])
    return expand(rng, rng.choice(questions)), expand(rng, answer).strip()


def documents(rng: random.Random) -> Iterator[Document]:
    while True:
        question, answer = pair(rng)
        if rng.random() < 0.1:
            yield text(answer)
        else:
            yield chat(careless(rng, question), answer)
