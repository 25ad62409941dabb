"""`--host-kv-gib`: evicted blocks are kept in host memory, and come back with the same bits."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from typing import Any

import jax
import numpy as np
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from safetensors.numpy import load_file

from forge_jax import LLM, ConfigError, Engine, EngineConfig, SamplingParams
from forge_jax.engine import sizes as sizes_module
from forge_jax.engine.process.totals import total_stats
from forge_jax.models.kv import PagedLayout, element_dtype
from forge_jax.schedule.host_tier import Transfers
from forge_jax.step.host_blocks import BATCH, load_blocks, save_blocks
from forge_jax.step.kv_cache import GIB, KVShape
from forge_jax.testing import core_of, failing_steps
from forge_kernels.attention import kv_storage_dtype
from forge_serve.telemetry.engine_metrics import EngineCollector

SIZES: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "max_model_len": 128,
    "block_size": 8,
    "deterministic": True,
}
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, logprobs=1, ignore_eos=True)
PROMPT_BLOCKS = 6


def prompts(count: int = 10) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, 500) for _ in range(8 * PROMPT_BLOCKS + 1)] for _ in range(count)]


def outputs(llm: LLM, rounds: int) -> list[Any]:
    """Return the tokens and logprobs of prompts that run together, several times."""
    found = [llm.generate(prompts(), GREEDY) for _ in range(rounds)]
    return [[(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in each] for each in found]


@pytest.fixture(scope="module")
def expected(short_stories):
    """Return the outputs of an engine whose cache holds everything."""
    with LLM(str(short_stories), num_blocks=256, **SIZES) as llm:
        return outputs(llm, 1)[0]


@pytest.fixture(scope="module")
def llm(short_stories):
    """Return an engine with blocks for two prompts, and host memory for all of them."""
    with LLM(str(short_stories), num_blocks=18, host_kv_gib=0.001, **SIZES) as llm:
        yield llm


# ---- bits ----------------------------------------------------------------------------------------

LAYOUTS = {
    "keys and values": PagedLayout(heads=2, dim=8),
    "latent": PagedLayout(planes=1, heads=1, dim=24),
}


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        *[("keys and values", dtype) for dtype in ("float32", "bfloat16", "int8", "fp8")],
        ("latent", "bfloat16"),
    ],
)
def test_copied_blocks_have_the_same_bits_in_every_cache(dtype, layout, platform):
    quantized = dtype in ("int8", "fp8")
    element = element_dtype(dtype if quantized else "auto", "bfloat16" if quantized else dtype)
    layouts = (LAYOUTS[layout], dataclasses.replace(LAYOUTS[layout], shares=0), LAYOUTS[layout])
    shape = KVShape(
        layouts=layouts, num_blocks=20, block_size=8, storage=kv_storage_dtype(element, platform)
    )
    rng = np.random.default_rng(0)

    def filled() -> Any:
        """Return random bits: among the floats are NaNs."""
        return jax.tree.map(
            lambda a: jax.numpy.asarray(
                np.frombuffer(rng.bytes(a.nbytes), a.dtype).reshape(a.shape)
            ),
            shape.empty(),
        )

    source, target = filled(), filled()
    saved = np.full(BATCH, 20, np.int32)
    saved[:3] = 7, 0, 19
    loaded = np.full(BATCH, 20, np.int32)
    loaded[:3] = 2, 19, 5
    rows = jax.jit(save_blocks)(source, saved)
    assert {row.shape for row in rows} == {(1, shape.block_bytes)}
    result = jax.jit(load_blocks)(target, loaded, *rows)
    for before, have, want in zip(*map(jax.tree.leaves, (target, result, source)), strict=True):
        right = np.array(before)
        right[loaded[:3]] = np.asarray(want)[saved[:3]]
        assert np.asarray(have).tobytes() == right.tobytes()


@pytest.mark.full_compile
def test_loads_update_the_cache_in_place():
    layouts = (LAYOUTS["keys and values"],) * 2
    shape = KVShape(layouts=layouts, num_blocks=4096, block_size=8, storage=np.dtype("uint16"))
    blocks = jax.ShapeDtypeStruct((BATCH,), np.int32)
    row = jax.ShapeDtypeStruct((1, shape.block_bytes), np.uint8)
    args = (shape.layers, blocks, *[row] * BATCH)
    load = jax.jit(load_blocks, donate_argnums=0).lower(*args).compile().memory_analysis()
    save = jax.jit(save_blocks).lower(shape.layers, blocks).compile().memory_analysis()
    assert load is not None and save is not None
    assert load.alias_size_in_bytes == shape.total_bytes
    assert max(load.temp_size_in_bytes, save.temp_size_in_bytes) < shape.total_bytes / 100


def test_outputs_have_the_bits_of_a_large_cache(llm, expected):
    assert outputs(llm, 3) == [expected] * 3
    pool = core_of(llm).scheduler.pool
    assert pool.host is not None
    assert pool.host.num_loaded > 2 * PROMPT_BLOCKS
    assert pool.num_used == 0
    pool.check()
    pool.host.check()


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.slow
def test_packed_caches_come_back_with_the_same_bits(kv_dtype):
    options = {"kv_dtype": kv_dtype, **SIZES}
    with LLM("forge-tiny", num_blocks=256, **options) as large:
        right = outputs(large, 1)[0]
    with LLM("forge-tiny", num_blocks=18, host_kv_gib=0.01, **options) as llm:
        assert outputs(llm, 3) == [right] * 3
        assert core_of(llm).scheduler.pool.host.num_loaded  # type: ignore[union-attr]


def test_a_wrong_copy_changes_the_output(llm, expected):
    outputs(llm, 1)
    memory = core_of(llm).host_memory
    assert memory is not None
    memory.finished()
    for number, copy in memory._copies.items():  # type: ignore[attr-defined]
        wrong = np.asarray(copy).copy()
        wrong[:, ::4] ^= 0x55
        memory._copies[number] = jax.device_put(wrong, copy.sharding)  # type: ignore[attr-defined]
    try:
        assert outputs(llm, 1) != [expected]
    finally:
        core_of(llm).empty_prefix_cache()


def test_copies_and_loads_compile_nothing_while_steps_run(llm):
    before = llm._parts.compilations()
    outputs(llm, 2)
    assert llm._parts.compilations() == before == 0


def test_cached_tokens_of_a_request_include_loaded_ones(llm):
    outputs(llm, 2)
    host = core_of(llm).scheduler.pool.host
    assert host is not None
    loaded = host.hit_tokens
    [first] = llm.generate([prompts()[0]], GREEDY)
    assert first.num_cached_tokens == 8 * PROMPT_BLOCKS
    assert host.hit_tokens - loaded == 8 * PROMPT_BLOCKS


OWN_LABELS = ("state", "direction")


async def test_metrics_count_hits_by_tier(short_stories):
    options = EngineConfig.from_options(
        model=str(short_stories), num_blocks=18, host_kv_gib=0.001, **SIZES
    )
    engine = await asyncio.to_thread(Engine.load, options)
    engine.start()
    try:
        for prompt in prompts(4) * 2:
            async for _ in engine.generate(prompt, GREEDY):
                pass
        stats = engine.stats()
        text = generate_latest(EngineCollector(lambda: "m", lambda: engine, lambda: "ready"))
    finally:
        await engine.stop()
    host, tokens = stats.host_kv, 8 * PROMPT_BLOCKS
    assert host is not None
    both = total_stats([stats, stats]).host_kv
    assert both is not None and both.hit_tokens == 2 * host.hit_tokens > 0
    block_bytes = host.loaded_bytes * 8 // host.hit_tokens
    values = {
        f"{family.name}{[v for k, v in sample.labels.items() if k in OWN_LABELS]}": sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if "host_kv" in sample.name or "prefix_cache" in sample.name
    }
    hits = values["vllm:external_prefix_cache_hits[]"]
    assert hits + values["vllm:prefix_cache_hits[]"] == 4 * tokens
    assert hits >= 3 * tokens
    assert values["vllm:external_prefix_cache_queries[]"] == 8 * (tokens + 1) - (4 * tokens - hits)
    assert values["forge:host_kv_bytes['in']"] == hits / 8 * block_bytes
    assert values["forge:host_kv_bytes['out']"] >= values["forge:host_kv_bytes['in']"]
    assert values["forge:host_kv_blocks['stored']"] == host.num_blocks
    assert values["forge:host_kv_wait_seconds[]"] > 0
    assert values["forge:host_kv_blocks_lost[]"] == 0


# ---- what drops the copies -----------------------------------------------------------------------


def copies(llm: LLM) -> int:
    return len(core_of(llm).host_memory._copies)  # type: ignore[union-attr]


def test_emptied_prefix_cache_has_no_copies(llm, expected):
    outputs(llm, 2)
    assert copies(llm) > 2 * PROMPT_BLOCKS
    core_of(llm).empty_prefix_cache()
    assert copies(llm) == 0
    host = core_of(llm).scheduler.pool.host
    hits = host.hit_tokens
    llm.generate([prompts()[0]], GREEDY)
    assert host.hit_tokens == hits


def test_failed_step_drops_the_copies_and_requests_continue(llm, expected):
    outputs(llm, 2)
    with failing_steps(core_of(llm), lambda plan, when: plan.step % 29 == 5) as failing:
        assert outputs(llm, 2) == [expected] * 2
    assert failing.num_failures
    assert outputs(llm, 2) == [expected] * 2


def test_failed_copy_is_a_failed_step(llm, expected, monkeypatch):
    memory = core_of(llm).host_memory
    start, failures = type(memory).start, []

    def fail_once(self: Any, transfers: Transfers) -> None:
        if transfers.loads and not failures:
            failures.append(transfers)
            raise RuntimeError("injected: a copy fails")
        start(self, transfers)

    outputs(llm, 2)
    monkeypatch.setattr(type(memory), "start", fail_once)
    assert outputs(llm, 3) == [expected] * 3
    assert failures
    core_of(llm).scheduler.pool.check()


def test_new_weights_drop_the_copies(llm, short_stories, expected):
    outputs(llm, 2)
    tensors = load_file(short_stories / "model.safetensors")
    assert copies(llm)
    llm.update_weights({name: 1.01 * tensor for name, tensor in tensors.items()})
    assert copies(llm) == 0
    changed = outputs(llm, 3)
    assert changed[0] != expected and changed == [changed[0]] * 3
    llm.update_weights(tensors)
    assert outputs(llm, 2) == [expected] * 2


# ---- the option ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host_kv_gib": -1.0}, "host_kv_gib must be a number of GiB"),
        ({"host_kv_gib": float("nan")}, "host_kv_gib must be a number of GiB"),
        (
            {"host_kv_gib": 1.0, "prefix_cache": False},
            "host_kv_gib keeps blocks of the prefix cache",
        ),
        ({"host_kv_gib": 1.0, "kv_cache": "contiguous"}, "host_kv_gib keeps blocks of the paged"),
        (
            {
                "host_kv_gib": 1.0,
                "speculation": "draft",
                "draft_model": "self",
                "draft_layers": 1,
            },
            "host_kv_gib does not keep",
        ),
        (
            {
                "host_kv_gib": 1.0,
                "num_hosts": 2,
                "tensor_parallel": 2,
                "coordinator": "127.0.0.1:1",
            },
            "host_kv_gib does not work with",
        ),
    ],
)
def test_impossible_combination_is_rejected(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_options(model="forge-tiny", **options)


def test_budget_must_fit_the_host_and_hold_a_block(short_stories, monkeypatch):
    with pytest.raises(ConfigError, match="is less than one KV cache block"):
        LLM(str(short_stories), host_kv_gib=1e-9, **SIZES)
    monkeypatch.setattr(sizes_module, "available_host_bytes", lambda: 3 * GIB)
    with pytest.raises(ConfigError, match=r"host_kv_gib=4 is more than .* of [0-3]\.\d GiB"):
        LLM(str(short_stories), host_kv_gib=4.0, num_blocks=18, **SIZES)


def test_vllms_name_sets_the_option():
    config = EngineConfig.from_options(model="forge-tiny", kv_offloading_size=2.0)
    assert config.cache.host_kv_gib == 2.0
