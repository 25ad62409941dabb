"""`update_weights`: new weights in a running engine, between two steps and without compiling."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from forge_jax import (
    LLM,
    Engine,
    EngineConfig,
    EngineError,
    EngineProcess,
    GrammarSpec,
    ModelError,
    OverloadedError,
    RequestError,
    SamplingParams,
    load,
    score,
)
from forge_jax.checkpoint.load import load_floats, load_tensors, load_weights
from forge_jax.checkpoint.model_spec import read_spec
from forge_jax.models.registry import build_model
from forge_jax.schedule.request import Request
from forge_jax.telemetry.compilations import SinceReady
from forge_jax.testing import core_of, drafts_always_pay
from forge_jax.weights.formats import WeightFormats
from forge_kernels import cpu

pytestmark = pytest.mark.slow

SIZES: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 128, "deterministic": True}
PROMPTS = [[5, 6, 7, 8, 9] * n for n in (1, 8, 14)]
PARAMS = SamplingParams(max_tokens=16, seed=3, logprobs=0, ignore_eos=True, detokenize=False)


@contextmanager
def running(folder: Path, **options: Any) -> Iterator[LLM]:
    with LLM(str(folder), **SIZES | options) as llm:
        yield llm


@pytest.fixture(scope="module")
def tensors(short_stories) -> dict[str, np.ndarray]:
    """Return the checkpoint with other values, under the checkpoint's names."""
    rng = np.random.default_rng(1)
    stored = load_file(short_stories / "model.safetensors")
    return {n: t + 0.05 * rng.normal(size=t.shape).astype(t.dtype) for n, t in stored.items()}


@pytest.fixture(scope="module")
def changed(short_stories, tensors, tmp_path_factory) -> Path:
    """Return a folder with these tensors."""
    import shutil

    from safetensors.numpy import save_file

    folder = tmp_path_factory.mktemp("changed") / "model"
    shutil.copytree(short_stories, folder)
    save_file(tensors, folder / "model.safetensors")
    return folder


def sampled(llm: LLM, params: SamplingParams = PARAMS) -> list[Any]:
    return llm.generate(PROMPTS, params, progress=False)


def outputs(llm: LLM) -> list[Any]:
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in sampled(llm)]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def pair(request, short_stories, changed) -> Iterator[tuple[LLM, list[Any], list[Any]]]:
    """Return an engine, its outputs, and those of an engine that was loaded with the new ones."""
    with running(changed, dtype=request.param) as other:
        expected = outputs(other)
    with running(short_stories, dtype=request.param) as llm:
        before = outputs(llm)
        assert before != expected
        yield llm, before, expected


def test_updated_engine_equals_one_that_was_loaded_with_the_weights(pair, tensors, changed):
    llm, before, expected = pair
    original = tuple(jnp.copy(leaf) for leaf in llm.leaves)
    plain = load(str(changed), dtype=str(llm.model.dtype), progress=False)
    by_leaf = dict(zip(plain.model.names, plain.leaves, strict=True))
    compiled = SinceReady()
    _ = compiled()
    for weights in (tensors, by_leaf):
        llm.update_weights(weights)
        assert outputs(llm) == expected
        llm.update_weights(original)  # the prefix cache has blocks of the others
        assert outputs(llm) == before
    assert compiled() == 0


def test_leaves_are_copied_because_trainers_donate_theirs(short_stories):
    with running(short_stories, dtype="float32") as llm:
        before = outputs(llm)
        trained = tuple(jnp.copy(leaf) for leaf in llm.leaves)
        llm.update_weights(trained)
        for leaf in trained:
            leaf.delete()
        assert outputs(llm) == before


def start(llm: LLM, ticks: int, params: SamplingParams = PARAMS) -> tuple[Any, list[Any]]:
    """Start requests in the engine's loop. Return it, and the deltas of the first ticks."""
    core, deltas = core_of(llm), []
    for index, prompt in enumerate(PROMPTS):
        core.add(
            Request(
                request_id=f"r{index}-{core.num_steps}",
                prompt_token_ids=prompt,
                params=params,
                seed=index,
            )
        )
    for _ in range(ticks):
        deltas += [(r, d) for r, got in core.tick().items() for d in got]
    return core, deltas


