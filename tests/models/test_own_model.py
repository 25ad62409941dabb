"""The example package `examples/own_model`: a family with its own decoder, found by entry point."""

import json
import os
import shutil
import subprocess
import sys
import urllib.request

import numpy as np
import pytest
from paged import PagedRun
from safetensors.numpy import save_file

import forge_jax
from forge_jax.checkpoint.load import load_weights
from forge_jax.checkpoint.model_spec import read_spec
from forge_jax.models import build_model
from forge_jax.models.plugins import architecture_names
from forge_jax.research import LoadedModel
from forge_jax.testing import core_of
from forge_jax.weights.formats import WeightFormats
from forge_kernels import cpu
from tests.server_process import ROOT, serving

TOKENIZER = ROOT / "tests/fixtures/stories260k-hf/tokenizer.json"
V, D, H, K, DIM, INNER, LAYERS = 512, 64, 4, 2, 16, 96, 2
SHORTCUT = 0.3


@pytest.fixture(scope="module", autouse=True)
def packages(tmp_path_factory):
    """Install the example as pip does, into a folder on the path."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("packages")
    shutil.copytree(ROOT / "examples/own_model", source / "own_model")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--target", str(target)]
    subprocess.run([*pip, *options, str(source / "own_model")], check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(target)
        patch.setenv("PYTHONPATH", f"{target}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        yield target


@pytest.fixture(scope="module")
def tensors():
    rng = np.random.default_rng(0)
    shapes = {"embedding": (V, D), "norm": (D,)}
    for layer in range(LAYERS):
        parts = {"norm": (D,), "q": (H * DIM, D), "k": (K * DIM, D), "v": (K * DIM, D)}
        parts |= {"gate": (INNER, D), "up": (INNER, D)}
        parts |= {"attention_out": (D, H * DIM), "mlp_out": (D, INNER)}
        shapes |= {f"layers.{layer}.{part}": shape for part, shape in parts.items()}
    return {
        f"{name}.weight": (
            1 + 0.2 * rng.standard_normal(shape)
            if name.endswith("norm")
            else 0.15 * rng.standard_normal(shape)
        ).astype(np.float32)
        for name, shape in shapes.items()
    }


@pytest.fixture(scope="module")
def folder(tensors, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tandem")
    config = {
        **{"architectures": ["TandemForCausalLM"], "vocab_size": V, "hidden_size": D},
        **{"num_attention_heads": H, "num_key_value_heads": K, "intermediate_size": INNER},
        **{"num_hidden_layers": LAYERS, "max_position_embeddings": 96},
        **{"embedding_shortcut": SHORTCUT, "dtype": "float32"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    shutil.copy(TOKENIZER, folder)
    return folder


def reference(tensors: dict[str, np.ndarray], ids: list[int]) -> np.ndarray:
    """Return f64[T, V]: the model on one whole sequence, from its description alone."""
    w = {name.removesuffix(".weight"): value.astype(np.float64) for name, value in tensors.items()}

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight

    def rotated(x):  # [T, heads, DIM]
        angles = np.arange(len(x))[:, None] * 1e4 ** -(np.arange(DIM // 2) * 2 / DIM)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    x = embedded = w["embedding"][ids]
    T = len(ids)
    for layer in range(LAYERS):
        x = x + SHORTCUT * embedded
        n = norm(x, w[f"layers.{layer}.norm"])
        q, k, v, gate, up = (
            n @ w[f"layers.{layer}.{part}"].T for part in ("q", "k", "v", "gate", "up")
        )
        q = rotated(q.reshape(T, H, DIM))
        k, v = (np.repeat(part.reshape(T, K, DIM), H // K, axis=1) for part in (k, v))
        scores = np.einsum("thd,shd->hts", q, rotated(k)) / np.sqrt(DIM)
        scores = np.where(np.tri(T, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        heads = np.einsum("hts,shd->thd", weights, v).reshape(T, H * DIM)
        x = x + heads @ w[f"layers.{layer}.attention_out"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"layers.{layer}.mlp_out"].T
    return norm(x, w["norm"]) @ w["embedding"].T


def greedy(tensors: dict[str, np.ndarray], prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(reference(tensors, ids)[-1].argmax()))
    return ids[len(prompt) :]


PROMPTS = [np.random.default_rng(i).integers(3, V, 40).tolist() for i in range(3)]


@pytest.mark.parametrize("chunk", [40, 7, 1])
def test_logits_match_a_reference_whole_and_in_chunks(folder, tensors, chunk):
    assert "TandemForCausalLM" in architecture_names()
    loaded = forge_jax.load(str(folder), progress=False)
    run = PagedRun(loaded, len(PROMPTS))
    scores = [
        np.stack(run.step([ids[start : start + chunk] for ids in PROMPTS]))
        for start in range(0, 40, chunk)
    ]
    want = [reference(tensors, ids) for ids in PROMPTS]
    np.testing.assert_allclose(np.concatenate(scores, axis=1), want, atol=2e-4, rtol=0)


def test_reference_detects_a_missing_shortcut(folder, tensors, monkeypatch):
    run = PagedRun(forge_jax.load(str(folder), progress=False), 1)
    (scores,) = run.step([PROMPTS[0]])
    monkeypatch.setitem(globals(), "SHORTCUT", 0.0)
    assert np.abs(scores - reference(tensors, PROMPTS[0])).max() > 0.1


@pytest.mark.skipif(not cpu.available(), reason="no CPU kernels on this machine")
def test_packed_and_rounded_matrices_stay_close_to_the_reference(
    folder, tensors, compilation_cache
):
    want = np.stack([reference(tensors, ids) for ids in PROMPTS])
    for formats, dtype, bound in (
        (WeightFormats(layers="bf16", head="bf16"), "bfloat16", 0.04),
        (WeightFormats(rounded="int8"), "float32", 0.04),
        (WeightFormats(rounded="int4"), "float32", 0.4),
    ):
        model = build_model(read_spec(folder), dtype, formats)
        loaded = LoadedModel(model, load_weights(model, folder, progress=False), folder)
        found = np.stack(PagedRun(loaded, len(PROMPTS)).step(PROMPTS))
        error = np.linalg.norm(found - want) / np.linalg.norm(want)
        assert 1e-4 < error < bound, formats


def test_preempted_sequences_continue_with_the_references_tokens(folder, tensors):
    """Two sequences of 80 tokens need 10 blocks, so 9 blocks force preemptions."""
    llm = forge_jax.LLM(
        str(folder), max_num_seqs=3, block_size=16, num_blocks=9, max_model_len=80,
        enable_prefix_caching=False, max_num_batched_tokens=32,
    )  # fmt: skip
    with llm:
        params = forge_jax.SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        outputs = llm.generate(PROMPTS, params)
        assert core_of(llm).scheduler.num_preemptions > 0
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == greedy(tensors, prompt, 40)


def test_server_finds_the_family_in_every_process(folder, tensors):
    flags = ("--engine-process", "--max-num-seqs", "2", "--num-blocks", "16")
    with serving(sys.executable, str(folder), *flags) as (url, model, _):
        body = {"model": model, "prompt": PROMPTS[0], "max_tokens": 8, "temperature": 0}
        body |= {"logprobs": 0, "return_tokens_as_token_ids": True}
        request = urllib.request.Request(
            f"{url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            (choice,) = json.load(response)["choices"]
    want = [f"token_id:{token}" for token in greedy(tensors, PROMPTS[0], 8)]
    assert choice["logprobs"]["tokens"] == want
