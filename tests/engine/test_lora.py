"""Engines with LoRA adapters: chosen by request, loaded and unloaded while others run.

`lora_files.py` merges an adapter into the weights of a copy of the model. A request with the
adapter must give the results of that copy.
"""

import asyncio
import itertools
import os
import re
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
from lora_files import merged, write_adapter

from forge_jax import LLM, SamplingParams
from forge_jax.config import EngineConfig
from forge_jax.engine.process.client import EngineProcess
from forge_jax.engine.thread import Engine
from forge_jax.errors import ConfigError, LostAdapterError, ModelError, RequestError
from forge_jax.schedule.request import LoraRef, Request, cache_name
from forge_jax.step.runner import Runner
from forge_jax.testing import core_of, failing_steps
from forge_kernels import cpu

PROMPT = "Once upon a time, there was a little"
LONG = list(range(100, 160))
OPTIONS = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "dtype": "float32", "num_blocks": 64}
SCORED = SamplingParams(
    max_tokens=12, temperature=0, logprobs=0, prompt_logprobs=0, ignore_eos=True
)


@pytest.fixture(scope="module")
def folders(stories, tmp_path_factory) -> dict[str, Path]:
    """Return two adapters, and a copy of the model merged with each of them."""
    root = tmp_path_factory.mktemp("adapters")
    a = write_adapter(root / "a", stories, seed=1, rank=4, alpha=8.0)
    b = write_adapter(root / "b", stories, seed=2, rank=8, alpha=4.0)
    return {
        "root": root,
        "a": a,
        "b": b,
        "merged a": merged(root / "merged a", stories, a, 2.0),
        "merged b": merged(root / "merged b", stories, b, 0.5),
    }


@pytest.fixture(scope="module")
def llm(stories, folders):
    options = {"lora": (f"a={folders['a']}",), "max_loras": 2, "max_lora_rank": 8}
    with LLM(stories, **OPTIONS, **options) as llm:
        yield llm


@pytest.fixture
def both(llm, folders):
    """Load the second adapter for this test."""
    llm.load_lora("b", folders["b"])
    yield llm
    llm.unload_lora("b")


def scores(output) -> np.ndarray:
    """Return f32: the logprobs of the prompt's tokens and of the output's."""
    found = [*output.prompt_logprobs, *output.outputs[0].logprobs]
    return np.array([each.logprob for each in found], np.float32)


def run(llm, prompts, params=SCORED, **options):
    return llm.generate(prompts, params, progress=False, **options)


@pytest.mark.slow
def test_each_request_of_a_batch_has_its_adapter(both, folders, stories):
    prompts = [PROMPT, PROMPT, PROMPT, "The dog", "The dog"]
    outputs = run(both, prompts, lora=["a", None, "b", "b", "a"])
    wanted = {}
    for name, folder in (("a", folders["merged a"]), ("b", folders["merged b"]), (None, stories)):
        with LLM(folder, **OPTIONS) as plain:
            wanted[name] = run(plain, [PROMPT, "The dog"])
    for output, prompt, name in zip(outputs, prompts, ["a", None, "b", "b", "a"], strict=True):
        want = wanted[name][prompt != PROMPT]
        np.testing.assert_allclose(scores(output), scores(want), atol=1e-4, rtol=0)
        assert output.text == want.text
    assert len({output.text for output in outputs[:3]}) == 3


@pytest.mark.slow
def test_cpu_kernels_multiply_with_adapters(stories, folders):
    """The results of each request are the same bits alone and in a batch."""
    if not cpu.available() or jax.default_backend() != "cpu":
        pytest.skip("no C++ kernels here")
    options = OPTIONS | {"dtype": "bfloat16"}
    adapters = {"max_loras": 2, "max_lora_rank": 8}
    with LLM(stories, **options, **adapters, lora=(f"a={folders['a']}",)) as llm:
        assert {stack.dtype for stack in core_of(llm).device.adapters} == {np.dtype(np.uint16)}
        compilations = llm._parts.compilations()
        llm.load_lora("b", folders["b"])
        names = ["a", None, "b", "b"]
        prompts = [PROMPT, PROMPT, PROMPT, "The dog"]
        together = run(llm, prompts, lora=names)
        assert len({output.text for output in together[:3]}) == 3
        for prompt, name, output in zip(prompts, names, together, strict=True):
            (alone,) = run(llm, [prompt], lora=name)
            np.testing.assert_array_equal(scores(alone), scores(output))
        llm.unload_lora("b")
        assert llm._parts.compilations() == compilations
    with LLM(folders["merged a"], **options) as plain:
        (want,) = run(plain, [PROMPT])
    prompt = len(want.prompt_logprobs)
    np.testing.assert_allclose(scores(together[0])[:prompt], scores(want)[:prompt], atol=0.2)


