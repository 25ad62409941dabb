"""The corpus: original text, generated from a seed by the grammars in this folder.

Each file is one kind of text and yields endless documents. The mixture is here.
"""

import random
from collections.abc import Iterator
from itertools import islice

from . import engine, extraction, facts, stories, sums, talk, unknown
from .document import Document

# Shares of documents, not of tokens, because a story is ten times as long as a sum.
MIXTURE = {stories: 5, facts: 36, sums: 23, extraction: 20, engine: 4, talk: 9, unknown: 3}


def documents(seed: int, count: int) -> Iterator[Document]:
    rng = random.Random(seed)
    sources = [kind.documents(random.Random(rng.getrandbits(64))) for kind in MIXTURE]
    weights = tuple(MIXTURE.values())
    return (next(source) for source in islice(_choices(rng, sources, weights), count))


def _choices(rng: random.Random, sources: list, weights: tuple[int, ...]) -> Iterator:
    while True:
        yield from rng.choices(sources, weights, k=1024)
