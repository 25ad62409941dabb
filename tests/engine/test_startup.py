"""The time from serving to ready: steps run on the compiled shapes without waiting for others."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import itertools
import logging
import os
import stat
import threading
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from forge_jax import LLM, Engine, SamplingParams
from forge_jax.config import EngineConfig
from forge_jax.engine import builder as assemble
from forge_jax.engine import compile_cache as cache_folder
from forge_jax.engine.compile_cache import ENTRIES
from forge_jax.errors import ConfigError
from forge_jax.step.executables import Executables
from forge_jax.step.inputs import StepShape
from forge_jax.step.kv_cache import GIB
from forge_jax.step.options import GPU_OPTIONS, SHARED_COMMAND_BUFFERS, compiler_options
from forge_jax.step.step_shapes import decode_sizes, first_shapes, step_limits, step_shapes
from forge_jax.telemetry import compilations
from forge_jax.telemetry.startup import StartupTimes
from forge_jax.testing import core_of

LATE = ["decode[4]", "decode[8]", "mixed[128]"]
OPTIONS = {"max_num_seqs": 8, "max_num_batched_tokens": 128, "dtype": "bfloat16"}
# Parameters for which some step must do more.
ODD = [
    ([7] * 100, SamplingParams(max_tokens=6, n=5, logprobs=20, seed=1)),
    ([9] * 33, SamplingParams(max_tokens=9, temperature=0, prompt_logprobs=20)),
    ([3], SamplingParams(max_tokens=12, presence_penalty=1.5, frequency_penalty=0.5, seed=2)),
    ([3, 4], SamplingParams(max_tokens=12, repetition_penalty=1.3, top_k=5, min_p=0.1, seed=3)),
    ([5], SamplingParams(max_tokens=9, temperature=0, logit_bias={17: 100.0, 3: -100.0})),
    ([6], SamplingParams(max_tokens=20, min_tokens=8, top_p=0.5, stop_token_ids=(17,), seed=4)),
    ([1, 403], SamplingParams(max_tokens=60, temperature=0, stop=("the", "girl"))),
    ([8] * 250, SamplingParams(max_tokens=1, temperature=0)),
]


class Held:
    """Holds back the executables that an engine can start without."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.compiled = threading.Semaphore(0)

    async def all_compiled(self) -> None:
        for _ in LATE:
            assert await asyncio.to_thread(self.compiled.acquire, timeout=60)


@pytest.fixture(scope="module")
def stories(short_stories):
    return short_stories


@pytest.fixture
def held(monkeypatch):
    held, compile_ = Held(), Executables._compile

    def compile_and_hold(self, name, lowered):
        compiled = compile_(self, name, lowered)
        if name in LATE:
            held.compiled.release()
            assert held.released.wait(180)
        return compiled

    monkeypatch.setattr(Executables, "_compile", compile_and_hold)
    # All of them wait at the same time, on any number of cores.
    monkeypatch.setattr(os, "cpu_count", lambda: len(LATE) + 2)
    yield held
    held.released.set()


def config(stories, **options) -> EngineConfig:
    return EngineConfig.from_options(model=str(stories), **OPTIONS | options)


async def outputs(engine: Engine, requests, prefix: str = "r") -> list:
    """Return token ids and finish reasons by sample, of all requests together."""

    async def one(index: int, prompt, params):
        tokens: dict[int, list[int]] = {}
        reasons = {}
        async for deltas in engine.submit(prompt, params, request_id=f"{prefix}{index}"):
            for delta in deltas:
                tokens.setdefault(delta.index, []).extend(delta.token_ids)
                if delta.finish_reason is not None:
                    reasons[delta.index] = delta.finish_reason
        return tokens, reasons

    return await asyncio.gather(*(one(i, *request) for i, request in enumerate(requests)))


async def until_ready(engine: Engine) -> None:
    async with asyncio.timeout(60):
        while engine.stats().state != "ready":
            await asyncio.sleep(0.001)


