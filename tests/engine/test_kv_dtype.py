"""`--kv-dtype`: twice the tokens in the same memory, with nearly the same predictions."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import logging
import math
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks import kv_dtype as benchmark
from benchmarks import report as reports
from forge_jax import LLM, SamplingParams
from forge_jax.config import EngineConfig
from forge_jax.engine import builder as assemble
from forge_jax.engine import sizes as sizes_module
from forge_jax.engine.sizes import Residents, Sizes
from forge_jax.errors import ConfigError
from forge_jax.models.kv import PagedLayout, element_dtype
from forge_jax.step.kv_cache import GIB, KVShape, coarse, kv_shape
from forge_jax.testing import core_of, failing_steps, tiny_model
from forge_kernels import cpu
from forge_kernels.attention import QuantizedKV
from forge_kernels.attention import api as attention_api

EIGHT_BITS = ("int8", "fp8")
CHOICES = ("auto", *EIGHT_BITS)
OPTIONS = {"max_num_seqs": 4, "deterministic": True, "max_model_len": 448}
PROMPTS = [f"Once upon a time there was a little {animal} " * 4 for animal in ("dog", "cat")]
PARAMS = [
    SamplingParams(max_tokens=40, temperature=0.7 * i, seed=i, logprobs=2, ignore_eos=True)
    for i in range(len(PROMPTS))
]


@pytest.fixture(scope="module")
def make_llm():
    """Return the bundled model by the type of its cache."""
    return functools.cache(lambda kv_dtype: LLM("forge-tiny", kv_dtype=kv_dtype, **OPTIONS))


# ---- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "head_dim", "more"), [("bfloat16", 64, 128 / 68), ("float32", 32, 128 / 36)]
)
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_8_bit_block_size_matches_its_arrays(dtype, head_dim, more, platform):
    model = tiny_model(dtype=dtype, head_dim=head_dim)

    def shape(kv_dtype: str):
        return kv_shape(
            model.spec,
            num_blocks=10,
            block_size=16,
            dtype=element_dtype(kv_dtype, model.dtype),
            platform=platform,
        )

    for kv_dtype in CHOICES:
        kv = shape(kv_dtype).empty()
        assert sum(array.nbytes for array in jax.tree.leaves(kv)) == shape(kv_dtype).total_bytes
        assert isinstance(kv[0], QuantizedKV) == (kv_dtype != "auto")
        assert shape(kv_dtype).block_bytes == shape(kv_dtype).total_bytes // 10
        assert shape("auto").block_bytes / shape(kv_dtype).block_bytes == pytest.approx(
            1 if kv_dtype == "auto" else more
        )


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_cpu_kernel_cache_takes_memory_on_first_use():
    if not cpu.available():
        pytest.skip("no CPU kernels on this machine")
    storage = np.dtype(np.uint16)
    shape = KVShape(
        layouts=(PagedLayout(heads=32, dim=64),) * 2, num_blocks=512, block_size=16, storage=storage
    )

    def resident() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

    make = jax.jit(partial(shape.empty, untouched=True)).lower().compile()
    before = resident()
    kv = jax.block_until_ready(make())
    assert resident() - before < shape.total_bytes / 8
    assert len({layer.unsafe_buffer_pointer() for layer in kv}) == 2
    assert sum(layer.nbytes for layer in kv) == shape.total_bytes


def test_same_memory_holds_nearly_twice_the_8_bit_blocks(monkeypatch):
    model = tiny_model(dtype="bfloat16", head_dim=64)
    monkeypatch.setattr(
        sizes_module, "available_host_bytes", lambda: 10_000_000 + model.param_bytes
    )
    blocks, most = {}, {}
    for kv_dtype in CHOICES:
        config = EngineConfig.from_options(kv_dtype=kv_dtype, max_num_seqs=4096)
        residents = Residents(config=config, model=model, device=jax.devices()[0])
        sizes = Sizes.choose(residents)
        blocks[kv_dtype] = sizes.kv.num_blocks
        assert blocks[kv_dtype] == coarse(2_500_000 // sizes.kv.block_bytes)
        smaller = sizes.smaller(config, 1_000_000).kv
        assert sizes.kv.total_bytes - smaller.total_bytes >= 1_000_000
        too_many = dataclasses.replace(config.cache, num_blocks=10**9)
        with pytest.raises(ConfigError, match=r"--num-blocks.* at most [0-9]+ blocks fit") as error:
            Sizes.choose(
                dataclasses.replace(residents, config=dataclasses.replace(config, cache=too_many))
            )
        most[kv_dtype] = int(str(error.value).split("at most ")[1].split()[0])
    assert most["int8"] == most["fp8"] == pytest.approx(128 / 68 * most["auto"], rel=1e-3)
    assert blocks["int8"] == blocks["fp8"] > 1.7 * blocks["auto"]


@pytest.mark.parametrize(
    ("seqs", "free_gib", "gib"),
    [
        (16, 100, 0.5),  # the minimum
        (256, 100, 1.0),  # 1,024 tokens per sequence
        (4096, 100, 2.0),  # the maximum
        (256, 2, 0.5),  # a quarter of the available memory
    ],
)
def test_default_cache_on_a_cpu_is_1024_tokens_per_sequence(seqs, free_gib, gib, monkeypatch):
    model = tiny_model(dtype="bfloat16", head_dim=256, max_position_embeddings=1 << 16)
    of_token = 2 * model.spec.num_hidden_layers * model.spec.num_key_value_heads * 256 * 2
    assert of_token == 4096
    available = free_gib * GIB + model.param_bytes
    monkeypatch.setattr(sizes_module, "available_host_bytes", lambda: available)
    config = EngineConfig.from_options(max_num_seqs=seqs)
    residents = Residents(config=config, model=model, device=jax.devices()[0])
    assert Sizes.choose(residents).kv.total_bytes == gib * GIB


# ---- the whole engine ----------------------------------------------------------------------------


@pytest.mark.full_compile
@pytest.mark.parametrize("kv_dtype", EIGHT_BITS)
@pytest.mark.slow
def test_batches_prefix_hits_and_failures_do_not_change_bits(make_llm, kv_dtype):
    llm = make_llm(kv_dtype)
    core = core_of(llm)
    alone = [
        llm.generate(prompt, params, progress=False)[0].outputs
        for prompt, params in zip(PROMPTS, PARAMS, strict=True)
    ]
    together = llm.generate(PROMPTS, PARAMS, progress=False)
    assert [output.outputs for output in together] == alone
    assert all(output.num_cached_tokens for output in together)
    with failing_steps(core, lambda plan, where: plan.step % 15 == 0):
        again = llm.generate(PROMPTS, PARAMS, progress=False)
    assert [output.outputs for output in again] == alone
    assert core.num_recoveries > 2


def test_fingerprint_depends_on_the_kv_dtype(make_llm):
    assert len({make_llm(kv_dtype).system_fingerprint for kv_dtype in CHOICES}) == 3


@pytest.mark.parametrize("kv_dtype", EIGHT_BITS)
def test_cpu_kernels_attend_over_the_8_bit_cache(make_llm, kv_dtype, caplog):
    if not cpu.available():
        pytest.skip("no CPU kernels on this machine")
    runner = core_of(make_llm(kv_dtype)).device
    assert runner.options.implementation == "cpu" and runner.options.sampler == "cpu"
    config = EngineConfig.from_options(kv_dtype=kv_dtype)
    with caplog.at_level(logging.INFO):
        kernels = assemble.choose_kernels(config, runner.model.spec, jax.devices()[0])
    assert kernels.attention == "cpu" and not caplog.messages


@pytest.mark.full_compile
@pytest.mark.parametrize("kv_dtype", EIGHT_BITS)
def test_step_updates_the_cache_arrays_in_place(make_llm, kv_dtype):
    """Includes the scales: nothing is allocated twice."""
    runner = core_of(make_llm(kv_dtype)).device
    [step] = [each for name, each in runner.compiled().items() if "[" in name]
    assert step.memory_analysis().alias_size_in_bytes >= runner.options.kv_shape.total_bytes


@pytest.mark.slow
def test_contiguous_8_bit_blocks_give_the_same_story(stories):
    options = {"max_num_seqs": 2, "max_model_len": 128, "deterministic": True}
    llm = LLM(stories, kv_dtype="int8", kv_cache="contiguous", **options)
    assert core_of(llm).device.state.kv[0].shape[3] == 128
    greedy = SamplingParams(max_tokens=12, temperature=0)
    [output] = llm.generate("Once upon a time", greedy, progress=False)
    assert output.text.startswith(", there was a little girl")


def test_unknown_kv_dtype_is_named_with_the_choices():
    with pytest.raises(ConfigError, match="kv_dtype must be one of auto, fp8, int8, not 'fp4'"):
        LLM("forge-tiny", kv_dtype="fp4")


# ---- predictions ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    """Return documents that the bundled model was not trained on: 3,800 predictions."""
    return benchmark.held_out(100)


@pytest.fixture(scope="module")
def exact(make_llm, texts) -> np.ndarray:
    return benchmark.log_likelihoods(make_llm("auto"), texts)


def more_perplexity(llm: LLM, texts: list[list[int]], exact: np.ndarray) -> float:
    """Return the relative increase of the perplexity over that with the model's own type."""
    return math.expm1((exact - benchmark.log_likelihoods(llm, texts)).mean())


