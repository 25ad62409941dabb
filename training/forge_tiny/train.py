"""The training loop, bounded by wall-clock time.

This module owns packing (documents into fixed rows), the optimizer, the learning-rate schedule and
the checkpoint. The schedule follows the used share of the time budget, so that a run on a slow
machine still ends with a rate of zero. `nnx.split` is called once, because the jitted step takes
flat leaves.
"""

import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from flax import nnx

from .model import Llama, ModelConfig

PROMPT_WEIGHT = 0.1  # weight of a user's or a system prompt's token; every other token weighs 1


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    minutes: float = 85.0
    row_length: int = 640
    rows_per_step: int = 6
    peak_rate: float = 3e-3
    warmup: float = 0.015  # share of the budget
    decay_from: float = 0.3  # share of the budget; linear to zero from here
    weight_decay: float = 0.05
    checkpoint_minutes: float = 8.0
    seed: int = 0


@dataclass(frozen=True)
class Rows:
    """Packed training data; every field is [rows, row_length]."""

    tokens: np.ndarray  # uint16
    documents: np.ndarray  # uint8: index of the document in the row; 0 is padding
    weights: np.ndarray  # uint8: 0 padding, 1 prompt, 2 text to be learned

    @classmethod
    def load(cls, path: Path) -> "Rows":
        with np.load(path) as arrays:
            return cls(arrays["tokens"], arrays["documents"], arrays["weights"])

    def save(self, path: Path) -> None:
        np.savez(path, tokens=self.tokens, documents=self.documents, weights=self.weights)


def pack(documents: Iterator[tuple[list[int], list[int]]], row_length: int) -> Rows:
    """Pack (tokens, weights) documents into rows, each into the fullest open row with room."""
    open_rows: list[list[tuple[list[int], list[int]]]] = [[] for _ in range(48)]
    used = [0] * len(open_rows)
    closed = []
    for tokens, weights in documents:
        size = min(len(tokens), row_length)
        fits = [i for i, n in enumerate(used) if n + size <= row_length]
        if not fits:
            fullest = max(range(len(used)), key=used.__getitem__)
            closed.append(open_rows[fullest])
            open_rows[fullest], used[fullest] = [], 0
            fits = [fullest]
        row = max(fits, key=used.__getitem__)
        open_rows[row].append((tokens[:size], weights[:size]))
        used[row] += size
    closed.extend(row for row in open_rows if row)

    shape = (len(closed), row_length)
    rows = Rows(np.zeros(shape, np.uint16), np.zeros(shape, np.uint8), np.zeros(shape, np.uint8))
    for i, row in enumerate(closed):
        at = 0
        for number, (tokens, weights) in enumerate(row, start=1):
            span = slice(at, at + len(tokens))
            rows.tokens[i, span] = tokens
            rows.weights[i, span] = weights
            rows.documents[i, span] = number
            at += len(tokens)
    return rows


