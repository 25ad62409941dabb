"""What the recipe for Ray Data has Ray make in each actor; with Ray itself: `make test-clients`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from forge_jax import SamplingParams

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_blocks": 32}


@pytest.fixture(scope="module")
def generate():
    sys.path.insert(0, str(EXAMPLES))
    try:
        import ray_batch

        yield ray_batch.Generate("forge-tiny", max_tokens=8, **SMALL)
    finally:
        sys.path.remove(str(EXAMPLES))


def test_a_batch_comes_back_with_its_columns_and_two_more(generate):
    prompts = ["Once upon a time", "A cat"]
    batch = generate({"id": np.array([1, 2]), "prompt": np.array(prompts, dtype=object)})
    assert set(batch) == {"id", "prompt", "output", "finish_reason"}
    assert batch["id"].tolist() == [1, 2] and batch["prompt"].tolist() == prompts
    assert all(isinstance(text, str) and text for text in batch["output"])
    assert set(batch["finish_reason"]) <= {"stop", "length"}


def test_rows_are_answered_as_the_engine_answers_them(generate):
    prompt = "Once upon a time"
    batch = generate({"prompt": np.array([prompt], dtype=object)})
    [answer] = generate._llm.generate([prompt], SamplingParams(temperature=0, max_tokens=8))
    assert batch["output"].tolist() == [answer.text]


def test_the_recipe_imports_neither_ray_nor_jax_before_it_needs_them():
    code = "import sys, ray_batch; assert not {'ray', 'jax', 'forge_jax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=EXAMPLES)
