"""Rollouts for Tunix, and models whose log-probabilities have the bits of the rollouts.

    llm = LLM("forge-tiny", deterministic=True, dtype="float32")
    cluster = RLCluster(
        actor=ForgePolicy(llm),
        tokenizer=ForgeTokenizer(llm),
        cluster_config=ClusterConfig(rollout_engine=partial(ForgeRollout, model=llm), ...),
    )

`ForgeRollout` also serves Tunix's own Llama 3, Qwen 2 and Qwen 3. Their log-probabilities are equal
to those of the rollouts only up to rounding.
"""

from __future__ import annotations

from forge_jax.integrations.tunix.policy import ForgePolicy
from forge_jax.integrations.tunix.rollout import ForgeRollout
from forge_jax.integrations.tunix.tokenizer import ForgeTokenizer

__all__ = ["ForgePolicy", "ForgeRollout", "ForgeTokenizer"]
