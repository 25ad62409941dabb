"""Engines with steering vectors: selected by request, in batches with other requests.

The expected result is that of the research API with `edit`, which adds the same vectors.
"""

import asyncio
import os
import signal
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lora_files import write_adapter
from safetensors.numpy import save_file

import forge_jax
from forge_jax import LLM, SamplingParams, SteeringVector
from forge_jax.config import EngineConfig
from forge_jax.engine.process.client import EngineProcess
from forge_jax.engine.thread import Engine
from forge_jax.errors import ConfigError, EngineError, ModelError, RequestError
from forge_jax.models.steering import SteeringShape
from forge_jax.schedule.request import LoraRef, Request, cache_name
from forge_jax.step.runner import Runner
from forge_jax.testing import core_of

IDS = [1, 403, 407, 261, 378]
LONG = list(range(100, 160))
OPTIONS = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "dtype": "float32", "num_blocks": 64}
SCORED = SamplingParams(
    max_tokens=12, temperature=0, logprobs=0, prompt_logprobs=0, ignore_eos=True
)
LAYERS, WIDTH = 2, 64  # sizes of the model `short_stories`

ONE = SteeringVector(name="one", scale=1.5, layers=[1])
EACH = SteeringVector(name="each", scale=-0.75)
STEERED = [(), (ONE,), (EACH,), (ONE, EACH)]


def write_vector(file, *shape, seed):
    values = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    save_file({"vector": values}, file)
    return values


@pytest.fixture(scope="module")
def vectors(tmp_path_factory):
    """Return the values of two vectors by name, and the option with their files."""
    root = tmp_path_factory.mktemp("vectors")
    one, each = root / "one.safetensors", root / "each.safetensors"
    values = {
        "one": np.broadcast_to(write_vector(one, WIDTH, seed=1), (LAYERS, WIDTH)),
        "each": write_vector(each, LAYERS, WIDTH, seed=2),
    }
    return values, {"steering_vectors": (f"one={one}", f"each={each}")}


@pytest.fixture(scope="module")
def llm(short_stories, vectors):
    with LLM(short_stories, **OPTIONS, **vectors[1]) as llm:
        yield llm


def steered(*vectors, params=SCORED):
    return replace(params, steering_vectors=vectors)


def run(llm, prompts, params, **options):
    return llm.generate(prompts, params, progress=False, **options)


def scores(output) -> np.ndarray:
    """Return f32: the logprobs of the prompt's tokens and of the output's."""
    found = [*output.prompt_logprobs, *output.outputs[0].logprobs]
    return np.array([each.logprob for each in found], np.float32)


def edits(values, chosen):
    """Return the argument `edit` that adds the chosen vectors."""

    def add(layer):
        def function(x):
            for each in chosen:
                if each.layers is None or layer in each.layers:
                    x = x + np.float32(each.scale) * values[each.name][layer][None]
            return x

        return function

    return {f"layers.{layer}.resid": add(layer) for layer in range(LAYERS)}


def test_requests_of_a_batch_have_their_own_steering(llm, short_stories, vectors):
    model = forge_jax.load(short_stories, dtype="float32")
    outputs = run(llm, [IDS] * len(STEERED), [steered(*chosen) for chosen in STEERED])
    for chosen, output in zip(STEERED, outputs, strict=True):
        tokens = [*IDS, *output.outputs[0].token_ids]
        logits = model(tokens[:-1], edit=edits(vectors[0], chosen))
        wanted = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.array(tokens[1:])[:, None], 1)
        np.testing.assert_allclose(scores(output), wanted[:, 0], atol=1e-5, rtol=0)
        assert tuple(logits.argmax(-1)[len(IDS) - 1 :]) == output.outputs[0].token_ids
    assert len({scores(output).tobytes() for output in outputs}) == len(STEERED)


@pytest.mark.full_compile
def test_bits_of_other_requests_do_not_depend_on_steered_neighbors(llm):
    alike = run(llm, [IDS, LONG, IDS[::-1]], SCORED)
    mixed = run(llm, [IDS, LONG, IDS[::-1]], [SCORED, steered(ONE, EACH), SCORED])
    for index, equal in ((0, True), (1, False), (2, True)):
        same = scores(alike[index]).tobytes() == scores(mixed[index]).tobytes()
        assert same is equal


