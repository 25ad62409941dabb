"""The example `reinforce.py`: every on-policy step has a KL divergence of exactly 0."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import optax
import pytest

from forge_jax import LLM

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "reinforce.py"
SUMS = [(2, 3), (150, 131)]

pytestmark = [pytest.mark.full_compile, pytest.mark.slow]


@pytest.fixture(scope="module")
def reinforce() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reinforce", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def promotion() -> Iterator[None]:
    """Allow what optax needs: the tests' configuration of JAX rejects mixed types."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.usefixtures("promotion")
def test_divergence_is_zero_on_policy_and_only_there(reinforce: Any, capsys):
    with LLM("forge-tiny", **reinforce.OPTIONS) as llm:
        original = llm.leaves
        results = reinforce.train(llm, steps=3, problems=2, samples=4, learning_rate=1e-4)
        assert [kl for _, kl in results] == [0.0, 0.0, 0.0]
        trained = zip(original, llm.leaves, strict=True)
        assert not any(bool((one == other).all()) for one, other in trained)
        assert capsys.readouterr().out.count("KL 0.0\n") == 3
        assert llm.weight_version == 3
        optimizer = optax.adam(1e-4)
        scorer, update = reinforce.make_scorer(llm), reinforce.make_update(llm, optimizer)
        batch = reinforce.rollout(llm, SUMS, samples=2, seed=1)
        assert reinforce.divergence(batch, scorer(llm.leaves, batch)) == 0.0
        # A trainer that is one update ahead of the engine is off-policy.
        graded = type(batch)(**vars(batch) | {"advantages": np.array([1, 1, -1, -1], np.float32)})
        ahead, _ = update(llm.leaves, optimizer.init(llm.leaves), graded)
        assert reinforce.divergence(batch, scorer(ahead, batch)) > 0.0
        before, after = (scorer(leaves, batch).sum(axis=1) for leaves in (llm.leaves, ahead))
        assert ((after - before) * graded.advantages).sum() > 0.0  # towards the rewarded answers


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2 + 3 = 5.", 1.0), ("2 + 3 = 6.", 0.0), ("five", 0.0), ("5", 1.0), ("", 0.0)],
)
def test_reward_is_for_the_last_number(reinforce: Any, text, expected):
    assert reinforce.reward(text, 5) == expected
