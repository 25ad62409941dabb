"""Layers with per-sequence state: slots, rollback of drafts, preemption, recovery."""

import json
import logging
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import decayed
import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from paged import PagedRun

import forge_jax
from forge_jax import LLM, Engine, EngineConfig, SamplingParams
from forge_jax.checkpoint.model_spec import read_spec
from forge_jax.engine import sizes
from forge_jax.errors import ConfigError
from forge_jax.models import PagedLayout, StateLayout, build_model, plugins, register
from forge_jax.speculate.drafter import Draft, OneByOne
from forge_jax.step.kv_cache import kv_shape
from forge_jax.step.mesh import TensorMesh, kv_specs
from forge_jax.testing import core_of, drafts_always_pay, failing_steps
from forge_jax.tools.compile import compile_bundle
from forge_jax.tools.doctor import checks, probe

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
OPTIONS = {"block_size": 16, "max_model_len": 96, "max_num_batched_tokens": 16}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugins, "_registered", {})
        register(decayed.NAME, decayed.DECAYED)
        folder = tmp_path_factory.mktemp("decayed")
        yield str(folder), decayed.write(folder)


def prompts(count, length=20, seed=0):
    return np.random.default_rng(seed).integers(0, decayed.VOCAB, (count, length)).tolist()


def assert_greedy(tensors, prompt, output):
    """Check tokens of greedy decoding against the reference."""
    scores = decayed.reference(tensors, [*prompt, *output])[len(prompt) - 1 : -1]
    assert list(output) == scores.argmax(axis=1).tolist()


def outputs(llm, *args):
    return [[list(each.token_ids) for each in found.outputs] for found in llm.generate(*args)]


@pytest.mark.parametrize("chunk", [40, 7, 1])
def test_chunks_match_a_reference(made, chunk):
    folder, tensors = made
    loaded = forge_jax.load(folder, progress=False)
    ids = np.array(prompts(3, 40))
    run = PagedRun(loaded, 3)
    scores = [np.stack(run.step(ids[:, i : i + chunk].tolist())) for i in range(0, 40, chunk)]
    want = [decayed.reference(tensors, row) for row in ids]
    np.testing.assert_allclose(np.concatenate(scores, axis=1), want, atol=2e-4, rtol=0)


def test_many_sequences_in_reused_slots_match_a_reference(made):
    folder, tensors = made
    asked = prompts(9)
    with LLM(folder, max_num_seqs=3, **OPTIONS) as llm:
        for prompt, [output] in zip(asked, outputs(llm, asked, GREEDY), strict=True):
            assert_greedy(tensors, prompt, output)


def test_preempted_sequences_start_again_from_an_empty_state(made):
    folder, tensors = made
    asked = prompts(4, 30, seed=1)
    with LLM(folder, max_num_seqs=4, num_blocks=8, **OPTIONS) as llm:
        found = outputs(llm, asked, GREEDY)
        assert core_of(llm).scheduler.num_preemptions
    for prompt, [output] in zip(asked, found, strict=True):
        assert_greedy(tensors, prompt, output)


def test_samples_of_one_prompt_have_their_own_states(made):
    folder, _ = made
    asked = prompts(2, 40, seed=2)
    params = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=20, ignore_eos=True)
    with LLM(folder, max_num_seqs=8, deterministic=True, **OPTIONS) as llm:
        together = outputs(llm, asked, params)
        assert [outputs(llm, [prompt], params)[0] for prompt in asked] == together
    with LLM(folder, max_num_seqs=1, deterministic=True, **OPTIONS) as llm:
        assert outputs(llm, asked, params) == together
    assert len(set(map(tuple, together[0]))) == 3


def test_recovery_loses_nothing(made):
    folder, tensors = made
    asked = prompts(3, 30, seed=3)
    with LLM(folder, max_num_seqs=3, **OPTIONS) as llm:
        core = core_of(llm)
        with failing_steps(core, lambda plan, where: plan.step % 9 == 0):
            found = outputs(llm, asked, GREEDY)
        assert core.num_recoveries > 2
    for prompt, [output] in zip(asked, found, strict=True):
        assert_greedy(tensors, prompt, output)


