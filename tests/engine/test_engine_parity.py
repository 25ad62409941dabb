"""The whole engine compared with Hugging Face's logits: paged, chunked, batched, preempted."""

import numpy as np
import pytest

from forge_jax import LLM, SamplingParams
from forge_jax.checkpoint.safetensors import read_header
from forge_jax.testing import core_of

pytestmark = [pytest.mark.long, pytest.mark.slow]

GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, logprobs=20)


@pytest.fixture(
    scope="module",
    params=[
        "llama2",
        "llama31",
        "llama32_tied",
        "qwen2_window",
        "gemma3",
        "gemma4_shared",
        "gemma4_moe",
        "llama4",
        "olmo2",
        "smollm3",
        "gpt2",
        "phi3_partial",
        "qwen2_5_vl",
        "qwen3_vl_moe",
        "qwen3_next",
        "qwen3_5",
        "qwen3_5_moe_text",
        "granitemoehybrid",
    ],
)
def folder(request, goldens):
    return goldens / request.param


@pytest.fixture(scope="module")
def golden(folder):
    """Return input_ids i64[3, 61], their logits f32[3, 61, V], and 24 greedy tokens after each."""
    stored = read_header(folder / "golden.safetensors")
    return {name: np.array(tensor.read()) for name, tensor in stored.items()}


@pytest.fixture(scope="module")
def llm(folder):
    # 10 blocks of 16 tokens for three sequences that finally need 6 each.
    return LLM(
        folder,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        block_size=16,
        num_blocks=10,
        max_model_len=128,
        prefill_chunk_size=16,
        prefix_cache=False,
    )


def test_prompt_scores_match_hugging_face(llm, golden):
    ids, logits = golden["input_ids"], golden["logits"].astype(np.float64)
    exact = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    params = SamplingParams(max_tokens=0, prompt_logprobs=20)
    for s, output in enumerate(llm.generate(ids.tolist(), params, progress=False)):
        assert len(output.prompt_logprobs) == ids.shape[1] - 1
        for i, entry in enumerate(output.prompt_logprobs):
            assert entry.token_id == ids[s, i + 1]
            assert abs(entry.logprob - exact[s, i, entry.token_id]) < 2e-4
            ahead = logits[s, i] - logits[s, i, entry.token_id]
            assert 1 + sum(ahead > 2e-4) <= entry.rank <= sum(ahead > -2e-4)
            for token, logprob in entry.top:
                assert abs(logprob - exact[s, i, token]) < 2e-4


def test_greedy_tokens_match_hugging_face_after_preemption(llm, golden):
    before = core_of(llm).scheduler.num_preemptions
    together = llm.generate(golden["input_ids"].tolist(), GREEDY, progress=False)
    assert core_of(llm).scheduler.num_preemptions > before
    assert [list(o.outputs[0].token_ids) for o in together] == golden["greedy_ids"].tolist()
    for prompt, preempted in zip(golden["input_ids"].tolist(), together, strict=True):
        [alone] = llm.generate(prompt, GREEDY, progress=False)
        for a, b in zip(alone.outputs[0].logprobs, preempted.outputs[0].logprobs, strict=True):
            np.testing.assert_allclose([p for _, p in a.top], [p for _, p in b.top], atol=2e-4)


def test_folder_without_tokenizer_serves_token_ids(llm):
    [output] = llm.generate([3, 4, 5], SamplingParams(max_tokens=3), progress=False)
    assert llm.tokenizer is None and output.text == "" and output.outputs[0].token_ids