@pytest.mark.slow
async def test_requests_run_before_and_while_executables_arrive(stories, held):
    engine = await asyncio.to_thread(Engine.load, config(stories, dtype="float32"))
    engine.start()
    await held.all_compiled()
    stats = engine.stats()
    assert (stats.state, stats.healthy) == ("serving", True)
    assert "ready" not in stats.startup_seconds
    limits = core_of(engine).scheduler.config
    assert (limits.max_num_batched_tokens, limits.max_rows) == (64, 64)
    assert not set(LATE) & set(core_of(engine).device.compiled())

    before = compilations.total()
    early = await outputs(engine, ODD, "early")
    assert engine.stats().state == "serving"

    params = SamplingParams(max_tokens=450, temperature=0, ignore_eos=True)
    long = [([i, 3], params) for i in range(2, 5)]
    meanwhile = asyncio.create_task(outputs(engine, long, "long"))
    steps = engine.stats().steps
    while engine.stats().steps < steps + 20:
        await asyncio.sleep(0.001)
    held.released.set()
    await until_ready(engine)
    assert not meanwhile.done(), "they ran while executables were adopted"
    limits = core_of(engine).scheduler.config
    assert (limits.max_num_batched_tokens, limits.max_rows) == (128, 64)
    assert set(LATE) < set(core_of(engine).device.compiled())
    crossed = await meanwhile

    assert await outputs(engine, ODD, "late") == early
    assert crossed == await outputs(engine, long, "again")
    assert compilations.total() == before, "a request has compiled something"
    stats = engine.stats()
    assert stats.compilations_after_ready == 0
    phases = ["config", "import", "kernels", "weights", "compile", "warm-up", "serving", "ready"]
    assert list(stats.startup_seconds) == phases
    assert 0 < stats.startup_seconds["serving"] < stats.startup_seconds["ready"]
    await engine.stop()


@pytest.mark.slow
async def test_nothing_compiles_after_ready_for_any_request(stories):
    engine = await asyncio.to_thread(Engine.load, config(stories, num_blocks=40))
    engine.start()
    await until_ready(engine)
    before = compilations.total()
    aborted = engine.submit([1] * 200, SamplingParams(max_tokens=250), request_id="aborted")
    crowd = ODD + [([i], SamplingParams(max_tokens=200, ignore_eos=True)) for i in range(4)]
    running = asyncio.create_task(outputs(engine, crowd))
    await anext(aborted)
    aborted.abort()
    for tokens, reasons in await running:
        assert tokens and set(reasons.values()) <= {"stop", "length"}
    stats = engine.stats()
    assert stats.preemptions > 0 and stats.compilations_after_ready == 0
    assert compilations.total() == before
    jax.jit(lambda x: x + len(crowd))(1.0)
    assert engine.stats().compilations_after_ready == 1, "the counter counts"
    await engine.stop()


@pytest.mark.slow
async def test_engine_stopped_early_stops_compiling(stories, held):
    engine = await asyncio.to_thread(Engine.load, config(stories))
    engine.start()
    await engine.stop()
    held.released.set()
    assert engine.stats().state == "stopped"
    assert not set(LATE) & set(core_of(engine).device.compiled())


@pytest.mark.slow
def test_uncompilable_executable_is_left_out(stories, monkeypatch, caplog):
    compile_ = Executables._compile

    def fail(self, name, lowered):
        if name == "decode[8]":
            raise RuntimeError("no")
        return compile_(self, name, lowered)

    monkeypatch.setattr(Executables, "_compile", fail)
    llm = LLM(str(stories), **OPTIONS)
    assert "decode[8] could not be compiled" in caplog.text
    outputs = llm.generate([[5]] * 8, SamplingParams(max_tokens=3), progress=False)
    assert all(len(output.outputs[0].token_ids) == 3 for output in outputs)


