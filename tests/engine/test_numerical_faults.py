"""Numerical faults: NaN in free blocks has no effect, non-finite rows end only their request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forge_jax import LLM, SamplingParams
from forge_jax.errors import NumericalError
from forge_jax.models.kv import KV
from forge_jax.schedule.plan import StepPlan, StepResult
from forge_jax.testing import core_of, not_a_number

PROMPTS = [
    f"Once upon a time there was a {animal} " * 4 for animal in ("dog", "cat", "bird", "fox")
]
PARAMS = [
    SamplingParams(max_tokens=30, temperature=t, seed=i, logprobs=2, ignore_eos=True)
    for i, t in enumerate((0.0, 0.8, 1.0, 0.5))
]
OPTIONS = {"deterministic": True, "max_num_seqs": 4, "max_model_len": 256, "num_blocks": 48}


class Poisoner:
    """A device that fills all KV of the blocks named by `which` with NaN before each step."""

    def __init__(self, llm: LLM, which: Callable[[StepPlan], set[int]]):
        core = core_of(llm)
        self.runner: Any = core.device
        self.poisoned = 0
        self._which = which
        core.device = self
        kv = self.runner.state.kv
        mask = jax.ShapeDtypeStruct((kv[0].shape[0],), jnp.bool_)
        shapes = jax.tree.map(lambda k: jax.ShapeDtypeStruct(k.shape, k.dtype), kv)
        self._compiled = jax.jit(_poison, donate_argnums=0).lower(shapes, mask).compile()

    def dispatch(self, plan: StepPlan) -> Any:
        blocks = self._which(plan)
        mask = np.zeros(self.runner.state.kv[0].shape[0], np.bool_)
        mask[list(blocks)] = True
        self.poisoned += len(blocks)
        self.runner.state.kv = self._compiled(self.runner.state.kv, jax.device_put(mask))
        return self.runner.dispatch(plan)

    def read(self, pending: Any) -> StepResult:
        return self.runner.read(pending)

    def reset(self) -> None:
        self.runner.reset()


def _poison(kv: KV, mask: jax.Array) -> KV:
    def poisoned(array: jax.Array) -> jax.Array:
        rows = mask.reshape(-1, *(1,) * (array.ndim - 1))
        return jnp.where(rows, jnp.array(not_a_number(array.dtype), array.dtype), array)

    return jax.tree.map(poisoned, kv)


def answers(llm: LLM, prompts=PROMPTS) -> list[Any]:
    outputs = llm.generate(prompts, PARAMS[: len(prompts)], progress=False)
    return [
        (o.outputs[0].finish_reason, o.outputs[0].token_ids, o.outputs[0].logprobs, o.text)
        for o in outputs
    ]


@pytest.mark.parametrize(
    "kind",
    [{}, {"kernels": "xla"}, {"dtype": "float32"}, {"kv_dtype": "fp8"}],
)
@pytest.mark.quick_cases(1)
def test_contents_of_free_blocks_do_not_matter(kind):
    llm = LLM("forge-tiny", **OPTIONS, **kind)
    expected = answers(llm)
    pool = core_of(llm).scheduler.pool

    def free(plan: StepPlan) -> set[int]:
        return {
            block
            for block in range(pool.num_blocks)
            if not pool.ref_count(block) and not pool.is_registered(block)
        }

    poisoner = Poisoner(llm, free)
    assert answers(llm) == expected
    assert poisoner.poisoned > 500
    assert core_of(llm).num_recoveries == 0


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.quick_cases(1)
def test_non_finite_row_is_isolated_and_not_cached(kv_dtype):
    llm = LLM("forge-tiny", **OPTIONS, kv_dtype=kv_dtype)
    # Without `bad` in the batch and with empty caches, because the batch does not matter.
    expected = answers(llm)
    core = core_of(llm)
    prompt = "A quite different beginning of a story about a whale " * 3
    params = [*PARAMS[:3], SamplingParams(max_tokens=40, seed=9, ignore_eos=True)]

    def blocks_of_bad(plan: StepPlan) -> set[int]:
        running = core.scheduler.running
        bad = [seq for seq in running if seq.prompt_len == bad_len and seq.num_output > 3]
        return {block for seq in bad for block in seq.blocks[2:]}

    assert llm.tokenizer is not None
    bad_len = len(llm.tokenizer.encode(prompt))
    assert bad_len not in [len(llm.tokenizer.encode(p)) for p in PROMPTS]
    Poisoner(llm, blocks_of_bad)
    outputs = llm.generate([*PROMPTS[:3], prompt], params, progress=False)
    for output, right in zip(outputs[:3], expected[:3], strict=True):
        got = output.outputs[0]
        assert (got.finish_reason, got.token_ids, got.logprobs, output.text) == right
    bad = outputs[3].outputs[0]
    assert bad.finish_reason == "error" and isinstance(bad.error, NumericalError)
    assert core.num_recoveries == 0 and core.scheduler.pool.num_used == 0
    # Poisoned blocks are gone from the cache; only blocks registered before can be found.
    core.device = core.device.runner
    [again] = llm.generate([prompt], params[3:], progress=False)
    fresh = LLM("forge-tiny", **OPTIONS, kv_dtype=kv_dtype)
    [clean] = fresh.generate([prompt], params[3:], progress=False)
    assert again.outputs[0].token_ids == clean.outputs[0].token_ids
    assert again.outputs[0].finish_reason == "length"