@pytest.mark.parametrize(("kv_dtype", "most"), [("int8", 0.002), ("fp8", 0.002)])
@pytest.mark.quick_cases(1)
def test_8_bit_cache_predicts_as_well_as_16_bits(make_llm, texts, exact, kv_dtype, most):
    assert abs(more_perplexity(make_llm(kv_dtype), texts, exact)) < most


def test_kv_dtype_benchmark_writes_its_table(make_llm, monkeypatch):
    monkeypatch.setattr(benchmark, "OUTPUT", 4)
    args = argparse.Namespace(model="forge-tiny", texts=9, rounds=1, contexts=[16, 10**6])
    report = benchmark.compare({name: make_llm(name) for name in CHOICES}, args)
    auto, *others = report["rows"]
    assert auto["bytes_per_token"] == 6 * 2 * 2 * 64 * 2
    assert {row["kv_dtype"] for row in others} == set(EIGHT_BITS)
    assert all(row["bytes_per_token"] == 6 * 2 * 2 * 68 for row in others)
    for row in report["rows"]:
        assert list(row["tokens_per_s"]) == [16] and row["tokens_per_s"][16] > 0
    table = benchmark.markdown({**reports.new("kv_dtype", model="forge-tiny"), **report})
    assert "| int8 | 1,632 |" in table


@pytest.mark.slow
def test_wrong_scale_is_detected_in_the_perplexity(monkeypatch, texts, exact):
    right = attention_api.quantize_rows

    def wrong(rows, dtype):
        data, scale = right(rows, dtype)
        return data, 1.1 * scale

    monkeypatch.setattr(attention_api, "quantize_rows", wrong)
    llm = LLM("forge-tiny", kv_dtype="int8", **OPTIONS)
    assert more_perplexity(llm, texts, exact) > 0.002