def finish(core: Any, deltas: list[Any]) -> dict[str, list[Any]]:
    while core.has_work:
        deltas += [(r, d) for r, got in core.tick().items() for d in got]
    by_request: dict[str, list[Any]] = {}
    for request_id, delta in deltas:
        by_request.setdefault(request_id, []).append(delta)
    return by_request


@pytest.mark.parametrize("packed", [None, "bf16", "int8"])
@pytest.mark.parametrize(
    "name", ["gpt2", "qwen3_moe_step", "gpt_neox", "glm4", "deepseek_v2", "llama32_tied", "gpt_oss"]
)
def test_tensors_in_memory_give_the_leaves_of_their_files(goldens, name, packed):
    """Includes stored matrices that are transposed, fused, ordered by head, or of experts."""
    folder = goldens / name
    if packed is not None and not cpu.available():
        pytest.skip("the C++ kernels are not available")
    spec = read_spec(folder)
    model = build_model(spec, "bfloat16", WeightFormats(layers=packed, head=packed))
    tensors = load_file(folder / "model.safetensors")
    expected = load_weights(model, folder, progress=False)
    found = load_tensors(model, tensors, device=None, mesh=None)
    for leaf, one, other in zip(model.names, expected, found, strict=True):
        assert one.dtype == other.dtype and bool((one == other).all()), leaf
    plain = build_model(spec, "float32", WeightFormats())
    whole = load_weights(plain, folder, progress=False)
    floats = {n: np.asarray(a) for n, a in zip(plain.names, whole, strict=True)}
    for leaf, one, other in zip(
        model.names, expected, load_floats(model, floats, device=None, mesh=None), strict=True
    ):
        assert one.dtype == other.dtype and bool((one == other).all()), leaf


@pytest.mark.parametrize("ticks", [1, 3, 7])
@pytest.mark.parametrize("options", [{}, {"speculation": "ngram"}, {"one_step_ahead": False}])
def test_kept_requests_have_the_logprobs_of_each_tokens_weights(
    short_stories, tensors, options, ticks
):
    with running(short_stories, dtype="float32", **options) as llm:
        speculator = core_of(llm).speculator
        if speculator is not None:
            drafts_always_pay(speculator.policy)
        scored = jax.jit(partial(score, llm.model, options=llm.score_options))
        weights = {0: llm.leaves}
        core, deltas = start(llm, ticks)
        llm.update_weights(tensors, 5)
        weights[5] = llm.leaves
        seen: set[int] = set()
        for request_id, got in finish(core, deltas).items():
            prompt = PROMPTS[int(request_id[1])]
            tokens = [t for d in got for t in d.token_ids]
            assert len(tokens) == PARAMS.max_tokens
            padded = np.zeros(80 + 16, np.int32)
            padded[: len(prompt) + len(tokens)] = prompt + tokens
            scores = {v: np.asarray(scored(leaves, padded)) for v, leaves in weights.items()}
            position = len(prompt)
            for delta in got:
                seen.add(delta.weight_version)
                for entry in delta.logprobs or ():
                    assert entry.logprob == scores[delta.weight_version][position]
                    position += 1
        assert seen == ({0, 5} if ticks > 2 else {5, *seen})
        assert core.weight_version == 5


def test_restarted_requests_equal_new_ones(short_stories, changed, tensors):
    with running(changed, dtype="float32") as other:
        expected = finish(*start(other, 0))
    with running(short_stories, dtype="float32") as llm:
        core, deltas = start(llm, 8)
        assert any(delta.token_ids for _, delta in deltas)
        prompt_tokens = core.prompt_tokens
        llm.update_weights(tensors, in_flight="restart")
        assert core.prompt_tokens == prompt_tokens
        for request_id, got in finish(core, deltas).items():
            last = max((i for i, d in enumerate(got) if d.restarted), default=-1)
            tokens = [t for d in got[last + 1 :] for t in d.token_ids]
            assert tokens == [t for d in expected[request_id] for t in d.token_ids]
            assert {d.weight_version for d in got[last + 1 :]} == {1}
        assert sum(delta.restarted for _, delta in deltas) == len(PROMPTS)


