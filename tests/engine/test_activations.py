"""Engines that return activations: by request, in batches with other requests.

The expected activations are those of the research API on the same tokens.
"""

import asyncio
import os
import signal
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import forge_jax
from forge_jax import LLM, ReturnActivations, SamplingParams
from forge_jax.config import EngineConfig
from forge_jax.engine.process.client import EngineProcess
from forge_jax.engine.process.messages import Updates
from forge_jax.engine.validation import ResearchLimits
from forge_jax.errors import ConfigError, RequestError
from forge_jax.schedule.activations import Activations, joined
from forge_jax.schedule.outputs import Delta
from forge_jax.schedule.plan import Decodes, ScheduledSequence, SequenceResult, StepPlan
from forge_jax.step.activations import SlotActivations, add_activations
from forge_jax.step.runner import Runner
from forge_jax.testing import core_of

IDS = [1, 403, 407, 261, 378]
LONG = list(range(100, 160))
OPTIONS = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "dtype": "float32", "num_blocks": 64}
SERVED = {"activations": ("layers.*.resid", "layers.1.mlp.out", "final_norm")}
NAMES = ("layers.0.resid", "layers.1.mlp.out", "layers.1.resid", "final_norm")
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
ALL = ReturnActivations(names=["*"], tokens="all")
OUTPUT = ReturnActivations(names=["layers.[01].resid"])


@pytest.fixture(scope="module")
def llm(short_stories):
    with LLM(short_stories, **OPTIONS, **SERVED) as llm:
        yield llm


def returning(returned, params=GREEDY, **more):
    return replace(params, return_activations=returned, **more)


def run(llm, prompts, params, **options):
    return llm.generate(prompts, params, progress=False, **options)


def bits(output):
    arrays = output.outputs[0].activations.arrays
    return {name: array.tobytes() for name, array in arrays.items()}


def assert_equal_to_the_research_api(model, output, start, names):
    """Compare the activations of each sample, whose rows begin at `start[index]`."""
    for completion, first in zip(output.outputs, start, strict=True):
        tokens = [*output.prompt_token_ids, *completion.token_ids]
        if completion.token_ids:
            del tokens[-1]
        _, taps = model(tokens, taps=names)
        found = completion.activations
        assert (found.start, found.end) == (first, len(tokens))
        assert tuple(found.arrays) == names
        for name, array in found.arrays.items():
            wanted = np.asarray(taps[name])[first:]
            np.testing.assert_allclose(array, wanted, atol=2e-4, rtol=1e-4)


def test_requests_of_a_batch_return_their_own_activations(llm, short_stories):
    model = forge_jax.load(short_stories, dtype="float32")
    params = [returning(ALL), GREEDY, returning(OUTPUT), returning(ALL, max_tokens=0)]
    whole, plain, output, prompt = run(llm, [IDS, IDS, LONG, LONG[:9]], params)
    assert plain.outputs[0].activations is None
    assert_equal_to_the_research_api(model, whole, [0], NAMES)
    assert_equal_to_the_research_api(model, output, [59], ("layers.0.resid", "layers.1.resid"))
    assert_equal_to_the_research_api(model, prompt, [0], NAMES)
    assert plain.outputs[0].token_ids == whole.outputs[0].token_ids


def test_output_activations_predict_the_output_tokens(llm, short_stories):
    model = forge_jax.load(short_stories, dtype="float32")
    [output] = run(llm, [IDS], returning(ReturnActivations(names=["final_norm"])))
    [completion] = output.outputs
    rows = completion.activations.arrays["final_norm"]
    logits = model.model.logits(model.leaves, rows)
    assert tuple(np.asarray(logits).argmax(-1)) == completion.token_ids


def test_prompts_in_the_prefix_cache_are_computed_again(llm, short_stories):
    """Only the first of several samples returns the prompt."""
    model = forge_jax.load(short_stories, dtype="float32")
    run(llm, [LONG], GREEDY)
    params = [returning(OUTPUT), returning(ALL), returning(ALL, n=2)]
    cached, computed, samples = run(llm, [LONG] * 3, params)
    assert cached.num_cached_tokens and not computed.num_cached_tokens
    assert_equal_to_the_research_api(model, computed, [0], NAMES)
    assert_equal_to_the_research_api(model, samples, [0, 59], NAMES)