class Oracle:
    """A drafter of the actual outputs, but each draft is wrong from a random token on."""

    def __init__(self, sequences):
        self._rng = random.Random(0)
        self._sequences = {tuple(tokens[:20]): tokens for tokens in sequences}

    def propose(self, key, tokens, prompt_len, salt):
        known = self._sequences[tuple(tokens[:20])]
        draft = known[len(tokens) : len(tokens) + self._rng.randint(1, 5)]
        wrong = self._rng.randint(0, 5)
        draft = [*draft[:wrong], *((token + 1) % decayed.VOCAB for token in draft[wrong:])]
        return Draft(tuple(draft), (1.0,) * len(draft))

    def ingest(self, limit):
        return False

    def end(self, key, tokens, prompt_len, salt):
        pass


@pytest.mark.parametrize(("temperature", "options"), [(0.0, {}), (1.0, {"deterministic": True})])
def test_rejected_drafts_leave_no_trace_in_the_state(made, options, temperature):
    folder, _ = made
    asked = prompts(6, seed=4)
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=40, ignore_eos=True)
    options = {**OPTIONS, **options, "max_num_seqs": 3}
    with LLM(folder, **options) as llm:
        want = outputs(llm, asked, params)
    with LLM(folder, speculation="ngram", max_draft_tokens=5, **options) as llm:
        speculator = core_of(llm).speculator
        drafts_always_pay(speculator.policy)
        speculator.policy.acceptance.reach = lambda confidence, _: [1.0] * len(confidence)
        texts = [[*prompt, *output] for prompt, [output] in zip(asked, want, strict=True)]
        speculator._drafter = OneByOne(Oracle(texts))
        assert outputs(llm, asked, params) == want
        stats = speculator.stats()
        assert 0.2 * stats.num_draft_tokens < stats.num_accepted_tokens < stats.num_draft_tokens


async def test_slot_of_an_aborted_request_serves_the_next_one(made):
    folder, tensors = made
    first, *rest = prompts(3, seed=5)
    config = EngineConfig.from_options(model=folder, max_num_seqs=1, **OPTIONS)
    engine = Engine.load(config)
    engine.start()
    try:
        async for _ in engine.generate(first, GREEDY):
            break  # aborts the request
        for prompt in rest:
            deltas = [delta async for delta in engine.generate(prompt, GREEDY)]
            assert_greedy(tensors, prompt, [token for each in deltas for token in each.token_ids])
    finally:
        await engine.stop()


def test_prefix_caching_is_off(made, caplog):
    folder, tensors = made
    [prompt] = prompts(1, 40, seed=6)
    with (
        caplog.at_level(logging.INFO),
        LLM(folder, max_num_seqs=2, host_kv_gib=1.0, **OPTIONS) as llm,
    ):
        for _ in range(2):
            [found] = llm.generate([prompt], GREEDY)
            assert found.num_cached_tokens == 0
            assert_greedy(tensors, prompt, found.outputs[0].token_ids)
    assert "DecayedForCausalLM keeps state per sequence: prefix caching is off" in caplog.text
    assert "--host-kv-gib has no effect without prefix caching: it is off" in caplog.text


@pytest.mark.parametrize("draft", [{"draft_model": "self", "draft_layers": 2}, {}])
def test_draft_model_with_state_is_rejected(made, draft):
    folder, _ = made
    draft = draft or {"draft_model": folder}
    with pytest.raises(ConfigError, match="keeps state per sequence, which is not supported for d"):
        LLM(folder, speculation="draft", **draft, **OPTIONS)


def test_bundle_holds_steps_with_state(made, tmp_path, caplog):
    folder, tensors = made
    options = {**OPTIONS, "max_num_seqs": 2, "num_blocks": 12, "speculation": "ngram"}
    compile_bundle(EngineConfig.from_options(model=folder, **options), tmp_path / "out")
    asked = prompts(2, seed=7)
    options["compile_cache_dir"] = str(tmp_path / "out")
    with caplog.at_level(logging.INFO), LLM(folder, **options) as llm:
        found = outputs(llm, asked, GREEDY)
    assert "loading the executables of the bundle" in caplog.text
    assert "is compiled" not in caplog.text
    for prompt, [output] in zip(asked, found, strict=True):
        assert_greedy(tensors, prompt, output)


# ---- memory --------------------------------------------------------------------------------------


def shape_of(folder, **options):
    spec = read_spec(Path(folder))
    options = {"num_blocks": 10, "block_size": 16, "dtype": "float32", "platform": "cpu"} | options
    return kv_shape(spec, **options)