def test_serving_starts_with_the_shape_that_takes_any_sequence():
    shapes = step_shapes(max_num_seqs=8, max_num_batched_tokens=300, max_rows=64, block_size=16)
    names = [shape.name for shape in shapes]
    assert names == ["decode[4]", "decode[8]", "mixed[64]", "mixed[256]", "mixed[300]"]
    assert [shape.name for shape in first_shapes(shapes, "cpu")] == ["mixed[64]"]
    assert [shape.name for shape in first_shapes(shapes, "gpu")] == ["mixed[300]"]
    only = [StepShape.mixed(1, 8, 64, 16)]
    assert first_shapes(only, "cpu") == first_shapes(only, "gpu") == only


@pytest.mark.parametrize("largest", [1, 4, 5, 64, 65, 256, 300])
def test_decode_sizes_at_most_double_on_a_gpu(largest):
    sizes = decode_sizes(largest, "gpu")
    assert sizes == sorted(set(sizes)) and sizes[-1] == largest and sizes[0] == min(8, largest)
    assert all(b <= 2 * a for a, b in itertools.pairwise(sizes))
    of_cpu = decode_sizes(largest, "cpu")
    assert of_cpu[-1] == largest and set(of_cpu) <= {4, 16, 64, largest}
    shapes = step_shapes(
        max_num_seqs=largest, max_num_batched_tokens=300, max_rows=64, block_size=16, platform="gpu"
    )
    assert [s.num_seqs for s in shapes if s.name.startswith("decode")] == sizes


@pytest.mark.parametrize("max_drafts", [1, 7, 31, 127])
def test_draft_only_shapes_neither_start_serving_nor_set_limits(max_drafts):
    """verify[8] has as many tokens as a sequence with 7 drafts, but takes no prompt."""
    sizes = {"max_num_seqs": 256, "max_num_batched_tokens": 512, "max_rows": 512}
    shapes = step_shapes(**sizes, block_size=16, max_drafts=max_drafts)
    for platform, first in ("cpu", "mixed[64]"), ("gpu", "mixed[512]"):
        [begins] = first_shapes(shapes, platform)
        assert begins.name == first
        for late in shapes:  # activated in any order
            limits = step_limits([begins, late])
            assert limits.max_num_batched_tokens == max(
                shape.num_tokens for shape in (begins, late) if shape.name.startswith("mixed")
            )


def test_startup_phases_add_up_to_the_milestones():
    times = StartupTimes()
    for _ in range(2):
        with times.phase("config"):
            pass
    times.reached("serving")
    seconds = times.seconds
    assert list(seconds) == ["config", "serving"]
    assert 0 < seconds["config"] <= seconds["serving"]
    assert str(times).startswith("config 0.00, serving ")


# ---- memory ------------------------------------------------------------------------------------


def needed_bytes(stories) -> int:
    return core_of(LLM(str(stories), **OPTIONS)).device.memory_bytes()


@pytest.mark.slow
def test_cache_that_exceeds_xlas_figures_shrinks_once(stories, monkeypatch, caplog):
    needed = needed_bytes(stories)
    monkeypatch.setattr(assemble, "free_bytes", lambda device, shards: needed - 1)
    alive, smaller = [], assemble._make_runner

    def make_runner(design):
        gc.collect()
        alive.append(sum(array.nbytes for array in jax.live_arrays() if array.ndim == 5))
        return smaller(design)

    monkeypatch.setattr(assemble, "_make_runner", make_runner)
    with caplog.at_level(logging.INFO):
        llm = LLM(str(stories), **OPTIONS)
    assert "the KV cache is reduced to" in caplog.text
    assert alive[0] == alive[1], "the first cache is gone before the second is made"
    device = core_of(llm).device
    assert device.memory_bytes() < needed
    assert core_of(llm).scheduler.pool.num_blocks == device.state.kv[0].shape[0]
    [output] = llm.generate([[5] * 20], SamplingParams(max_tokens=3), progress=False)
    assert len(output.outputs[0].token_ids) == 3


