"""Models with gated DeltaNet or Mamba-2 in the engine: drafts, batches and options."""

import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from lora_files import write_adapter

from forge_jax import LLM, EngineConfig, SamplingParams
from forge_jax.checkpoint.adapter import check_adapter
from forge_jax.checkpoint.model_spec import read_spec
from forge_jax.checkpoint.safetensors import read_header
from forge_jax.engine.sizes import Residents
from forge_jax.errors import UnsupportedModelError
from forge_jax.models import build_model
from forge_jax.models.lora import LoraShape
from forge_jax.speculate.drafter import Draft, OneByOne
from forge_jax.testing import core_of, drafts_always_pay
from forge_jax.weights.formats import WeightFormats

GOLDENS = Path(__file__).parent.parent / "fixtures" / "goldens"
NAMES = [
    "qwen3_next",
    pytest.param("qwen3_5", marks=pytest.mark.slow),
    pytest.param("granitemoehybrid", marks=pytest.mark.slow),
]
OPTIONS = {"block_size": 16, "max_model_len": 96, "max_num_batched_tokens": 32}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(params=NAMES)
def model(request):
    """Return the folder of a model, prompts and the greedy continuations of transformers."""
    folder = GOLDENS / request.param
    stored = read_header(folder / "golden.safetensors")
    prompts, output = (np.array(stored[key].read()).tolist() for key in ("input_ids", "greedy_ids"))
    return str(folder), prompts, output


def outputs(llm, *args):
    return [list(each.outputs[0].token_ids) for each in llm.generate(*args)]


class Oracle:
    """A drafter with the right tokens, and wrong ones from a random token of each draft on."""

    def __init__(self, sequences):
        self._random, self._sequences = random.Random(0), sequences

    def propose(self, key, tokens, prompt_len, salt):
        tokens = list(tokens)
        [known] = [each for each in self._sequences if each[:20] == tokens[:20]]
        draft = known[len(tokens) : len(tokens) + self._random.randint(1, 5)]
        wrong = self._random.randint(0, 5)
        draft = draft[:wrong] + [(token + 1) % 163 for token in draft[wrong:]]
        return Draft(tuple(draft), (1.0,) * len(draft))

    def ingest(self, limit):
        return False

    def end(self, key, tokens, prompt_len, salt):
        pass


@pytest.mark.parametrize("deterministic", [False, True])
def test_speculation_changes_no_token(model, deterministic):
    folder, prompts, want = model
    options = {**OPTIONS, "max_num_seqs": 3, "deterministic": deterministic}
    params = GREEDY
    if deterministic:
        params = SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True)
        with LLM(folder, **options) as llm:
            want = outputs(llm, prompts, params)
    with LLM(folder, speculation="ngram", max_draft_tokens=5, **options) as llm:
        speculator = core_of(llm).speculator
        drafts_always_pay(speculator.policy)
        speculator.policy.acceptance.reach = lambda confidence, _: [1.0] * len(confidence)
        texts = [prompt + output for prompt, output in zip(prompts, want, strict=True)]
        speculator._drafter = OneByOne(Oracle(texts))
        assert outputs(llm, prompts, params) == want
        stats = speculator.stats()
        assert 0.2 * stats.num_draft_tokens < stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.mark.full_compile
def test_deterministic_logprobs_have_the_same_bits_in_every_batch(model):
    folder, prompts, _ = model
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)

    def scores(found):
        return [[each.logprob for each in output.outputs[0].logprobs] for output in found]

    options = {**OPTIONS, "deterministic": True}
    with LLM(folder, max_num_seqs=3, **options) as llm:
        together = scores(llm.generate(prompts, params))
        alone = [scores(llm.generate([prompt], params))[0] for prompt in prompts]
    assert alone == together


def test_adapter_of_gated_delta_net_is_rejected(tmp_path):
    folder = GOLDENS / "qwen3_5_text"
    module = "model.layers.0.linear_attn.out_proj"
    adapter = write_adapter(tmp_path / "adapter", folder, seed=1, modules=[module])
    model = build_model(read_spec(folder), formats=WeightFormats(lora=True))
    with pytest.raises(UnsupportedModelError, match=r"linear_attn\.out_proj"):
        check_adapter(adapter, model, LoraShape(places=1, rank=4))


@pytest.mark.full_compile
@pytest.mark.parametrize(
    ("name", "drafts"), [("qwen3_next", 0), ("qwen3_next", 3), ("granitemoehybrid", 0)]
)
def test_bound_on_activations_includes_copies_of_the_state(name, drafts):
    spec = read_spec(GOLDENS / name)
    spec = replace(spec, recurrent_heads=spec.recurrent_heads._replace(key_dim=64, value_dim=64))
    model, S = build_model(spec, "float32", WeightFormats()), 256
    config = EngineConfig.from_options(
        max_num_seqs=S,
        speculation="ngram" if drafts else "off",
        max_draft_tokens=drafts or 1,
    )
    residents = Residents(config=config, model=model, device=jax.devices()[0])
    kv = residents.kv_shape(model, 8, 16).layers

    def i32(*shape):
        return jax.ShapeDtypeStruct(shape, np.int32)

    forward = partial(model.forward, implementation="xla", max_q_len=1)
    inputs = i32(S), i32(S), i32(S), i32(S, 4), i32(S), i32(S + 1), i32()
    step = jax.jit(lambda *args: forward(*args[:-1], state_slots=args[-1]), donate_argnums=1)
    compiled = step.lower(model.leaves, kv, *inputs, i32(S)).compile()
    found = compiled.memory_analysis().temp_size_in_bytes
    assert 0 < found <= residents.activation_bytes(S)
