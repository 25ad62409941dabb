"""Manual steps of a model over the paged cache, as the engine would run them."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from forge_jax.models import Model, Ragged
from forge_jax.research import LoadedModel, new_kv
from forge_jax.testing import not_a_number

BLOCK_SIZE = 16
MAX_LEN = 96
ROWS = 192  # rows of every step, so that one executable serves all


def rows_alone(num_tokens=None, axis=None) -> Ragged:
    """Return the step of layers that neither attend nor read positions."""
    fields = dict.fromkeys(Ragged._fields) | {"num_tokens": num_tokens, "axis": axis}
    return Ragged(**fields | {"implementation": "auto", "uniform": False})  # pyright: ignore


class PagedRun:
    """Sequences of one batch in a cache whose free blocks hold NaN; steps of any mix of rows."""

    def __init__(self, loaded: LoadedModel, seqs: int, *, implementation="xla", kv=None):
        self.loaded, self.seqs = loaded, seqs
        blocks = MAX_LEN // BLOCK_SIZE
        self.num_blocks = seqs * blocks + 3
        self.tables = np.random.default_rng(0).permutation(self.num_blocks)[: seqs * blocks]
        self.tables = self.tables.reshape(seqs, blocks).astype(np.int32)
        empty = new_kv(loaded, self.num_blocks, BLOCK_SIZE, dtype=kv, num_slots=seqs)
        self.kv = jax.tree.map(lambda a: jnp.full_like(a, not_a_number(a.dtype)), empty)
        self.lens = np.zeros(seqs, np.int32)
        self.step_fn = jitted_step(loaded.model, implementation)

    def step(self, new_tokens: list[list[int]]) -> list[np.ndarray]:
        """Feed each sequence its new tokens and return f32[rows, V] logits of each."""
        counts = np.array([len(tokens) for tokens in new_tokens], np.int32)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        positions = np.concatenate(
            [np.arange(n, n + c) for n, c in zip(self.lens, counts, strict=True)]
        ).astype(np.int32)
        seq = np.repeat(np.arange(self.seqs), counts)
        slots = self.tables[seq, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        self.lens = self.lens + counts
        tokens = np.concatenate([np.asarray(t, np.int32) for t in new_tokens])
        padding = (0, ROWS - len(tokens))
        self.kv, scores = self.step_fn(
            self.loaded.leaves,
            self.kv,
            np.pad(tokens, padding),
            np.pad(positions, padding),
            np.pad(slots, padding, constant_values=self.num_blocks * BLOCK_SIZE),
            self.tables,
            self.lens,
            starts,
            np.int32(self.seqs),
        )
        return np.split(np.asarray(scores)[: starts[-1]], starts[1:-1])


@cache
def jitted_step(model: Model, implementation: str):
    def step(leaves, kv, *arrays):
        kv, hidden = model.forward(leaves, kv, *arrays, implementation=implementation)
        return kv, model.logits(leaves, hidden)

    return jax.jit(step, donate_argnums=1)