def test_loading_and_unloading_adapters_compiles_nothing(llm, folders):
    before = llm._parts.compilations()
    llm.load_lora("b", folders["b"])
    run(llm, [PROMPT], lora="b")
    llm.unload_lora("b")
    run(llm, [PROMPT])
    assert llm._parts.compilations() == before
    assert "set_adapter" in core_of(llm).device.compiled()


def computed(llm) -> dict[str, set[str]]:
    return {
        name: {
            part
            for path in re.findall(r'op_name="([^"]*)"', executable.as_text())
            for part in path.split("/")
        }
        for name, executable in core_of(llm).device.compiled().items()
    }


@pytest.mark.slow
def test_engine_without_adapters_has_no_adapter_state(stories, llm):
    with LLM(stories, **OPTIONS) as plain:
        runner = core_of(plain).device
        assert "set_adapter" not in runner.compiled() and "lora" not in runner.settings
        assert runner.state.slots.lora is None
        assert len(runner.state.leaves) == len(runner.model.leaves)
        scopes, with_adapters = computed(plain), computed(llm)
        for name in ("decode[4]", "mixed[64]"):
            assert "gate_up" in scopes[name] and "lora" not in scopes[name]
            assert "lora" in with_adapters[name]
        assert plain.loras == []
        with pytest.raises(RequestError, match="max_loras"):
            run(plain, [PROMPT], lora="a")
        with pytest.raises(RequestError, match="max_loras"):
            plain.load_lora("a", "somewhere")


def test_blocks_are_never_shared_between_adapters(both, folders):
    def cached(lora):
        return run(both, [LONG], SamplingParams(max_tokens=1), lora=lora)[0].num_cached_tokens

    core_of(both).scheduler.pool.reset()
    for lora in ("a", None, "b"):
        assert cached(lora) == 0
    for lora in ("a", None, "b"):
        assert cached(lora) == 48
    both.unload_lora("b")
    both.load_lora("b", folders["b"])
    assert cached("b") == 0, "the same files, but another loading of them"


def test_cache_salt_cannot_imitate_an_adapter():
    def name(salt, lora=None):
        ref = None if lora is None else LoraRef(name="x", place=1, identity=lora)
        request = Request(
            request_id="", prompt_token_ids=[1], params=SCORED, cache_salt=salt, lora=ref
        )
        return cache_name(request)

    pairs = [(salt, lora) for salt in ("", "s", "\0", "0") for lora in (None, "1", "11")]
    names = [name(*pair) for pair in pairs]
    forged = [name(text) for text in names if text.startswith("\0")]
    assert len(set(names)) == len(names) and not set(names) & set(forged)
    assert name("tenant") == "tenant"


def test_adapter_in_use_is_not_unloaded(both, folders):
    stream = both.stream(PROMPT, SamplingParams(max_tokens=30, ignore_eos=True), lora="b")
    next(stream)
    with pytest.raises(RequestError, match="1 requests use this LoRA adapter"):
        both.unload_lora("b")
    stream.close()
    late = both.stream(PROMPT, lora="b")  # starts at its first read
    both.unload_lora("b")
    both.load_lora("b", folders["a"])
    with pytest.raises(RequestError, match="has been unloaded"):
        next(late)
    assert run(both, [PROMPT], lora="b")[0].text == run(both, [PROMPT], lora="a")[0].text


def test_failed_adapter_load_changes_nothing(both, folders, tmp_path):
    before = both.loras
    for name, path, named in (
        ("a", folders["b"], "already loaded"),
        ("c", folders["b"], "all 2 LoRA adapter slots are in use"),
        ("..", folders["b"], "the name of a LoRA adapter"),
    ):
        with pytest.raises(RequestError, match=named):
            both.load_lora(name, path)
    both.unload_lora("b")
    with pytest.raises(RequestError, match="adapter_config"):
        both.load_lora("c", tmp_path)
    with pytest.raises(RequestError, match="no LoRA adapter with this name is loaded"):
        both.unload_lora("c")
    with pytest.raises(RequestError, match="no LoRA adapter with this name is loaded"):
        run(both, [PROMPT], lora="c")
    with pytest.raises(RequestError, match="2 prompts but 1 LoRA"):
        run(both, [PROMPT, PROMPT], lora=["a"])
    both.load_lora("b", folders["b"])
    assert [(each.name, each.path) for each in both.loras] == [
        (each.name, each.path) for each in before
    ]