@pytest.mark.parametrize(
    ("options", "remedy"),
    [({"num_blocks": 64}, "at most [0-9]+ blocks fit"), ({}, "lower max_model_len")],
)
@pytest.mark.slow
def test_model_that_cannot_fit_reports_a_remedy(stories, monkeypatch, options, remedy):
    limit = 1 if not options else needed_bytes(stories) // 4
    monkeypatch.setattr(assemble, "free_bytes", lambda device, shards: limit)
    with pytest.raises(ConfigError, match=remedy):
        LLM(str(stories), **OPTIONS, **options)


@pytest.mark.slow
def test_late_executable_that_does_not_fit_is_left_out(stories, monkeypatch, caplog):
    needed = needed_bytes(stories)
    monkeypatch.setattr(assemble, "free_bytes", lambda device, shards: needed)
    larger = Executables.memory_bytes

    def memory_bytes(self, name):
        return larger(self, name) + GIB * (name == "mixed[128]")

    monkeypatch.setattr(Executables, "memory_bytes", memory_bytes)
    llm = LLM(str(stories), **OPTIONS)
    assert "mixed[128] needs" in caplog.text and "it is not used" in caplog.text
    assert core_of(llm).scheduler.config.max_num_batched_tokens == 64
    [output] = llm.generate([[5] * 200], SamplingParams(max_tokens=3), progress=False)
    assert len(output.outputs[0].token_ids) == 3


# ---- the compilation cache and XLA's options -----------------------------------------------------


@pytest.fixture
def jax_cache():
    """Restore this process's cache settings after a test."""
    names = ("jax_compilation_cache_dir", "jax_enable_compilation_cache")
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def compile_something() -> None:
    jax.jit(lambda x: x * 3 + 1).lower(jax.ShapeDtypeStruct((7, 7), "float32")).compile()


def entries(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in folder.glob(ENTRIES)}


def use(**options) -> None:
    assemble.use_compilation_cache(EngineConfig.from_options(**options))


def test_compilation_cache_is_private_in_the_given_folder(tmp_path, jax_cache):
    folder = tmp_path / "a" / "b"
    use(compile_cache_dir=str(folder))
    compile_something()
    assert entries(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    other = tmp_path / "other"
    use(compile_cache_dir=str(other))
    jax.clear_caches()
    compile_something()
    assert entries(other)


@pytest.mark.parametrize("left", [0, 1, 100, -1], ids="empty byte hundred all-but-one".split())
def test_half_written_cache_entry_is_removed_and_rewritten(
    tmp_path, jax_cache, caplog, recwarn, left
):
    use(compile_cache_dir=str(tmp_path))
    compile_something()
    jax.jit(lambda x: x - 5).lower(1.0).compile()
    before = entries(tmp_path)
    use(compile_cache_dir=str(tmp_path))
    assert entries(tmp_path) == before and len(before) == 2, "whole ones stay"
    [broken] = [
        file for file in tmp_path.glob(ENTRIES) if file.stat().st_size == max(before.values())
    ]
    broken.write_bytes(broken.read_bytes()[:left])
    use(compile_cache_dir=str(tmp_path))
    assert entries(tmp_path) == {k: size for k, size in before.items() if k != broken.name}
    assert broken.name in caplog.text
    jax.clear_caches()
    compile_something()
    jax.jit(lambda x: x - 5).lower(1.0).compile()
    use(compile_cache_dir=str(tmp_path))
    assert entries(tmp_path).keys() == before.keys() and not recwarn.list


def test_interrupted_cache_scan_is_repeated(tmp_path, jax_cache, monkeypatch, caplog):
    use(compile_cache_dir=str(tmp_path))
    (tmp_path / "half-cache").write_bytes(b"\x78\x9c")
    (tmp_path / "folder-cache").mkdir()

    def killed(data: bytes) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cache_folder, "_is_whole", killed)
        with pytest.raises(KeyboardInterrupt):
            use(compile_cache_dir=str(tmp_path))
    assert (tmp_path / "half-cache").exists()
    use(compile_cache_dir=str(tmp_path))
    assert not (tmp_path / "half-cache").exists()
    assert "cannot read a compiled executable: folder-cache: Is a directory" in caplog.text