@pytest.mark.full_compile
def test_scale_zero_gives_the_bits_of_no_steering(llm):
    off = steered(replace(ONE, scale=0), replace(EACH, scale=-0.0))
    [plain], [zero] = run(llm, [IDS], SCORED), run(llm, [IDS], off)
    assert scores(plain).tobytes() == scores(zero).tobytes()
    assert off.steered_by == ()


@pytest.mark.parametrize("layer", [0, 31, 32, 39])
def test_only_selected_rows_and_layers_change(layer):
    shape = SteeringShape(names=("a", "b"), layers=40, width=4, digest="")
    stack = jnp.arange(2 * 40 * 4, dtype=jnp.float32).reshape(2, 40, 4)
    rows = [shape.row([SteeringVector(name="b", scale=0.5, layers=[layer])]), shape.row([])]
    probe = shape.probe(stack, jnp.array(rows), jnp.array([0, 1, 0]))
    x = jnp.full((3, 4), -0.0, jnp.bfloat16)
    for each in range(40):
        y = np.asarray(probe.in_layer(each).visit("resid", x), np.float32)
        assert np.signbit(y[1]).all() and not y[1].any()
        wanted = 0.5 * stack[1, layer] if each == layer else np.full(4, -0.0)
        np.testing.assert_array_equal(y[0], jnp.asarray(wanted, jnp.bfloat16).astype(jnp.float32))
        np.testing.assert_array_equal(y[0], y[2])
        assert np.signbit(y[0]).all() == (each != layer)


def test_blocks_are_shared_only_under_the_same_steering(llm):
    def cached(*chosen):
        params = steered(*chosen, params=SamplingParams(max_tokens=1))
        return run(llm, [LONG], params)[0].num_cached_tokens

    core_of(llm).scheduler.pool.reset()
    different = [(), (ONE,), (replace(ONE, scale=1.25),), (replace(ONE, layers=[0]),), (EACH,)]
    different += [(ONE, EACH), (EACH, ONE)]
    assert [cached(*chosen) for chosen in different] == [0] * len(different)
    assert all(cached(*chosen) for chosen in different)
    assert cached(replace(EACH, scale=0))


def test_cached_blocks_give_the_steered_result(llm):
    core_of(llm).scheduler.pool.reset()
    [computed] = run(llm, [LONG], replace(steered(ONE, EACH), prompt_logprobs=None))
    [cached] = run(llm, [LONG], replace(steered(ONE, EACH), prompt_logprobs=None))
    assert cached.num_cached_tokens and not computed.num_cached_tokens
    assert cached.outputs[0].token_ids == computed.outputs[0].token_ids


def test_cache_names_never_collide():
    ref = LoraRef(name="a", place=1, identity="a")

    def name(salt="", lora=None, *chosen):
        params = SamplingParams(steering_vectors=chosen)
        request = Request(
            request_id="r", prompt_token_ids=[1], params=params, cache_salt=salt, lora=lora
        )
        return cache_name(request)

    plain = [name(salt, lora) for salt in ("", "\0", "s") for lora in (None, ref)]
    some = [name(salt, lora, ONE) for salt in ("", "\0", "s") for lora in (None, ref)]
    fakes = [name(each) for each in (*plain, *some) if each not in ("", "\0", "s")]
    assert len({*plain, *some, *fakes}) == len([*plain, *some]) + len(set(fakes) - {*plain, *some})
    assert not set(some) & {*plain, *fakes}


@pytest.mark.slow
def test_schedules_with_preemption_drafts_and_chunks_give_the_same_tokens(
    llm, short_stories, vectors
):
    longer = replace(SCORED, prompt_logprobs=None, max_tokens=60)
    params = [steered(*chosen, params=longer) for chosen in STEERED]
    prompts = [LONG, LONG, IDS, LONG[::-1]]
    wanted = [each.outputs[0].token_ids for each in run(llm, prompts, params)]
    options = OPTIONS | {"num_blocks": 18, "prefill_chunk_size": 16, "speculation": "ngram"}
    with LLM(short_stories, **options, **vectors[1], block_size=16) as other:
        found = [each.outputs[0].token_ids for each in run(other, prompts, params)]
        assert core_of(other).scheduler.num_preemptions
    assert found == wanted


