"""Train a model on sums with Tunix's GRPO, with rollouts whose KL to the trainer is exactly 0.

    pip install -e . google-tunix
    python examples/grpo_tunix.py [--steps 40]

Tunix trains `ForgePolicy`, which computes the served model. `ForgeRollout` samples the answers and
gets the new weights after each step. Before each update, the trainer scores the sampled tokens.
Its log-probabilities equal those of the rollouts bit by bit, so every step is exactly on-policy.
"""

import argparse
import random
import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from tunix.rl.grpo.grpo_learner import (  # pyright: ignore[reportMissingImports]
    GRPOConfig,
    GRPOLearner,
)
from tunix.rl.rl_cluster import (  # pyright: ignore[reportMissingImports]
    ClusterConfig,
    RLCluster,
    RLTrainingConfig,
    Role,
)
from tunix.rl.rollout.base_rollout import (  # pyright: ignore[reportMissingImports]
    RolloutConfig,
    RolloutOutput,
)

from forge_jax import LLM
from forge_jax.integrations.tunix import ForgePolicy, ForgeRollout, ForgeTokenizer

LARGEST = 100  # forge-tiny adds numbers below 100
TEMPERATURE = 2.0  # makes it err, so that answers to the same sum have different rewards
MAX_PROMPT, MAX_ANSWER = 32, 16  # tokens
OPTIONS: dict[str, Any] = {
    "deterministic": True,
    "dtype": "float32",
    "max_num_seqs": 16,
    "max_model_len": MAX_PROMPT + MAX_ANSWER,
}


class RecordedRollout(ForgeRollout):
    """Rollouts that keep their last output, to compare it with the trainer's."""

    last: RolloutOutput

    def generate(self, prompts: Any, rollout_config: Any, **kwargs: Any) -> RolloutOutput:
        self.last = super().generate(prompts, rollout_config, **kwargs)
        return self.last


def reward(prompts: Any, completions: Sequence[str], total: Any, **_: Any) -> list[float]:
    """Return 1 for each answer whose last number is the sum, else 0."""
    return [
        float(re.findall(r"\d+", text)[-1:] == [str(answer)])
        for text, answer in zip(completions, total, strict=True)
    ]


def problems(tokenizer: ForgeTokenizer, *, steps: int, count: int, seed: int) -> Iterator[Any]:
    """Yield the prompts and the sums of each step."""
    rng = random.Random(seed)
    for _ in range(steps):
        sums = [(rng.randrange(LARGEST), rng.randrange(LARGEST)) for _ in range(count)]
        chats = [[{"role": "user", "content": f"What is {a}+{b}?"}] for a, b in sums]
        yield {
            "prompts": np.array([tokenizer.apply_chat_template(chat) for chat in chats]),
            "total": np.array([a + b for a, b in sums]),
        }


def divergence(cluster: RLCluster) -> float:
    """Return the KL divergence of the trainer from the last rollouts, per sampled token.

    This is the estimator k3 (http://joschu.net/blog/kl-approx.html). It is never negative, and 0
    only if all log-probabilities are equal.
    """
    output, pad = cluster.rollout.last, cluster.rollout.pad_id()
    completions = np.full((len(output.tokens), MAX_ANSWER), pad, np.int32)
    sampled = np.zeros(completions.shape, np.float32)
    for i, (tokens, logprobs) in enumerate(zip(output.tokens, output.logprobs, strict=True)):
        completions[i, : len(tokens)], sampled[i, : len(tokens)] = tokens, logprobs
    trained = cluster.get_actor_per_token_logps(
        output.left_padded_prompt_tokens, completions, pad, cluster.rollout.eos_id()
    )
    ratio = (np.asarray(trained) - sampled)[completions != pad].astype(np.float64)
    return float((np.expm1(ratio) - ratio).mean())


def make_cluster(llm: LLM, *, steps: int, learning_rate: float, seed: int = 0) -> RLCluster:
    """Return a cluster on one device, with the engine's model as the actor."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("fsdp",))
    config = ClusterConfig(
        role_to_mesh={Role.ACTOR: mesh, Role.ROLLOUT: mesh},
        rollout_engine=partial(RecordedRollout, model=llm),
        training_config=RLTrainingConfig(
            actor_optimizer=optax.adam(learning_rate),
            max_steps=steps,
            eval_every_n_steps=steps + 1,
        ),
        rollout_config=RolloutConfig(
            max_prompt_length=MAX_PROMPT,
            max_tokens_to_generate=MAX_ANSWER,
            temperature=TEMPERATURE,
            seed=seed,  # pyright: ignore[reportArgumentType]
        ),
    )
    return RLCluster(actor=ForgePolicy(llm), tokenizer=ForgeTokenizer(llm), cluster_config=config)


def train(
    llm: LLM, *, steps: int, count: int, samples: int, learning_rate: float, seed: int = 0
) -> list[tuple[float, float]]:
    """Train the engine's weights. Return the mean reward and the divergence of each step."""
    cluster = make_cluster(llm, steps=steps, learning_rate=learning_rate, seed=seed)
    results: list[tuple[float, float]] = []

    def report(rewards: Any, **_: Any) -> dict[str, Any]:
        results.append((float(np.mean(rewards)), divergence(cluster)))
        step = len(results) - 1
        print(f"step {step:3d}  reward {results[-1][0]:.3f}  KL {results[-1][1]}", flush=True)
        return {}

    learner = GRPOLearner(
        cluster,
        GRPOConfig(num_generations=samples, num_iterations=1, beta=0.0),
        reward_fns=reward,
        metric_fns=[report],
    )
    learner.train(problems(ForgeTokenizer(llm), steps=steps, count=count, seed=seed))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="forge-tiny")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--problems", type=int, default=8, help="sums per step")
    parser.add_argument("--samples", type=int, default=8, help="answers to each sum")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    args = parser.parse_args()
    with LLM(args.model, **OPTIONS) as llm:
        train(
            llm,
            steps=args.steps,
            count=args.problems,
            samples=args.samples,
            learning_rate=args.learning_rate,
        )


if __name__ == "__main__":
    main()