def test_restarted_requests_keep_their_grammar(short_stories, changed, tensors, monkeypatch):
    grammar = GrammarSpec.regex("[a-z ]{4,40}")
    params = SamplingParams(max_tokens=12, seed=3, structured_outputs=grammar, detokenize=False)
    with running(changed, dtype="float32") as other:
        expected = finish(*start(other, 0, params))
    with running(short_stories, dtype="float32") as llm:
        core, deltas = start(llm, 6, params)
        assert core.constraints.held

        def fails(spec: Any) -> Any:
            raise OverloadedError("the grammar compiler is busy")

        assert core.grammars is not None
        monkeypatch.setattr(core.grammars, "compile", fails)
        llm.update_weights(tensors, in_flight="restart")
        for request_id, got in finish(core, deltas).items():
            last = max((i for i, d in enumerate(got) if d.restarted), default=-1)
            tokens = [t for d in got[last + 1 :] for t in d.token_ids]
            assert tokens == [t for d in expected[request_id] for t in d.token_ids]
            assert got[-1].finish_reason not in (None, "error")


@pytest.mark.parametrize("error", [RequestError("full"), RuntimeError("a defect")])
def test_failed_restart_ends_the_request_and_no_other(
    short_stories, changed, tensors, monkeypatch, error
):
    with running(changed, dtype="float32") as other:
        expected = outputs(other)
    with running(short_stories, dtype="float32") as llm:
        core, deltas = start(llm, 8)
        first = core.scheduler.request_ids()[0]
        add = core.scheduler.add

        def fails_for_first(request: Request) -> Any:
            if request.request_id == first:
                raise error
            return add(request)

        monkeypatch.setattr(core.scheduler, "add", fails_for_first)
        llm.update_weights(tensors, in_flight="restart")
        assert core.scheduler.pool.num_cached == 0  # no block has values of the old weights
        by_request = finish(core, deltas)
        for request_id, got in by_request.items():
            assert sum(d.finish_reason is not None for d in got) == 1
            assert (got[-1].finish_reason == "error") == (request_id == first)
        last = by_request[first][-1].error
        assert isinstance(last, RequestError if isinstance(error, RequestError) else EngineError)
        monkeypatch.undo()
        assert outputs(llm) == expected and llm.weight_version == 1


def test_aborted_requests_end_with_their_output(short_stories, tensors):
    with running(short_stories, dtype="float32") as llm:
        core, deltas = start(llm, 6)
        llm.update_weights(tensors, in_flight="abort")
        for got in finish(core, deltas).values():
            assert got[-1].finish_reason == "abort"
            assert 0 < sum(len(d.token_ids) for d in got) < 16
        assert core.scheduler.pool.num_used == 0


def test_prompt_logprobs_are_of_one_version(short_stories, tensors):
    params = SamplingParams(max_tokens=2, prompt_logprobs=0, seed=1, detokenize=False)
    sizes = {"max_num_batched_tokens": 8}
    with running(short_stories, dtype="float32", **sizes) as llm:
        core, deltas = start(llm, 3, params)
        llm.update_weights(tensors)
        by_request = finish(core, deltas)
        expected = finish(*start(llm, 0, params))
        versions = {got[0].weight_version for got in by_request.values()}
        assert versions == {0, 1}
        for got, again in zip(by_request.values(), expected.values(), strict=True):
            if not got[0].weight_version:
                continue  # its prompt was complete
            found = [d.prompt_logprobs for d in got if d.prompt_logprobs is not None]
            assert found == [d.prompt_logprobs for d in again if d.prompt_logprobs is not None]


