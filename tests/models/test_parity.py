"""The decoder over the paged cache: Hugging Face's logits, however the prompt is chunked."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged import PagedRun
from tokenizers import Tokenizer

import forge_jax
from forge_jax.checkpoint.safetensors import read_header
from forge_kernels.attention import kv_shape_dtype

FIXTURES = Path(__file__).parent.parent / "fixtures"
GOLDENS = sorted(path.parent.name for path in FIXTURES.glob("goldens/*/golden.safetensors"))
# Attention of each kind: with biases, windows, soft caps, sinks, chunks, one key head, shared
# caches, latents and recurrent states.
ATTENTION = [
    *("llama31", "llama4", "llama_bias", "mistral_window", "gemma2", "gemma4_shared", "gpt_oss"),
    *("cohere2", "falcon", "deepseek_v3", "granitemoehybrid", "qwen3_next"),
]
EVERY_MODEL = [("xla", name) for name in GOLDENS] + [("reference", name) for name in ATTENTION]
STORY = ", there was a little girl named Lily. She loved to play outside in the park."


def golden(name: str) -> dict[str, np.ndarray]:
    stored = read_header(FIXTURES / "goldens" / name / "golden.safetensors")
    return {key: np.array(tensor.read()) for key, tensor in stored.items()}


@pytest.fixture(scope="module", params=GOLDENS)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def loaded(name):
    return forge_jax.load(str(FIXTURES / "goldens" / name), progress=False)


@pytest.fixture(scope="module")
def stories():
    return forge_jax.load(str(FIXTURES / "stories260k-hf"), progress=False)


@pytest.mark.parametrize(("implementation", "name"), EVERY_MODEL, indirect=["name"])
def test_whole_prompts_match_hugging_face_logits(loaded, name, implementation, figure):
    want = golden(name)
    run = PagedRun(loaded, 3, implementation=implementation)
    scores = run.step(want["input_ids"].tolist())
    if implementation == "xla":
        figure("families", name, "whole", np.abs(np.stack(scores) - want["logits"]).max())
    np.testing.assert_allclose(np.stack(scores), want["logits"], atol=2e-4, rtol=0)


@pytest.mark.parametrize("chunk", [1, 7, pytest.param(16, marks=pytest.mark.soak)])
def test_chunked_prompt_matches_the_whole_prompts_logits(loaded, name, chunk, figure):
    want = golden(name)
    run = PagedRun(loaded, 3)
    scores = [
        np.stack(run.step(want["input_ids"][:, start : start + chunk].tolist()))
        for start in range(0, 61, chunk)
    ]
    found = np.concatenate(scores, axis=1)
    if chunk == 7:
        figure("families", name, "chunks", np.abs(found - want["logits"]).max())
    np.testing.assert_allclose(found, want["logits"], atol=2e-4, rtol=0)


def test_sequences_at_different_stages_share_a_step(loaded, name):
    """One decodes, one verifies 5 tokens, one is in the middle of its prompt."""
    want = golden(name)
    ids, run = want["input_ids"].tolist(), PagedRun(loaded, 3)
    run.step([ids[0][:60], ids[1][:50], ids[2][:20]])
    scores = run.step([ids[0][60:], ids[1][50:55], ids[2][20:]])
    for s, rows in enumerate([slice(60, 61), slice(50, 55), slice(20, 61)]):
        np.testing.assert_allclose(scores[s], want["logits"][s, rows], atol=2e-4, rtol=0)


@pytest.mark.parametrize(("implementation", "name"), EVERY_MODEL, indirect=["name"])
def test_greedy_decoding_matches_hugging_face_tokens(loaded, name, implementation, figure):
    want = golden(name)
    steps = want["greedy_ids"].shape[1]
    run = PagedRun(loaded, 3, implementation=implementation)
    scores, output = run.step(want["input_ids"].tolist()), []
    for _ in range(steps):
        output.append([int(rows[-1].argmax()) for rows in scores])
        scores = run.step([[token] for token in output[-1]])
    if implementation == "xla":
        same = (want["greedy_ids"] == np.array(output).T).sum()
        figure("families", name, "greedy", f"{same} of {want['greedy_ids'].size}")
    np.testing.assert_array_equal(np.array(output).T, want["greedy_ids"])


def test_trained_model_writes_the_expected_story(stories):
    tokenizer = Tokenizer.from_file(str(stories.folder / "tokenizer.json"))
    ids = tokenizer.encode("Once upon a time").ids
    ids = ids if ids[0] == 1 else [1, *ids]
    prompt, run = len(ids), PagedRun(stories, 1)
    scores = run.step([ids])
    while len(tokenizer.decode(ids[prompt:])) < len(STORY):
        ids.append(int(scores[0][-1].argmax()))
        scores = run.step([[ids[-1]]])
    assert tokenizer.decode(ids) == "Once upon a time" + STORY


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.quick_cases(1)
def test_16_bit_models_stay_close_to_float32(stories, dtype):
    half = forge_jax.load(str(stories.folder), dtype=dtype, progress=False)
    assert {leaf.dtype for leaf in half.leaves} == {jnp.dtype(dtype)}
    ids = np.random.default_rng(0).integers(0, 512, 40).tolist()
    run = PagedRun(half, 1)
    if jax.default_backend() == "cpu":
        assert {layer.dtype for layer in run.kv} == {jnp.dtype(jnp.uint16)}
    ours = np.concatenate([*run.step([ids[:33]]), *run.step([ids[33:39]]), *run.step([ids[39:]])])
    exact = PagedRun(stories, 1).step([ids])[0]
    error = np.linalg.norm(ours - exact) / np.linalg.norm(exact)
    assert 1e-5 < error < (0.03 if dtype == "bfloat16" else 0.004)


def test_residual_stream_can_be_read(stories):
    model, T = stories.model, 9
    at = jnp.arange(T)
    forward = partial(model.forward, implementation="reference", return_hidden_states=True)
    kv, hidden, stream = jax.jit(forward)(
        stories.leaves, forge_jax.new_kv(stories, 2, 16), at, at, at,
        jnp.arange(2)[None], jnp.asarray([T]), jnp.asarray([0, T]), jnp.int32(1),
    )  # fmt: skip
    assert len(stream) == stories.spec.num_hidden_layers + 1 and len(kv) == len(stream) - 1
    np.testing.assert_array_equal(stream[0], np.asarray(stories.leaf("head.weight"))[:T])
    np.testing.assert_allclose(model.final_norm(stories.leaves, stream[-1]), hidden, atol=1e-5)


@pytest.mark.parametrize(("kv", "least", "most"), [("int8", 0.01, 0.04), ("fp8", 0.05, 0.2)])
@pytest.mark.quick_cases(1)
def test_8_bit_caches_stay_close_to_hugging_face_logits(kv, least, most):
    """Bounds are half and twice the measurement: 0.02 for int8, 0.11 for fp8, random weights."""
    loaded = forge_jax.load(str(FIXTURES / "goldens" / "llama31"), progress=False)
    want = golden("llama31")
    ids, run = want["input_ids"].tolist(), PagedRun(loaded, 3, kv=kv)
    first, last = run.step([row[:40] for row in ids]), run.step([row[40:] for row in ids])
    ours = np.concatenate([np.stack(first), np.stack(last)], axis=1)
    assert least < np.linalg.norm(ours - want["logits"]) / np.linalg.norm(want["logits"]) < most


@pytest.mark.full_compile
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="traps of XLA:CPU")
@pytest.mark.parametrize(
    ("seqs", "storage"), [(1, "uint16"), (16, "uint16"), (1, "int8"), (16, "uint8")]
)
@pytest.mark.quick_cases(1)
def test_decode_step_copies_neither_weights_nor_cache(seqs, storage):
    """Compiled from shapes alone; a slow path of XLA:CPU appears as temporary bytes."""
    spec = forge_jax.models.ModelSpec(
        architecture="LlamaForCausalLM",
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=2048,
        norm_eps=1e-5,
        rope=forge_jax.models.RopeSpec(),
        tie_word_embeddings=True,
        dtype="bfloat16",
        bos_token_id=1,
        eos_token_ids=(2,),
    )
    model = forge_jax.models.build_model(spec)
    assert model.param_bytes == 2 * (
        4096 * 512 + 512 + 2 * (16 * 64 * 512 + 512 * 512 + 3 * 1408 * 512 + 2 * 512)
    )
    kv = (kv_shape_dtype((1024, 2, 4, 16, 64), storage),) * 2
    i32 = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)

    def step(leaves, kv, *arrays):
        kv, hidden = model.forward(leaves, kv, *arrays, max_q_len=1)
        return kv, model.logits(leaves, hidden)

    compiled = (
        jax.jit(step, donate_argnums=1)
        .lower(
            model.leaves, kv, i32((seqs,)), i32((seqs,)), i32((seqs,)),
            i32((seqs, 128)), i32((seqs,)), i32((seqs + 1,)), i32(()),
        )
        .compile()
    )  # fmt: skip
    memory = compiled.memory_analysis()
    temp, arrays = memory.temp_size_in_bytes, jax.tree.leaves(kv)
    kv_bytes = sum(array.size * array.dtype.itemsize for array in arrays)
    assert temp < model.param_bytes / 3 and temp < kv_bytes / 4
    assert memory.alias_size_in_bytes >= kv_bytes