def test_stops_end_the_activations_with_the_tokens(llm):
    [plain] = run(llm, [IDS], GREEDY)
    tokens, text = plain.outputs[0].token_ids, plain.outputs[0].text
    for more in ({"stop": [text[6:9]]}, {"stop_token_ids": [tokens[4]]}, {"max_tokens": 1}):
        [stopped] = run(llm, [IDS], returning(OUTPUT, **more))
        [completion] = stopped.outputs
        assert 0 < len(completion.token_ids) < len(tokens)
        assert len(completion.activations) == len(completion.token_ids)
    [nothing] = run(llm, [IDS], returning(OUTPUT, max_tokens=0))
    assert nothing.outputs[0].activations is None


def test_streams_return_each_position_with_its_token(llm):
    deltas = list(llm.stream(IDS, returning(ALL)))
    assert [len(delta.activations) for delta in deltas] == [len(IDS), *[1] * 11]
    [whole] = run(llm, [IDS], returning(ALL))
    for name, array in joined([delta.activations for delta in deltas]).arrays.items():
        assert array.tobytes() == whole.outputs[0].activations.arrays[name].tobytes()


def test_bits_of_other_requests_do_not_depend_on_returned_activations(short_stories):
    scored = replace(GREEDY, logprobs=0)
    prompts = [IDS, LONG, IDS[::-1]]
    with LLM(short_stories, **OPTIONS, **SERVED, itl_target_ms=0) as llm:
        alike = run(llm, prompts, scored)
        core_of(llm).scheduler.pool.reset()
        mixed = run(llm, prompts, [scored, returning(ALL, scored), scored])
    for before, after in zip(alike, mixed, strict=True):
        assert before.outputs[0].logprobs == after.outputs[0].logprobs


def test_new_weights_restart_unfinished_prompts(short_stories):
    """All rows of a prompt are of the same weights."""
    options = OPTIONS | {"max_num_batched_tokens": 64, "prefill_chunk_size": 16}
    with LLM(short_stories, **options, **SERVED) as llm:
        old = [np.asarray(leaf) for leaf in llm.leaves]
        core = core_of(llm)
        scales = [1.25 if leaf.ndim == 1 else 1.0 for leaf in old]
        new = [leaf * np.float32(scale) for leaf, scale in zip(old, scales, strict=True)]

        tick, ticks = core.tick, []

        def update_at_third(*args):
            ticks.append(None)
            if len(ticks) == 3:
                llm._weights.update(core, llm._weights.prepare(new), 1, "keep")
            return tick(*args)

        core.tick = update_at_third
        [found] = run(llm, [LONG], returning(ALL, max_tokens=2))
        core.tick = tick
        core.scheduler.pool.reset()
        [wanted] = run(llm, [LONG], returning(ALL, max_tokens=2))
        assert found.outputs[0].weight_versions == ((1, 2),)
        assert bits(found) == bits(wanted)


@pytest.mark.slow
def test_schedules_with_preemption_drafts_and_chunks_return_each_position_once(llm, short_stories):
    params = [returning(each, max_tokens=60) for each in (ALL, OUTPUT, ALL, OUTPUT)]
    prompts = [LONG, LONG, IDS, LONG[::-1]]
    wanted = run(llm, prompts, params)
    options = OPTIONS | {"num_blocks": 18, "prefill_chunk_size": 16, "speculation": "ngram"}
    with LLM(short_stories, **options, **SERVED, block_size=16) as other:
        found = run(other, prompts, params)
        assert core_of(other).scheduler.num_preemptions
        assert sum(each.outputs[0].num_accepted_tokens for each in found)
    for left, right in zip(wanted, found, strict=True):
        left, right = left.outputs[0], right.outputs[0]
        assert left.token_ids == right.token_ids
        assert (left.activations.start, len(left.activations)) == (
            right.activations.start,
            len(right.activations),
        )
        for name, array in left.activations.arrays.items():
            other = right.activations.arrays[name]
            np.testing.assert_allclose(array, other, atol=2e-4, rtol=1e-3)