def test_failed_step_is_retried_with_the_new_weights(short_stories, tensors, changed, monkeypatch):
    with running(changed, dtype="float32") as other:
        expected = outputs(other)
    with running(short_stories, dtype="float32") as llm:
        llm.update_weights(tensors)
        core = core_of(llm)
        dispatch, failures = core.device.dispatch, [True]

        def fails_once(plan: Any) -> Any:
            if core.num_steps > 3 and failures:
                failures.pop()
                raise RuntimeError("the device has failed")
            return dispatch(plan)

        monkeypatch.setattr(core.device, "dispatch", fails_once)
        assert outputs(llm) == expected
        assert core.num_recoveries == 1


def test_first_layers_as_draft_model_get_the_new_weights(short_stories, tensors):
    options = {"draft_model": "self", "draft_layers": 1, "speculation": "draft"}
    with running(short_stories, dtype="float32", **options) as llm:
        weights = llm._parts.weights
        assert weights is not None and weights._draft_model is not None
        drafter = weights._draft_model
        llm.update_weights(tensors)
        for name, leaf in zip(drafter.model.names, drafter._leaves, strict=True):
            assert leaf is llm.leaves[llm.model.names.index(name)]
        [output, *_] = sampled(llm)
        assert output.outputs[0].weight_versions == ((1, PARAMS.max_tokens),)


def test_completions_have_runs_of_versions(short_stories, tensors):
    with running(short_stories, dtype="float32") as llm:
        deltas = llm.stream(PROMPTS[0], PARAMS)
        first = next(deltas)
        assert first.weight_version == 0
        llm.update_weights(tensors, 3)
        rest = [d.weight_version for d in deltas if d.token_ids]
        assert rest[-1] == 3 and sorted(rest) == rest
        assert llm.weight_version == 3
        assert llm.system_fingerprint is not None and llm.system_fingerprint.endswith("-w3")
        [output, *_] = sampled(llm)
        assert output.outputs[0].weight_versions == ((3, PARAMS.max_tokens),)


def test_invalid_weights_are_named_and_change_nothing(short_stories, tensors):
    with running(short_stories, dtype="float32") as llm:
        before = outputs(llm)
        names = llm.model.names
        own = dict(zip(names, llm.leaves, strict=True))
        name = "layers.1.mlp.down.weight"
        at = names.index(name)
        wrong: list[tuple[Any, str]] = [
            (llm.leaves[:-1], "leaves, but the model has"),
            ((*llm.leaves[:at], llm.leaves[at].T, *llm.leaves[at + 1 :]), name),
            (
                (*llm.leaves[:at], llm.leaves[at].astype(jnp.bfloat16), *llm.leaves[at + 1 :]),
                name,
            ),
            ({n: a for n, a in own.items() if n != name}, f"lack leaf {name}"),
            (own | {"layers.9.x": llm.leaves[at]}, "unknown leaf layers.9.x"),
            (own | {name: llm.leaves[at].T}, name),
            (own | {name: np.zeros(llm.leaves[at].shape, np.int32)}, name),
            ({n: t for n, t in tensors.items() if "q_proj" not in n}, "q_proj.weight is missing"),
            (tensors | {"model.norm.weight": np.ones(3, np.float32)}, "model.norm.weight"),
        ]
        for weights, match in wrong:
            with pytest.raises(ModelError, match=match):
                llm.update_weights(weights)
        with pytest.raises(RequestError, match="version must be above 0"):
            llm.update_weights(tensors, 0)
        with pytest.raises(RequestError, match="keep, restart, abort"):
            llm.update_weights(tensors, in_flight="wait")  # pyright: ignore[reportArgumentType]
        assert llm.weight_version == 0 and outputs(llm) == before


class Unconvertible:
    """An array of another library, such as a bfloat16 tensor of PyTorch."""

    shape, dtype = (64,), "bfloat16"

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise TypeError("unsupported type BFloat16")


