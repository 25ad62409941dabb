"""The corpus: original text, generated from a seed by the grammars in this folder.

One file is one kind of text, and yields documents without end; the mixture is here.
"""

import random
from collections.abc import Iterator
from itertools import islice

from . import engine, extraction, facts, stories, sums, talk, unknown
from .document import Document

# Shares of documents, not of tokens: a story is ten times as long as a sum.
MIXTURE = {stories: 6, facts: 20, sums: 32, extraction: 23, engine: 3, talk: 13, unknown: 3}


def documents(seed: int, count: int) -> Iterator[Document]:
    rng = random.Random(seed)
    sources = [kind.documents(random.Random(rng.getrandbits(64))) for kind in MIXTURE]
    weights = tuple(MIXTURE.values())
    return (next(source) for source in islice(_choices(rng, sources, weights), count))


def _choices(rng: random.Random, sources: list, weights: tuple[int, ...]) -> Iterator:
    while True:
        yield from rng.choices(sources, weights, k=1024)