@pytest.mark.slow
def test_embeddings_use_adapters(llm):
    [one, plain, same] = llm.embed([PROMPT] * 3, lora=["a", None, "a"], progress=False)
    [again] = llm.embed(PROMPT, progress=False)
    np.testing.assert_allclose([same, again], [one, plain], atol=1e-5, rtol=0)
    assert np.abs(one - plain).max() > 0.01


# ---- the deterministic tier --------------------------------------------------------------------


@pytest.fixture(scope="module")
def exact_options(folders):
    named = tuple(f"{name}={folders[name]}" for name in ("a", "b"))
    return {**OPTIONS, "deterministic": True, "lora": named, "max_lora_rank": 8}


@pytest.fixture(scope="module")
def exact(stories, exact_options):
    with LLM(stories, **exact_options) as exact:
        yield exact


@pytest.mark.full_compile
@pytest.mark.slow
def test_bits_are_independent_of_other_requests_adapters(exact, exact_options):
    alone = {name: scores(run(exact, [LONG], lora=name)[0]) for name in ("a", "b", None)}
    for names in (["b", "a", None, "a"], [None, None, "b", "a"], ["a"] * 4):
        outputs = run(exact, [LONG, LONG[3:], [5, 6], LONG], lora=names)
        for row in (0, 3):
            np.testing.assert_array_equal(scores(outputs[row]), alone[names[row]])
    # In another place, after another adapter used it.
    exact.unload_lora("a")
    exact.unload_lora("b")
    for name in ("b", "a"):
        exact.load_lora(name, exact_options["lora"][name == "b"].partition("=")[2])
    for name in ("a", "b"):
        np.testing.assert_array_equal(scores(run(exact, [LONG], lora=name)[0]), alone[name])


MIX = ["a", "b", None, "a", "b"]
PROMPTS = [[7, 8, 9] * 8, LONG, LONG, LONG[:20], [3, 4] * 9]
SAMPLED = SamplingParams(
    max_tokens=40, temperature=0.8, seed=5, logprobs=0, prompt_logprobs=0, ignore_eos=True
)


@pytest.fixture(scope="module")
def expected(exact) -> list[tuple]:
    """Return what each request of the mix gives alone."""
    outputs = [run(exact, [p], SAMPLED, lora=name)[0] for p, name in zip(PROMPTS, MIX, strict=True)]
    assert len({o.outputs[0].token_ids for o in outputs}) == len(outputs)
    return [tokens_and_scores(output) for output in outputs]


def tokens_and_scores(output) -> tuple:
    return output.outputs[0].token_ids, scores(output).tobytes()


def answers(llm) -> list[tuple]:
    return [tokens_and_scores(output) for output in run(llm, PROMPTS, SAMPLED, lora=MIX)]


@pytest.mark.slow
def test_preempted_request_keeps_its_adapter(stories, exact_options, expected):
    with LLM(stories, **exact_options | {"num_blocks": 11, "max_model_len": 128}) as tight:
        assert answers(tight) == expected
        assert core_of(tight).scheduler.num_preemptions > 0


@pytest.mark.slow
def test_adapters_survive_a_failed_step(exact, expected):
    """Covers lost device arrays, which are recreated."""
    calls, core, device = itertools.count(1), core_of(exact), core_of(exact).device
    before = core.num_recoveries
    with failing_steps(core, lambda plan, where: next(calls) % 25 == 0):
        assert answers(exact) == expected
        jax.tree.map(lambda array: array.delete(), device.state.slots)
        assert answers(exact) == expected
    assert core.num_recoveries > before + 5


@pytest.mark.parametrize(
    "speculation",
    [{"speculation": "suffix"}, {"speculation": "draft", "draft_model": "self", "draft_layers": 1}],
)
@pytest.mark.slow
def test_speculation_does_not_change_an_adapters_output(
    stories, exact_options, expected, speculation
):
    """The second run has earlier outputs of the same adapter and of others to draft from."""
    with LLM(stories, **exact_options, **speculation) as guessing:
        for _ in range(2):
            assert answers(guessing) == expected
        assert core_of(guessing).speculator.stats().num_accepted_tokens > 0