def test_other_types_are_rejected_before_anything_is_copied(short_stories, tensors, monkeypatch):
    with running(short_stories, dtype="float32") as llm:
        wrong: list[tuple[Any, str]] = [
            (None, "not NoneType"),
            (iter(llm.leaves), "must be a sequence"),
            (tensors | {"model.norm.weight": Unconvertible()}, "model.norm.weight of the new"),
        ]
        for weights, match in wrong:
            with pytest.raises(ModelError, match=match):
                llm.update_weights(weights)
        weights = llm._parts.weights
        assert weights is not None
        monkeypatch.setattr(weights, "prepare", lambda _: pytest.fail("must not copy"))
        versions: tuple[Any, ...] = ("3", 1.5, True, 0)
        for version in versions:
            with pytest.raises(RequestError, match="version must be"):
                llm.update_weights(tensors, version)
        assert llm.weight_version == 0


def test_weights_without_room_on_the_device_name_the_remedy(short_stories, tensors, monkeypatch):
    with running(short_stories, dtype="float32") as llm:
        before = outputs(llm)
        with monkeypatch.context() as patch:

            def full(*_: Any, **__: Any) -> Any:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9")

            patch.setattr(jax, "device_put", full)
            for weights in (llm.leaves, tensors):
                with pytest.raises(ModelError, match=r"GiB.*memory_fraction or num_blocks"):
                    llm.update_weights(weights)

            def broken(*_: Any, **__: Any) -> Any:
                raise jax.errors.JaxRuntimeError("INTERNAL: the device is lost")

            patch.setattr(jax, "device_put", broken)
            with pytest.raises(jax.errors.JaxRuntimeError, match="the device is lost"):
                llm.update_weights(tensors)
        assert llm.weight_version == 0 and outputs(llm) == before


def test_quantized_checkpoint_accepts_only_quantized_weights(goldens):
    with running(goldens / "gpt_oss_mxfp4", max_model_len=64) as llm:
        plain = load(str(goldens / "gpt_oss"), dtype="bfloat16", progress=False)
        by_leaf = dict(zip(plain.model.names, plain.leaves, strict=True))
        for floats in (by_leaf, load_file(goldens / "gpt_oss" / "model.safetensors")):
            with pytest.raises(ModelError, match="matrices are quantized: pass all leaves"):
                llm.update_weights(floats)
        own = dict(zip(llm.model.names, llm.leaves, strict=True))
        with pytest.raises(ModelError, match=r"quantized, and leaf norm\.weight of the new"):
            llm.update_weights(own | {"norm.weight": own["norm.weight"].astype(jnp.float16)})
        before = [np.asarray(leaf) for leaf in llm.leaves]
        llm.update_weights(load_file(goldens / "gpt_oss_mxfp4" / "model.safetensors"))
        assert all(map(np.array_equal, before, llm.leaves)) and llm.weight_version == 1


async def test_async_engine_updates_between_steps(short_stories, tensors, changed):
    with running(changed, dtype="float32") as other:
        expected = outputs(other)
    options = SIZES | {"dtype": "float32"}
    engine = Engine.load(EngineConfig.from_options(model=str(short_stories), **options))
    engine.start()
    try:
        stream = engine.submit(PROMPTS[0], PARAMS, request_id="a")
        await engine.update_weights(tensors, in_flight="restart")
        deltas = [delta async for step in stream for delta in step]
        first = max((i + 1 for i, d in enumerate(deltas) if d.restarted), default=0)
        assert {d.weight_version for d in deltas[first:]} == {1}
        tokens = tuple(t for d in deltas[first:] for t in d.token_ids)
        assert tokens == expected[0][0]
        assert engine.weight_version == 1
        with pytest.raises(ModelError, match="lack leaf"):
            await engine.update_weights({"norm.weight": np.ones(64, np.float32)})
    finally:
        await engine.stop()


def test_fake_engine_has_no_weights():
    with pytest.raises(ModelError, match="fake device"):
        _ = Engine.fake().leaves


async def test_engine_process_refuses_new_weights():
    process = EngineProcess.fake()
    try:
        with pytest.raises(ModelError, match="use Engine or LLM"):
            await process.update_weights(())
    finally:
        await asyncio.wait_for(process.stop(), 60)
