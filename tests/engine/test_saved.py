"""Saved executables: a start loads what an earlier start compiled, and compiles if it cannot."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from forge_jax import LLM, SamplingParams
from forge_jax.config import EngineConfig
from forge_jax.engine import builder, bundle
from forge_jax.models.registry import build_model
from forge_jax.step import saved
from forge_jax.step.executables import Executables
from forge_jax.step.saved import SavedExecutables
from forge_jax.telemetry.startup import StartupTimes

pytestmark = pytest.mark.quick_compile

OPTIONS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "dtype": "bfloat16",
    "num_blocks": 64,
    "saved_executables": True,
}
SAMPLED = SamplingParams(max_tokens=24, seed=3, presence_penalty=0.5, logit_bias={17: 2.0}, n=2)
PROMPTS = [[1, 403, 407], list(range(1, 90)), [5] * 17]
STEPS = {"decode_4", "mixed_64", "admit", "set_history", "_new_state"}


@contextlib.contextmanager
def restored_cache() -> Iterator[None]:
    """Restore this process's cache settings."""
    names = ("jax_compilation_cache_dir", "jax_enable_compilation_cache")
    before = {name: getattr(jax.config, name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@pytest.fixture(autouse=True)
def jax_cache():
    with restored_cache():
        yield


@pytest.fixture
def traced(monkeypatch):
    """Return a list that receives the name of each function that is traced."""
    names: list[str] = []
    lower = Executables._lower

    def record(self, jitted, args):
        names.append(jitted.__name__)
        return lower(self, jitted, args)

    monkeypatch.setattr(Executables, "_lower", record)
    return names


def started(model: Path, cache: Path) -> tuple[Any, np.ndarray]:
    """Start an engine, and return its tokens and embeddings."""
    llm = LLM(str(model), compile_cache_dir=str(cache), **OPTIONS)
    outputs = llm.generate(PROMPTS, SAMPLED, progress=False)
    tokens = [[tuple(each.token_ids) for each in output.outputs] for output in outputs]
    return tokens, llm.embed(PROMPTS[:1], progress=False)


@pytest.fixture(scope="module")
def first(short_stories, tmp_path_factory):
    """Return the cache and the outputs of a first start."""
    jax.clear_caches()
    cache = tmp_path_factory.mktemp("saved") / "cache"
    with restored_cache():
        return cache, started(short_stories, cache)


@pytest.fixture
def cache(first, tmp_path) -> Path:
    return Path(shutil.copytree(first[0], tmp_path / "cache"))


@pytest.fixture
def start(short_stories, cache, traced):
    """Return a function that starts another engine and returns its outputs."""

    def start() -> tuple[Any, np.ndarray]:
        traced.clear()
        return started(short_stories, cache)

    return start


@pytest.fixture
def messages(caplog):
    """Return a function that returns and clears the log messages about saved executables."""
    caplog.set_level(logging.INFO)

    def messages() -> list[str]:
        texts = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return [text for text in texts if "saved" in text]

    return messages


def files(cache: Path) -> list[Path]:
    return sorted((cache / "saved").glob("*/*"))


def same(one: tuple[Any, np.ndarray], other: tuple[Any, np.ndarray]) -> bool:
    return one[0] == other[0] and np.array_equal(one[1], other[1])


def design(model: Path, cache: Path, **options: Any) -> builder.Design:
    folder = {"compile_cache_dir": str(cache)}
    config = EngineConfig.from_options(model=str(model), **OPTIONS | folder | options)
    return builder._with_saved(builder.make_design(config, StartupTimes()))


def test_second_start_loads_what_the_first_one_compiled(first, cache, start, traced, messages):
    before = files(cache)
    assert {file.name for file in before} >= {"mixed-64.xla", "decode-4.xla", "admit.xla"}
    assert all(file.suffix == ".xla" for file in before), "no partial ones"
    assert not any(file.stat().st_mode & 0o022 for file in before)
    assert same(start(), first[1])
    assert traced == [] and files(cache) == before
    [message] = messages()
    assert message == f"loading executables that an earlier start saved in {before[0].parent}"


def test_executables_from_the_compilation_cache_are_not_saved(first, cache, start, traced):
    """Calls of an executable that was loaded and serialized again would fail."""
    for file in files(cache):
        file.unlink()
    for _ in range(2):
        jax.clear_caches()
        assert same(start(), first[1])
        assert set(traced) >= STEPS and files(cache) == []


def test_missing_executable_is_compiled(first, cache, start, traced, messages):
    [step] = [file for file in files(cache) if file.name == "mixed-64.xla"]
    step.unlink()
    assert same(start(), first[1])
    assert traced == ["mixed_64"] and len(messages()) == 1


@pytest.mark.parametrize("damage", ["cut", "empty", "byte", "no entry", "shapes"])
def test_executable_that_cannot_be_loaded_is_compiled_after_one_warning(
    first, cache, start, traced, messages, damage
):
    [step] = [file for file in files(cache) if file.name == "mixed-64.xla"]
    data = step.read_bytes()
    match damage:
        case "cut":
            step.write_bytes(data[:-100])
        case "empty":
            step.write_bytes(b"")
        case "byte":
            step.write_bytes(data[:-100] + bytes([data[-100] ^ 1]) + data[-99:])
        case "no entry":
            step.write_bytes(b"{}\n" + data)
        case "shapes":
            step.write_bytes(re.sub(rb"int32\[(\d+)\]", rb"int32[7\1]", data, count=1))
    assert same(start(), first[1])
    assert traced == ["mixed_64"]
    [_, warning] = messages()
    assert "mixed-64.xla is compiled again, because it cannot be loaded: " in warning
    assert same(start(), first[1])
    assert len(messages()) == 1


def test_files_that_cannot_be_removed_or_saved_only_cost_a_warning(
    short_stories, first, cache, tmp_path, messages
):
    """A server's user can have a cache with files of root."""
    [step] = [file for file in files(cache) if file.name == "mixed-64.xla"]
    step.unlink()
    step.mkdir()
    assert same(started(short_stories, cache), first[1])
    assert "mixed-64.xla is not loaded: it is not an ordinary file" in messages()[1]
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    (other / "saved").touch()
    jax.clear_caches()
    assert same(started(short_stories, other), first[1])
    [warning] = messages()
    assert warning.endswith("because it cannot be loaded: Not a directory")


def test_full_disk_is_logged_once(short_stories, first, tmp_path, messages, monkeypatch):
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saved, "write_private", full)
    jax.clear_caches()
    assert same(started(short_stories, tmp_path), first[1])
    [warning] = messages()
    assert warning.endswith(" was not saved: No space left on device")
    assert files(tmp_path) == []


def test_different_engines_have_different_folders(short_stories, tmp_path, monkeypatch):
    def folder(**options: Any) -> Path:
        found = design(short_stories, tmp_path, **options).saved
        assert found is not None and found.folder.parent == tmp_path / "saved"
        return found.folder

    own = folder()
    assert folder() == own and folder(seed=5) == own
    others = [folder(**each) for each in ({"num_blocks": 32}, {"dtype": "float32"})]
    others.append(folder(max_num_seqs=3))
    default = folder(num_blocks=None)
    blocks = design(short_stories, tmp_path, num_blocks=None).sizes.kv.num_blocks
    assert folder(num_blocks=blocks) == default
    monkeypatch.setenv("JAX_THREEFRY_PARTITIONABLE", "0")
    assert len({own, *others, default, folder()}) == 6


def test_nothing_is_saved_unless_asked(short_stories, tmp_path):
    assert design(short_stories, tmp_path, saved_executables=False).saved is None
    without = design(short_stories, tmp_path, compile_cache=False, compile_cache_dir=None)
    assert without.saved is None
    whole = design(short_stories, tmp_path)
    parallel = dataclasses.replace(whole.config.parallel, tensor_parallel=2)
    several = dataclasses.replace(whole.config, parallel=parallel)
    assert builder._with_saved(dataclasses.replace(whole, config=several)).saved is None
    jax.config.update("jax_compilation_cache_dir", "gs://bucket/folder")
    assert builder._with_saved(whole).saved is None


def test_least_recently_used_engines_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(saved, "MOST_ENGINES", 3)
    [device, *_] = jax.devices()
    executables = Executables()
    executables.add("double", lambda x: 2 * x, jax.ShapeDtypeStruct((2,), np.float32))

    def used(name: str, time_s: int) -> SavedExecutables:
        engine = SavedExecutables(tmp_path / name, device)
        engine.save("double", executables["double"])
        os.utime(tmp_path / name, (time_s, time_s))
        return engine

    for time_s, name in enumerate("abc", 1):
        used(name, time_s)
    SavedExecutables(tmp_path / "a", device)  # a start
    used("d", 4)
    executables.close()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a", "c", "d"]


def test_function_with_a_callback_is_not_saved(tmp_path, caplog):
    [device, *_] = jax.devices()
    store = SavedExecutables(tmp_path / "engine", device)
    executables = Executables(store=store)
    shape = jax.ShapeDtypeStruct((2,), np.float32)
    executables.add("called back", lambda x: jax.pure_callback(lambda y: y, x, x), shape)
    executables["called back"]
    executables.close()
    assert not list(tmp_path.rglob("*.xla")) and caplog.text == ""


def test_every_family_has_a_different_identity(goldens):
    described = {}
    for file in sorted(goldens.glob("*/config.json")):
        config = EngineConfig.from_options(model=str(file.parent))
        model = build_model(builder.read_model_spec(config, file.parent))
        described[file.parent.name] = bundle._digest(bundle._described(model))
    assert len(described) > 60
    assert len(set(described.values())) == len(described)
