"""Scores as lm-evaluation-harness requests and reads them, compared with scoring in Python."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from operator import itemgetter
from typing import Any

import numpy as np
import pytest
from conftest import Server, running

from forge_jax import LLM, SamplingParams
from forge_jax.config import EngineConfig
from forge_jax.engine.thread import Engine

OPTIONS: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 64}
CONTEXTS_AND_ANSWERS = (
    ("The capital of France is", " Paris."),
    ("The capital of France is", " the"),
    ("Once upon a time", ", there was a little girl named Lily."),
    ("Two and two are", "<|end|>"),
)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("forge-tiny", **OPTIONS)


def parsed(answer: dict[str, Any], context_lens: list[int]) -> Iterator[tuple[float, bool]]:
    """Yield (logprob of the answer, True if it is greedy), like the harness's `parse_logprobs`.

    https://github.com/EleutherAI/lm-evaluation-harness, lm_eval/models/openai_completions.py
    """
    choices = sorted(answer["choices"], key=itemgetter("index"))
    for choice, context_len in zip(choices, context_lens, strict=True):
        logprobs = choice["logprobs"]["token_logprobs"][context_len:-1]
        tops = choice["logprobs"]["top_logprobs"][context_len:-1]
        yield (
            sum(logprobs),
            all(own == max(top.values()) for own, top in zip(logprobs, tops, strict=True)),
        )


@pytest.mark.slow
async def test_http_scores_match_the_python_api(llm):
    encode = llm.tokenizer.encode
    contexts = [encode(context) for context, _ in CONTEXTS_AND_ANSWERS]
    answers = [encode(answer, False) for _, answer in CONTEXTS_AND_ANSWERS]
    greedy = llm.generate(
        contexts[:2], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True), progress=False
    )
    contexts += contexts[:2]
    answers += [list(output.outputs[0].token_ids) for output in greedy]
    prompts = [[*context, *answer] for context, answer in zip(contexts, answers, strict=True)]
    scored = llm.generate(prompts, SamplingParams(max_tokens=0, prompt_logprobs=1), progress=False)
    context_lens = list(map(len, contexts))
    engine = await asyncio.to_thread(Engine.load, EngineConfig.from_options(**OPTIONS))
    async with running(engine) as server:
        found = list(parsed(await asked(server, prompts, max_tokens=1), context_lens))
        await no_more_than_the_prompt(server, prompts[0])
    for (logprob, is_greedy), output, context_len in zip(found, scored, context_lens, strict=True):
        entries = output.prompt_logprobs[context_len - 1 :]
        np.testing.assert_allclose(logprob, sum(e.logprob for e in entries), atol=1e-3)
        assert is_greedy == all(e.rank == 1 for e in entries)
    assert [is_greedy for _, is_greedy in found][-2:] == [True, True]
    assert not all(is_greedy for _, is_greedy in found)


async def asked(server: Server, prompts: list[list[int]], *, max_tokens: int) -> dict[str, Any]:
    """Send the harness's request: a batch of token ids."""
    body = {"model": server.model, "prompt": prompts, "temperature": 0, "max_tokens": max_tokens}
    status, answer = await server.post(
        "/v1/completions", {**body, "logprobs": 1, "seed": 1234, "echo": True}
    )
    assert status == 200, answer
    for choice, prompt in zip(answer["choices"], prompts, strict=True):
        lengths = {len(values) for values in choice["logprobs"].values()}
        assert lengths == {len(prompt) + max_tokens}, "one each, or it reads the wrong ones"
    return answer


async def no_more_than_the_prompt(server: Server, prompt: list[int]) -> None:
    [alone] = (await asked(server, [prompt], max_tokens=0))["choices"]
    [more] = (await asked(server, [prompt], max_tokens=1))["choices"]
    np.testing.assert_allclose(
        alone["logprobs"]["token_logprobs"][1:],
        more["logprobs"]["token_logprobs"][1:-1],
        atol=1e-4,
    )
