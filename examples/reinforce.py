"""Train a model on sums with REINFORCE, with rollouts whose KL to the trainer is exactly 0.

    python examples/reinforce.py [--steps 20]

The engine samples answers, and returns the log-probability of each token. The trainer scores the
same tokens with the same weights before it updates them. Both are equal bit by bit, so every
gradient is exactly on-policy. Then the engine gets the new weights without a restart.
"""

import argparse
import dataclasses
import random
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import forge_jax
from forge_jax import LLM, RequestOutput, SamplingParams

MAX_LEN = 64
LARGEST = 160  # numbers above 99 are new to forge-tiny
OPTIONS: dict[str, Any] = {
    "deterministic": True,
    "dtype": "float32",
    "max_num_seqs": 16,
    "max_model_len": MAX_LEN,
}
Leaves = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Batch:
    """The samples of one step."""

    tokens: np.ndarray  # i32[B, MAX_LEN]
    lengths: np.ndarray  # i32[B]
    sampled: np.ndarray  # bool[B, MAX_LEN], True for tokens that the engine sampled
    logprobs: np.ndarray  # f32[B, MAX_LEN], the engine's, 0 for other tokens
    rewards: np.ndarray  # f32[B]
    advantages: np.ndarray  # f32[B]


def reward(text: str, total: int) -> float:
    """Return 1 if the last number in the answer is the sum, else 0."""
    return float(re.findall(r"\d+", text)[-1:] == [str(total)])


def rollout(llm: LLM, problems: list[tuple[int, int]], *, samples: int, seed: int) -> Batch:
    """Sample answers to sums. The advantage is the reward minus the mean reward."""
    chats = [[{"role": "user", "content": f"What is {a}+{b}?"}] for a, b in problems]
    params = SamplingParams(n=samples, max_tokens=16, temperature=1.0, seed=seed, logprobs=0)
    outputs = llm.chat(chats, params, progress=False)
    rewards = np.array(
        [
            [reward(answer.text, a + b) for answer in output.outputs]
            for output, (a, b) in zip(outputs, problems, strict=True)
        ],
        np.float32,
    )
    advantages = rewards - rewards.mean()
    return Batch(*_padded(outputs), rewards.reshape(-1), advantages.reshape(-1))


def _padded(
    outputs: Iterable[RequestOutput],
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return `Batch.tokens`, `lengths`, `sampled` and `logprobs`."""
    rows = [(output.prompt_token_ids, answer) for output in outputs for answer in output.outputs]
    tokens = np.zeros((len(rows), MAX_LEN), np.int32)
    sampled = np.zeros(tokens.shape, bool)
    logprobs = np.zeros(tokens.shape, np.float32)
    lengths = np.zeros(len(rows), np.int32)
    for i, (prompt, answer) in enumerate(rows):
        begin, end = len(prompt), len(prompt) + len(answer.token_ids)
        tokens[i, :end] = [*prompt, *answer.token_ids]
        sampled[i, begin:end] = True
        logprobs[i, begin:end] = [each.logprob for each in answer.logprobs or ()]
        lengths[i] = end
    return tokens, lengths, sampled, logprobs


def make_scorer(llm: LLM) -> Callable[[Leaves, Batch], np.ndarray]:
    """Return a function that scores a batch with the trainer's weights: f32[B, MAX_LEN]."""
    score = jax.jit(partial(forge_jax.score, llm.model, options=llm.score_options))

    def scored(leaves: Leaves, batch: Batch) -> np.ndarray:
        return np.where(batch.sampled, score(leaves, batch.tokens, batch.lengths), 0.0)

    return scored


def divergence(batch: Batch, logprobs: np.ndarray) -> float:
    """Return the KL divergence of the trainer from the rollouts, per sampled token.

    This is the estimator k3 (http://joschu.net/blog/kl-approx.html). It is never negative, and 0
    only if all log-probabilities are equal.
    """
    ratio = (logprobs - batch.logprobs)[batch.sampled].astype(np.float64)
    return float((np.expm1(ratio) - ratio).mean())


def make_update(
    llm: LLM, optimizer: optax.GradientTransformation
) -> Callable[[Leaves, Any, Batch], tuple[Leaves, Any]]:
    """Return the trainer's step: (leaves, optimizer state, batch) -> (leaves, optimizer state)."""
    score = partial(forge_jax.score, llm.model, options=llm.score_options)

    def loss(leaves: Leaves, tokens: Any, lengths: Any, weight: Any) -> jax.Array:
        return -(score(leaves, tokens, lengths) * weight).sum()

    @jax.jit
    def step(leaves: Leaves, state: Any, *batch: Any) -> tuple[Leaves, Any]:
        gradient = jax.grad(loss)(leaves, *batch)
        change, state = optimizer.update(gradient, state, leaves)
        updated = jax.tree.map(jnp.add, leaves, change)
        return updated, state

    def update(leaves: Leaves, state: Any, batch: Batch) -> tuple[Leaves, Any]:
        weight = batch.sampled * batch.advantages[:, None] / batch.sampled.sum()
        return step(leaves, state, batch.tokens, batch.lengths, weight.astype(np.float32))

    return update


def train(
    llm: LLM, *, steps: int, problems: int, samples: int, learning_rate: float, seed: int = 0
) -> list[tuple[float, float]]:
    """Train the engine's weights. Return the mean reward and the divergence of each step."""
    rng = random.Random(seed)
    optimizer = optax.adam(learning_rate)
    scorer, update = make_scorer(llm), make_update(llm, optimizer)
    leaves = llm.leaves
    state = optimizer.init(leaves)
    results: list[tuple[float, float]] = []
    for step in range(steps):
        sums = [(rng.randrange(LARGEST), rng.randrange(LARGEST)) for _ in range(problems)]
        batch = rollout(llm, sums, samples=samples, seed=rng.randrange(2**31))
        results.append((float(batch.rewards.mean()), divergence(batch, scorer(leaves, batch))))
        print(f"step {step:3d}  reward {results[-1][0]:.3f}  KL {results[-1][1]}", flush=True)
        leaves, state = update(leaves, state, batch)
        llm.update_weights(leaves)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="forge-tiny")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--problems", type=int, default=8, help="sums per step")
    parser.add_argument("--samples", type=int, default=8, help="answers to each sum")
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    args = parser.parse_args()
    with LLM(args.model, **OPTIONS) as llm:
        train(
            llm,
            steps=args.steps,
            problems=args.problems,
            samples=args.samples,
            learning_rate=args.learning_rate,
        )


if __name__ == "__main__":
    main()