# ---- options -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"lora": ("a",)}, "NAME=FOLDER"),
        ({"lora": ("=x",)}, "NAME=FOLDER"),
        ({"lora": ("a b=x",)}, "NAME=FOLDER"),
        ({"lora": "a=x"}, "tuple"),
        ({"lora": ("a=x", "a=y")}, "two adapters have this name"),
        ({"lora": ("a=x", "b=y"), "max_loras": 1}, "max_loras must"),
        ({"max_loras": 65}, "max_loras must"),
        ({"max_lora_rank": 0}, "max_lora_rank must"),
    ],
)
def test_invalid_options_are_rejected(options, named):
    with pytest.raises(ConfigError, match=named):
        EngineConfig.from_options(**options)


def test_adapter_that_does_not_fit_stops_the_start(stories, folders, monkeypatch):
    monkeypatch.setattr(Runner, "compile", None)
    with pytest.raises(ModelError, match=r"lora b=.*rank 8.*max_lora_rank"):
        LLM(stories, **OPTIONS, lora=(f"b={folders['b']}",), max_lora_rank=4)


# ---- the async engines -------------------------------------------------------------------------


async def text(engine, name, **options):
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    return "".join([d.text async for d in engine.generate(PROMPT, params, **options, lora=name)])


async def test_adapters_are_loaded_while_requests_run(stories, folders, both):
    wanted = {name: run(both, [PROMPT], lora=name)[0].text for name in ("a", "b", None)}
    config = EngineConfig.from_options(
        model=str(stories), **OPTIONS, lora=(f"a={folders['a']}",), max_loras=2, max_lora_rank=8
    )
    engine = await asyncio.to_thread(Engine.load, config)
    engine.start()
    try:
        running = [asyncio.create_task(text(engine, name)) for name in ("a", None) * 4]
        await engine.load_lora("b", str(folders["b"]))
        assert await text(engine, "b") == wanted["b"]
        assert await asyncio.gather(*running) == [wanted["a"], wanted[None]] * 4
        stream = engine.submit([1, 2], SamplingParams(max_tokens=50), request_id="r", lora="b")
        with pytest.raises(RequestError, match="1 requests use"):
            await engine.unload_lora("b")
        stream.abort()
        async for _ in stream:
            pass
        await engine.unload_lora("b")
        with pytest.raises(RequestError, match="no LoRA adapter"):
            await text(engine, "b")
        assert [adapter.name for adapter in engine.loras] == ["a"]
    finally:
        await engine.stop()


@pytest.mark.slow
async def test_adapters_survive_a_crash(stories, folders, both, tmp_path):
    """Covers adapters from the start and later ones; an adapter whose files changed is lost."""
    wanted = {name: run(both, [PROMPT], lora=name)[0].text for name in ("a", "b")}
    changing = write_adapter(tmp_path / "changing", stories, seed=3)
    config = EngineConfig.from_options(
        model=str(stories), **OPTIONS, lora=(f"a={folders['a']}",), max_loras=4, max_lora_rank=8
    )
    engine = await asyncio.to_thread(EngineProcess.load, config)
    engine.start()
    try:
        await engine.load_lora("b", str(folders["b"]))
        await engine.load_lora("changing", str(changing))
        with pytest.raises(RequestError, match="adapter_config"):
            await engine.load_lora("none", str(tmp_path))
        assert [await text(engine, name) for name in ("a", "b")] == list(wanted.values())
        write_adapter(changing, stories, seed=4)
        os.kill(engine.pid, signal.SIGSTOP)  # nothing responds until it is killed
        going_on = [asyncio.create_task(text(engine, name)) for name in ("a", "b")]
        params = SamplingParams(max_tokens=12)
        lost = engine.submit([1, 2, 3], params, request_id="lost", lora="changing")
        await asyncio.sleep(0)
        os.kill(engine.pid, signal.SIGKILL)
        assert await asyncio.gather(*going_on) == list(wanted.values())
        [last] = [delta async for deltas in lost for delta in deltas]
        assert isinstance(last.error, LostAdapterError)
        assert engine.num_restarts == 1
        assert [adapter.name for adapter in engine.loras] == ["a", "b"]
        await engine.unload_lora("b")
        await engine.load_lora("again", str(changing))
        await text(engine, "again")
    finally:
        await engine.stop()