def of_two_batches(llm):
    """Return the bits of a request's activations: alone, and while others compute prompts."""
    [alone] = run(llm, [IDS], returning(ALL))
    prompts = [IDS, LONG, LONG[1:], LONG[2:]]
    together, *_ = run(llm, prompts, [returning(ALL), GREEDY, returning(OUTPUT), returning(ALL)])
    return bits(alone), bits(together)


@pytest.mark.slow
def test_deterministic_activations_do_not_depend_on_the_batch(llm, short_stories):
    """Bits depend on the batch unless `deterministic` is set."""
    alone, together = of_two_batches(llm)
    assert alone != together
    with LLM(short_stories, **OPTIONS, **SERVED, deterministic=True) as other:
        alone, together = of_two_batches(other)
        assert alone == together
        fingerprint = other.system_fingerprint
    with LLM(short_stories, **OPTIONS, deterministic=True) as plain:
        assert plain.system_fingerprint != fingerprint


def test_engine_without_activations_compiles_the_same_program(short_stories, llm):
    with LLM(short_stories, **OPTIONS) as plain:
        runner, other = core_of(plain).device, core_of(llm).device
        assert "activations" not in runner.settings
        for name, executable in runner.compiled().items():
            if name.startswith(("decode", "mixed")):
                num_results = executable.out_tree.num_leaves
                assert other.compiled()[name].out_tree.num_leaves == num_results + len(NAMES)
        with pytest.raises(RequestError, match="start it with --activations") as caught:
            run(plain, [IDS], returning(OUTPUT))
        assert caught.value.param == "return_activations"


class OnDevice:
    """An array that may be read, or not."""

    def __init__(self, array, *, may_read):
        self.array, self.may_read = array, may_read

    def __array__(self, dtype=None, copy=None):
        assert self.may_read, "an activation is read that nobody requested"
        return self.array


def test_only_requested_rows_are_read():
    served = SlotActivations(("a", "b"))
    plain, asks = GREEDY, returning(ReturnActivations(names=["b"]))
    chunk = dict(samples=False, new_blocks=(), num_output=0, num_rows=0)
    rows = np.arange(10, dtype=np.float32)[:, None]
    plan = StepPlan(
        step=0,
        admissions=(),
        decodes=Decodes(slots=[0, 1], starts=[7, 4]),
        chunks=(
            ScheduledSequence(slot=2, start=3, token_ids=(5, 6, 7), num_returned=2, **chunk),
            ScheduledSequence(slot=3, start=3, token_ids=(5, 6), num_returned=0, **chunk),
        ),
    )
    assert served.of_step(plan) == ()
    for slot, params in enumerate((plain, asks, asks, asks)):
        served.admit(slot, params)
    results = [SequenceResult((1,)), SequenceResult((1,)), SequenceResult(), SequenceResult()]
    arrays = [OnDevice(rows, may_read=False), OnDevice(rows, may_read=True)]
    add_activations(results, served.of_step(plan), arrays)
    found = [
        got.activations and (got.activations.start, got.activations.arrays["b"].ravel().tolist())
        for got in results
    ]
    assert found == [None, (4, [1.0]), (4, [3.0, 4.0]), None]
    for slot in range(4):
        served.admit(slot, plain)
    assert served.of_step(plan) == ()