def test_nothing_is_written_without_a_compilation_cache(tmp_path, jax_cache, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", None)
    use(compile_cache=False)
    compile_something()
    assert not list(tmp_path.iterdir())
    use()
    jax.clear_caches()
    compile_something()
    assert entries(tmp_path / "forge-jax" / "xla")


def test_cache_folder_writable_by_others_is_rejected(tmp_path, jax_cache, monkeypatch, caplog):
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match=r"--compile-cache .*others can write to it: chmod 700"):
        use(compile_cache_dir=str(tmp_path))
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match=r"--compile-cache .*xists"):
        use(compile_cache_dir=str(file))
    tmp_path.chmod(0o700)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(ConfigError, match="belongs to another user"):
        use(compile_cache_dir=str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", None)
    use()  # the default folder was not requested, so a warning is enough
    assert "every start recompiles" in caplog.text
    assert not jax.config.jax_enable_compilation_cache
    with pytest.raises(ConfigError, match="remove one of them"):
        use(compile_cache=False, compile_cache_dir=str(tmp_path))


def test_folder_from_jax_settings_is_checked(tmp_path, jax_cache):
    tmp_path.chmod(0o777)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"JAX_COMPILATION_CACHE_DIR .*others can write .*--no-compile-cache"
    ):
        use()
    use(compile_cache=False)
    tmp_path.chmod(0o700)
    use()
    assert jax.config.jax_enable_compilation_cache
    jax.config.update("jax_compilation_cache_dir", "gs://bucket/folder")
    use()
    assert jax.config.jax_compilation_cache_dir == "gs://bucket/folder"
    assert not Path("gs:").exists()


def test_executables_writable_by_others_are_removed(tmp_path, jax_cache, caplog):
    """They may be from a time when the folder was writable by all."""
    use(compile_cache_dir=str(tmp_path))
    (tmp_path / "own-cache").write_bytes(b"whole, in some form")
    (tmp_path / "below").mkdir()
    for name in ("planted-cache", "below/planted"):
        (tmp_path / name).write_bytes(b"whole, in some form")
        (tmp_path / name).chmod(0o666)
    (tmp_path / "link-cache").symlink_to("own-cache")
    use(compile_cache_dir=str(tmp_path))
    left = sorted(path.name for path in tmp_path.rglob("*") if not path.name.startswith("."))
    assert left == ["below", "own-cache"]
    assert caplog.text.count("removed from the compilation cache") == 3
    (tmp_path / "below").chmod(0o777)
    with pytest.raises(ConfigError, match=r"below in it: others can write to it"):
        use(compile_cache_dir=str(tmp_path))


def test_xla_accepts_the_gpu_options():
    options = compiler_options("gpu", command_buffers=False, deterministic=True)
    assert options["xla_gpu_enable_command_buffer"] == ""
    for shards in (1, 2):
        options |= compiler_options("gpu", command_buffers=True, deterministic=True, shards=shards)
        lowered = jax.jit(lambda x: x - 5).lower(1.0)
        assert lowered.compile(compiler_options=options)(6.0) == 1.0
    with pytest.raises(jax.errors.JaxRuntimeError, match="not a valid"):
        lowered.compile(compiler_options={"xla_gpu_enable_command_buffer": "NOTHING"})
    alone = compiler_options("gpu", command_buffers=True, deterministic=False)
    assert alone == GPU_OPTIONS
    shared = compiler_options("gpu", command_buffers=True, deterministic=False, shards=2)
    assert shared == alone | {"xla_gpu_enable_command_buffer": SHARED_COMMAND_BUFFERS}
    assert compiler_options("cpu", command_buffers=False, deterministic=False) == {}
    assert dataclasses.asdict(EngineConfig().parallel)["command_buffers"] is True