def test_state_is_counted_separately_from_blocks(made):
    folder, _ = made
    shape = shape_of(folder, num_slots=3, num_pending=4)
    kv = shape.empty()
    assert [sorted(layer) for layer in kv[::2]] == [["base", "inputs", "sum"]] * 2
    assert kv[0]["inputs"].shape == (4, 4, 32) and kv[0]["base"].shape == (4,)
    assert shape.state_bytes == 2 * 4 * (4 + 4 * 32 + 4 * 4 * 32)
    assert shape.block_bytes == 2 * 2 * 16 * 16 * 4
    assert shape.total_bytes == shape.state_bytes + 10 * shape.block_bytes
    assert shape.total_bytes == sum(array.nbytes for array in jax.tree.leaves(kv))


def test_layer_that_shares_a_cache_has_no_array(made):
    folder, _ = made
    shape = shape_of(folder)
    paged = PagedLayout(heads=2, dim=8)
    alone, shared = (
        replace(shape, layouts=(StateLayout(arrays=()), paged, *more))
        for more in ((), (replace(paged, shares=1),) * 2)
    )
    assert shared.empty()[2:] == ((), ()) and shared.block_bytes == 2 * 2 * 16 * 8 * 4
    assert shared.total_bytes == alone.total_bytes
    mesh = TensorMesh(SimpleNamespace(size=2))
    assert [jax.tree.map(lambda x: x.shape[2], each) for each in mesh.kv_shape(shared).layers] == [
        *({}, 4, (), ()),
    ]


@pytest.mark.parametrize("num_blocks", [None, 64])
def test_too_much_state_is_an_error(made, monkeypatch, num_blocks):
    folder, _ = made
    monkeypatch.setattr(sizes, "available_host_bytes", lambda: 10**6)
    with pytest.raises(ConfigError, match=r"state of 4000 sequences needs .* lower max_num_seqs"):
        LLM(folder, max_num_seqs=4000, block_size=16, num_blocks=num_blocks)


def test_state_is_not_the_reason_if_the_weights_do_not_fit(made, monkeypatch):
    folder, _ = made
    monkeypatch.setattr(sizes, "available_host_bytes", lambda: 100)
    with pytest.raises(ConfigError, match=r"the weights .* need"):
        LLM(folder, max_num_seqs=1, block_size=16)


def test_doctor_reports_the_state_per_sequence(made, capsys):
    folder, _ = made
    probe.main("model", folder)
    facts = {}
    for line in capsys.readouterr().out.splitlines():
        facts |= json.loads(line)
    assert facts["state_bytes"] == 2 * 4 * (1 + 32)
    report = {"memory_available_bytes": 10**9}
    [note] = checks._model_faults("decayed", checks._Probed(facts), report)
    assert note.level == "note" and "264 bytes of state per sequence" in note.what


def test_research_needs_a_slot_per_sequence(made):
    folder, _ = made
    loaded = forge_jax.load(folder, progress=False)
    kv = forge_jax.new_kv(loaded, 8, 16)
    i32 = partial(np.array, dtype=np.int32)
    with pytest.raises(ValueError, match="state for 1 sequences, not 2: set num_slots"):
        forge_jax.decode_step(
            *(loaded, loaded.leaves, kv, i32([1, 2]), i32([0, 1, 2]), i32([1, 1])),
            i32([[0], [1]]),
        )


def test_mesh_divides_the_named_axis_of_states(made):
    folder, _ = made
    model = replace(build_model(read_spec(Path(folder))), shards=2)
    paged = PartitionSpec(None, None, "tensor")
    state = {
        "base": PartitionSpec(),
        "sum": PartitionSpec(None, "tensor"),
        "inputs": PartitionSpec(None, None, "tensor"),
    }
    assert kv_specs(model) == (state, paged) * 2
    mesh = TensorMesh(SimpleNamespace(size=2))
    whole = mesh.kv_shape(shape_of(folder, num_slots=3, num_pending=4)).layers
    assert {name: array.shape for name, array in whole[0].items()} == {
        "base": (4,),
        "sum": (4, 64),
        "inputs": (4, 4, 64),
    }
    without_drafts = mesh.kv_shape(shape_of(folder, num_slots=3, num_pending=0)).layers
    assert without_drafts[0]["inputs"] == () and without_drafts[0]["sum"].shape == (4, 64)