@pytest.mark.parametrize(
    ("params", "named"),
    [
        (returning(ReturnActivations(names=["layers.1.resit"])), "did you mean layers.1.resid"),
        (returning(ReturnActivations(names=["*", "embed"])), r"names\[1\] matches no activation"),
        (returning(OUTPUT, max_tokens=400, n=128), "raise --max-activation-mib"),
    ],
)
def test_activations_that_the_engine_cannot_return_are_rejected(llm, params, named, monkeypatch):
    core = core_of(llm)
    less = core.limits.activations._replace(max_bytes=1 << 20)
    monkeypatch.setattr(core, "_research", ResearchLimits(activations=less))
    with pytest.raises(RequestError, match=f"return_activations: .*{named}") as caught:
        run(llm, [IDS], params)
    assert caught.value.param == "return_activations"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"names": "a"}, "list of strings"),
        ({"names": []}, "not be empty"),
        ({"names": [1]}, "list of strings"),
        ({"names": ["a"] * 65}, "at most 64"),
        ({"names": ["a" * 129]}, "longer than 128"),
        ({"names": ["a"], "tokens": "prompt"}, "output or all"),
    ],
)
def test_invalid_requests_are_rejected(fields, named):
    with pytest.raises(RequestError, match=named) as caught:
        ReturnActivations(**fields)
    assert caught.value.param == "return_activations"
    with pytest.raises(RequestError, match="must be a ReturnActivations"):
        SamplingParams(return_activations=["a"])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"activations": ("layers.*.resit",)}, "nearest names are layers.1.resid"),
        ({"activations": ("layers.*.attn.*",)}, "attn.pattern, which a served step does not"),
        ({"activations": "embed"}, "tuple"),
        ({"activations": ("a",) * 65}, "at most 64 times"),
        ({"max_activation_mib": 129}, "between 1 and 128"),
    ],
)
def test_options_that_do_not_fit_stop_the_start(short_stories, monkeypatch, options, named):
    monkeypatch.setattr(Runner, "compile", None)
    with pytest.raises(ConfigError, match=named):
        LLM(short_stories, **OPTIONS, **options)


# ---- the engine process ------------------------------------------------------------------------


def test_messages_keep_arrays_and_split_by_request():
    rows = {"a": np.arange(6).reshape(2, 3).astype(np.dtype("bfloat16")), "b": np.ones((2, 1))}
    outputs = {
        "plain": [Delta(0)],
        "large": [Delta(0, activations=Activations(3, rows))],
        "other": [Delta(1)],
    }
    messages = list(Updates.split(outputs))
    assert [list(message.outputs) for message in messages] == [["large"], ["plain", "other"]]
    [found] = messages[0].to_outputs()["large"]
    assert found.activations.start == 3
    for name, array in rows.items():
        got = found.activations.arrays[name]
        assert (got.dtype, got.shape, got.tobytes()) == (array.dtype, array.shape, array.tobytes())


async def deltas_of(engine, params):
    deltas = [delta async for delta in engine.generate(LONG, params)]
    tokens = tuple(token for delta in deltas for token in delta.token_ids)
    parts = [delta.activations for delta in deltas if delta.activations is not None]
    return SimpleNamespace(tokens=tokens, rows=joined(parts))


@pytest.mark.slow
async def test_each_position_is_returned_once_after_a_crash(llm, short_stories):
    params = [returning(each, max_tokens=100) for each in (ALL, OUTPUT)]
    wanted = run(llm, [LONG] * 2, params)
    config = EngineConfig.from_options(model=str(short_stories), **OPTIONS, **SERVED)
    engine = await asyncio.to_thread(EngineProcess.load, config)
    engine.start()
    try:
        running = [asyncio.create_task(deltas_of(engine, each)) for each in params]
        while engine.stats().generation_tokens < 20:
            await asyncio.sleep(0.01)
        os.kill(engine.pid, signal.SIGKILL)
        for found, right in zip(await asyncio.gather(*running), wanted, strict=True):
            [completion] = right.outputs
            assert found.tokens == completion.token_ids
            assert (found.rows.start, found.rows.end) == (
                completion.activations.start,
                completion.activations.end,
            )
            for name, array in completion.activations.arrays.items():
                np.testing.assert_allclose(found.rows.arrays[name], array, atol=2e-4, rtol=1e-3)
        assert engine.stats().restarts == 1
    finally:
        await engine.stop()