@pytest.mark.full_compile
@pytest.mark.slow
def test_deterministic_bits_do_not_depend_on_the_batch(short_stories, vectors):
    with LLM(short_stories, **OPTIONS, **vectors[1], deterministic=True) as llm:
        params = [steered(*chosen) for chosen in STEERED]
        together = run(llm, [LONG] * len(STEERED), params)
        core_of(llm).scheduler.pool.reset()
        for output, one in zip(together, params, strict=True):
            [alone] = run(llm, [LONG], one)
            assert scores(alone).tobytes() == scores(output).tobytes()
        fingerprint = llm.system_fingerprint
    with LLM(short_stories, **OPTIONS, deterministic=True) as plain:
        assert plain.system_fingerprint != fingerprint


@pytest.mark.slow
def test_adapters_weights_and_steering_are_independent(llm, short_stories, vectors, tmp_path):
    [wanted] = run(llm, [IDS], steered(ONE, EACH))
    adapter = write_adapter(tmp_path / "a", short_stories, seed=1)
    with LLM(short_stories, **OPTIONS, **vectors[1], max_loras=1) as both:
        both.load_lora("a", str(adapter))
        both.update_weights([np.asarray(leaf) for leaf in both.leaves])
        [found] = run(both, [IDS], steered(ONE, EACH))
        np.testing.assert_allclose(scores(found), scores(wanted), atol=1e-5, rtol=0)
        [adapted] = run(both, [IDS], steered(ONE, EACH), lora="a")
        assert np.abs(scores(adapted) - scores(wanted)).max() > 0.01


def test_engine_without_vectors_has_no_steering(short_stories, llm):
    with LLM(short_stories, **OPTIONS) as plain:
        runner = core_of(plain).device
        assert runner.state.slots.steering is None and "steering" not in runner.settings
        assert len(runner.state.leaves) == len(runner.model.leaves)
        for name, executable in runner.compiled().items():
            assert "/steering/" not in executable.as_text()
            if name.startswith(("decode", "mixed")):
                assert "/steering/" in core_of(llm).device.compiled()[name].as_text()
        with pytest.raises(RequestError, match="start the engine with") as caught:
            run(plain, [IDS], steered(ONE))
        assert caught.value.param == "steering_vectors"


@pytest.mark.parametrize(
    ("vector", "named"),
    [
        ({"name": "ona"}, r"did you mean one"),
        ({"name": "one"}, "set layers"),
        ({"name": "each", "layers": [2]}, "from 0 to 1"),
    ],
)
def test_vectors_that_the_engine_lacks_are_rejected(llm, vector, named):
    with pytest.raises(RequestError, match=f"steering_vectors.*{named}"):
        run(llm, [IDS], steered(SteeringVector(**vector)))


@pytest.mark.parametrize(
    ("vector", "named"),
    [
        ({"name": 1}, "name must be a string"),
        ({"name": "a", "scale": float("nan")}, "at least"),
        ({"name": "a", "scale": "1"}, "must be a number"),
        ({"name": "a", "layers": 1}, "list of integers"),
        ({"name": "a", "layers": []}, "must not be empty"),
        ({"name": "a", "layers": [-1]}, "between 0"),
        ({"name": "a", "layers": [0.5]}, "must be an integer"),
    ],
)
def test_invalid_vectors_are_rejected(vector, named):
    with pytest.raises(RequestError, match=named) as caught:
        SteeringVector(**vector)
    assert caught.value.param == "steering_vectors"