def batches(rows: Rows, size: int, seed: int, skip: int) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield shuffled batches endlessly, after skipping `skip` of them to resume."""
    order = np.random.default_rng(seed)
    for _ in itertools.count():
        indices = order.permutation(len(rows.tokens))
        for start in range(0, len(indices) - size + 1, size):
            if skip:
                skip -= 1
                continue
            chosen = np.sort(indices[start : start + size])
            yield rows.tokens[chosen], rows.documents[chosen], rows.weights[chosen]


def mean_loss(logits: jax.Array, tokens: jax.Array, weights: jax.Array) -> jax.Array:
    """Return the mean cross-entropy of the next token from f32[B, T, V] logits, [B, T] others."""
    logits, targets, weights = logits[:, :-1], tokens[:, 1:], weights[:, 1:]
    target_logits = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - target_logits
    return jnp.sum(losses * weights) / jnp.sum(weights)


def learning_rate(config: TrainConfig, spent: float) -> float:
    """Return the rate after the share `spent` (0 to 1) of the time budget: rise, plateau, decay."""
    if spent < config.warmup:
        return config.peak_rate * max(spent / config.warmup, 0.02)
    return config.peak_rate * min(1.0, max(0.0, (1.0 - spent) / (1.0 - config.decay_from)))


@dataclass
class Progress:
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss: float = float("nan")  # mean over the last report


def save_checkpoint(path: Path, params: list, state: optax.OptState, progress: Progress) -> None:
    arrays = {f"param_{i}": np.asarray(leaf) for i, leaf in enumerate(params)}
    arrays |= {f"state_{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state))}
    partial_path = path.with_suffix(".partial.npz")
    np.savez(partial_path, progress=json.dumps(vars(progress)), **arrays)
    os.replace(partial_path, path)


def load_checkpoint(
    path: Path, params: list, state: optax.OptState
) -> tuple[list, optax.OptState, Progress]:
    with np.load(path) as arrays:
        progress = Progress(**json.loads(str(arrays["progress"])))
        params = [jnp.asarray(arrays[f"param_{i}"]) for i in range(len(params))]
        count = len(jax.tree.leaves(state))
        leaves = [jnp.asarray(arrays[f"state_{i}"]) for i in range(count)]
    return params, jax.tree.unflatten(jax.tree.structure(state), leaves), progress


def make_optimizer(
    config: TrainConfig, params: list, vocab_size: int
) -> optax.GradientTransformation:
    """Return Muon for the layers' matrices, Adam for embedding and norms, at a rate of one.

    Muon's update has the size of AdamW's (`consistent_rms`, arXiv:2502.16982), so one rate serves
    both.
    """
    matrix = optax.contrib.MuonDimensionNumbers()
    muon_leaves = [matrix if p.ndim == 2 and p.shape[0] != vocab_size else None for p in params]
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.contrib.muon(
            1.0,
            weight_decay=config.weight_decay,
            adam_b2=0.95,
            muon_weight_dimension_numbers=muon_leaves,
            consistent_rms=0.2,
        ),
    )


def make_step(
    graphdef: nnx.GraphDef,
    treedef: jax.tree_util.PyTreeDef,
    optimizer: optax.GradientTransformation,
) -> Callable:
    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, rate, tokens, documents, weights):
        def loss_of(leaves):
            model = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
            ids = tokens.astype(jnp.int32)
            token_weights = jnp.array([0.0, PROMPT_WEIGHT, 1.0])[weights]
            # The first token of a document is not predicted from the document before it.
            first = documents != jnp.pad(documents, ((0, 0), (1, 0)))[:, :-1]
            return mean_loss(model(ids, documents), ids, token_weights * ~first)

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, state = optimizer.update(grads, state, params)
        params = [p + rate * u for p, u in zip(params, updates, strict=True)]
        return params, state, loss

    return step


def train(
    model_config: ModelConfig,
    config: TrainConfig,
    rows: Rows,
    checkpoint: Path,
    on_checkpoint: Callable[[nnx.State, Progress], None] = lambda state, progress: None,
) -> Progress:
    """Train until the budget is spent; resume from `checkpoint` if it exists."""
    model = Llama(model_config, rngs=nnx.Rngs(config.seed))
    graphdef, model_state = nnx.split(model)
    params, treedef = jax.tree.flatten(model_state)
    optimizer = make_optimizer(config, params, vocab_size=model_config.vocab_size)
    state, progress = optimizer.init(params), Progress()
    if checkpoint.exists():
        params, state, progress = load_checkpoint(checkpoint, params, state)
        print(f"resumed at step {progress.step}", flush=True)
    print(f"{sum(p.size for p in params):,} parameters, {len(rows.tokens):,} rows", flush=True)

    step = make_step(graphdef, treedef, optimizer)
    budget = config.minutes * 60
    begun = time.monotonic() - progress.seconds
    saved = reported = time.monotonic()
    losses = []
    for batch in batches(rows, config.rows_per_step, config.seed, skip=progress.step):
        now = time.monotonic()
        progress.seconds = now - begun
        finished = progress.seconds >= budget
        if losses and (finished or progress.step % 50 == 0):
            progress.loss = float(np.mean(jax.device_get(losses)))
            rate = learning_rate(config, progress.seconds / budget)
            speed = len(losses) * batch[0].size / (time.monotonic() - reported)
            print(
                f"{progress.seconds / 60:6.1f} min  step {progress.step:6d}"
                f"  loss {progress.loss:.4f}  rate {rate:.2e}  {speed:,.0f} tokens/s",
                flush=True,
            )
            losses, reported = [], time.monotonic()
        if finished or now - saved > config.checkpoint_minutes * 60:
            save_checkpoint(checkpoint, params, state, progress)
            on_checkpoint(jax.tree.unflatten(treedef, params), progress)
            saved = time.monotonic()
        if finished:
            return progress
        rate = learning_rate(config, progress.seconds / budget)
        params, state, loss = step(params, state, np.float32(rate), *batch)
        if losses:  # dispatch runs at most one step ahead, so that the clock is right
            losses[-1].block_until_ready()
        losses.append(loss)
        progress.step += 1
        progress.tokens += int(np.count_nonzero(batch[1]))
    raise AssertionError("batches() never ends")