def test_invalid_lists_of_vectors_are_rejected():
    for value, named in (("one", "list of SteeringVector"), ([ONE] * 5, "at most 4")):
        with pytest.raises(RequestError, match=named):
            SamplingParams(steering_vectors=value)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("a",), "NAME=FILE"),
        (("a b=x",), "NAME=FILE"),
        ("a=x", "tuple"),
        (("a=x", "a=y"), "two steering vectors have this name"),
        (tuple(f"v{i}=x" for i in range(65)), "at most 64 times"),
    ],
)
def test_invalid_options_are_rejected(options, named):
    with pytest.raises(ConfigError, match=named):
        EngineConfig.from_options(steering_vectors=options)


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({"a": np.zeros(63, np.float32)}, r"shape \(63,\).*shape \(64,\), or \(2, 64\)"),
        ({"a": np.zeros((3, 64), np.float32)}, r"shape \(3, 64\)"),
        ({"a": np.zeros(64, np.int32)}, "is int32"),
        ({"a": np.full(64, np.nan, np.float32)}, "not finite"),
        ({"a": np.zeros(64, np.float32), "b": np.zeros(64, np.float32)}, "2 tensors"),
        (None, "is missing"),
    ],
)
def test_files_that_do_not_fit_stop_the_start(short_stories, tmp_path, monkeypatch, tensors, named):
    monkeypatch.setattr(Runner, "compile", None)
    if tensors is not None:
        save_file(tensors, tmp_path / "v.safetensors")
    with pytest.raises(ModelError, match=f"steering_vectors: .*{named}"):
        LLM(short_stories, **OPTIONS, steering_vectors=(f"v={tmp_path / 'v.safetensors'}",))


# ---- the async engines -------------------------------------------------------------------------


async def tokens(engine, *chosen) -> tuple[int, ...]:
    params = steered(*chosen, params=SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    deltas = [delta async for delta in engine.generate(IDS, params)]
    if deltas[-1].error is not None:
        raise deltas[-1].error
    return tuple(token for delta in deltas for token in delta.token_ids)


async def test_thread_engine_steers_also_after_a_sleep(llm, short_stories, vectors):
    wanted = [o.outputs[0].token_ids for o in run(llm, [IDS] * 2, [SCORED, steered(ONE)])]
    config = EngineConfig.from_options(model=str(short_stories), **OPTIONS, **vectors[1])
    engine = await asyncio.to_thread(Engine.load, config)
    engine.start()
    try:
        assert await asyncio.gather(tokens(engine), tokens(engine, ONE)) == wanted
        await engine.control.sleep()
        await engine.control.wake_up()
        assert await asyncio.gather(tokens(engine), tokens(engine, ONE)) == wanted
    finally:
        await engine.stop()


@pytest.mark.slow
async def test_steered_requests_survive_a_crash(llm, short_stories, vectors, tmp_path):
    """A request ends with an error if the file of a vector changed meanwhile."""
    chosen = [(), (ONE,), (EACH,)]
    wanted = [
        o.outputs[0].token_ids for o in run(llm, [IDS] * 3, [steered(*each) for each in chosen])
    ]
    file = tmp_path / "changing.safetensors"
    write_vector(file, LAYERS, WIDTH, seed=3)
    options = (*vectors[1]["steering_vectors"], f"changing={file}")
    config = EngineConfig.from_options(
        model=str(short_stories), **OPTIONS, steering_vectors=options
    )
    engine = await asyncio.to_thread(EngineProcess.load, config)
    engine.start()
    try:
        with pytest.raises(RequestError, match="no vector with this name"):
            await tokens(engine, replace(ONE, name="none"))
        os.kill(engine.pid, signal.SIGSTOP)  # nothing responds until it is killed
        going_on = [asyncio.create_task(tokens(engine, *each)) for each in chosen]
        await asyncio.sleep(0)
        os.kill(engine.pid, signal.SIGKILL)
        assert await asyncio.gather(*going_on) == wanted
        os.kill(engine.pid, signal.SIGSTOP)
        write_vector(file, LAYERS, WIDTH, seed=4)
        plain = asyncio.create_task(tokens(engine))
        lost = asyncio.create_task(tokens(engine, ONE))
        await asyncio.sleep(0)
        os.kill(engine.pid, signal.SIGKILL)
        assert await plain == wanted[0]
        with pytest.raises(EngineError, match="changed while the engine restarted"):
            await lost
        assert await tokens(engine, ONE) == wanted[1]
        assert engine.num_restarts == 2
    finally:
        await engine.stop()
