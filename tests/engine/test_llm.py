"""`LLM` on a small trained model: the effect of each parameter, and what must have none."""

import copy
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forge_jax import LLM, SamplingParams
from forge_jax.errors import ConfigError, ContextLengthError, RequestError
from forge_jax.step import slots
from forge_jax.testing import core_of
from forge_jax.text import ChatTemplate, Tokenizer
from forge_kernels.sampling.api import IN_PROMPT

PROMPT = "Once upon a time"
STORY = (
    ", there was a little girl named Lily. She loved to play outside in the park. "
    "One day, she saw a big, red ball."
)
GREEDY = SamplingParams(max_tokens=40, temperature=0)


# Ends while the step ahead of the last one still runs: a large prompt whose result is not read.
ENDS_EARLY = """
import sys
from forge_jax import LLM, SamplingParams
from forge_jax.step import state

llm = LLM(sys.argv[1], max_num_seqs=4, max_num_batched_tokens=64, num_blocks=64)
core = llm._core
core.add(llm._request([1] * 300, SamplingParams(max_tokens=8)))
run = state.StepState.run


def slow(self, *args):
    for _ in range(200):  # the device is busy with other steps
        out = run(self, *args)
    return out


state.StepState.run = slow
core.tick()
del llm, core
print("ends", flush=True)
"""


@pytest.fixture(scope="module")
def make_llm(stories):
    """Return engines by their options, made once each."""
    engines: dict[tuple, LLM] = {}

    def make(**options) -> LLM:
        options = {"max_num_seqs": 4, "max_num_batched_tokens": 64, **options}
        key = tuple(sorted(options.items()))
        if key not in engines:
            engines[key] = LLM(stories, **options)
        return engines[key]

    return make


@pytest.fixture(scope="module")
def llm(make_llm) -> LLM:
    return make_llm()


def one(llm: LLM, prompt=PROMPT, **params):
    [output] = llm.generate(prompt, SamplingParams(**params), progress=False)
    return output


def used_blocks(llm: LLM) -> int:
    return core_of(llm).scheduler.pool.num_used


def test_process_can_exit_while_a_step_runs(short_stories):
    command = [sys.executable, "-c", ENDS_EARLY, str(short_stories)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "ends\n"), done.stderr


def test_results_on_a_cpu_are_not_copied(llm, monkeypatch):
    """JAX would end the copies in its threads, which can abort a process that ends."""
    copied = []
    array = type(jnp.zeros(1))
    monkeypatch.setattr(array, "copy_to_host_async", lambda self: copied.append(self))
    assert one(llm, max_tokens=3).outputs[0].token_ids
    assert not copied


def test_trained_model_writes_the_expected_story(llm):
    output = one(llm, max_tokens=60, temperature=0)
    assert output.text.startswith(STORY)
    assert output.outputs[0].finish_reason == "length"
    assert used_blocks(llm) == 0


def test_prompts_may_be_texts_or_token_ids(llm):
    ids = llm.tokenizer.encode(PROMPT)
    texts = [o.text for o in llm.generate([PROMPT, ids], GREEDY, progress=False)]
    assert texts[0] == texts[1] == one(llm, ids, max_tokens=40, temperature=0).text


@pytest.mark.parametrize("chunk", [1, 7, 16])
@pytest.mark.quick_cases(1)
def test_chunk_size_does_not_change_the_output(make_llm, llm, chunk):
    prompt = PROMPT + STORY
    whole = one(llm, prompt, max_tokens=30, temperature=0, logprobs=0)
    cut = one(
        make_llm(prefill_chunk_size=chunk, prefix_cache=False),
        prompt,
        max_tokens=30,
        temperature=0,
        logprobs=0,
    )
    assert_same(cut, whole)


@pytest.mark.slow
def test_preemption_does_not_change_the_output(make_llm, llm):
    # 12 blocks of 16 tokens cannot hold eight sequences of about 70 tokens.
    tight = make_llm(num_blocks=12, max_model_len=160)
    prompts = [PROMPT, "The dog", "One day", "A big red ball", "Lily", "Tom", "Sue", "My mom"]
    params = SamplingParams(max_tokens=60, temperature=0, logprobs=0)
    roomy = [llm.generate(p, params, progress=False)[0] for p in prompts]
    for got, expected in zip(tight.generate(prompts, params, progress=False), roomy, strict=True):
        assert_same(got, expected)
    assert core_of(tight).scheduler.num_preemptions > 0
    assert used_blocks(tight) == 0


def test_prefix_hit_does_not_change_the_output(llm):
    prompt = "Of all these tests only one begins like this" + STORY
    cold = one(llm, prompt, max_tokens=30, temperature=0, logprobs=0)
    warm = one(llm, prompt, max_tokens=30, temperature=0, logprobs=0)
    assert cold.num_cached_tokens == 0 and warm.num_cached_tokens >= 16
    assert_same(warm, cold)


@pytest.mark.slow
def test_contiguous_kv_gives_the_same_text(make_llm, llm):
    contiguous = make_llm(kv_cache="contiguous", max_model_len=128, num_blocks=8)
    assert_same(one(contiguous, max_tokens=40, temperature=0, logprobs=0),
                one(llm, max_tokens=40, temperature=0, logprobs=0))  # fmt: skip


def assert_same(got, expected):
    """Check for equal tokens, and logprobs that differ only by rounding."""
    for a, b in zip(got.outputs, expected.outputs, strict=True):
        assert a.token_ids == b.token_ids
        np.testing.assert_allclose(
            [lp.logprob for lp in a.logprobs], [lp.logprob for lp in b.logprobs], atol=2e-4
        )


@pytest.mark.slow
def test_bfloat16_weights_give_nearly_the_same_story(make_llm):
    text = one(make_llm(dtype="bfloat16"), max_tokens=20, temperature=0).text
    assert text.startswith(", there was a little girl named Lily.")


def test_seeded_sample_is_independent_of_the_batch(llm):
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=11)
    alone = llm.generate(PROMPT, params, progress=False)[0].text
    crowd = llm.generate(
        ["The dog", PROMPT, "One day", "Tom"],
        [SamplingParams(max_tokens=30, seed=s) for s in (1, 2, 3, 4)][:1]
        + [params]
        + [SamplingParams(max_tokens=30, seed=s) for s in (3, 4)],
        progress=False,
    )
    assert crowd[1].text == alone


def test_samples_without_a_seed_differ(llm):
    texts = {one(llm, max_tokens=30).text for _ in range(3)}
    assert len(texts) == 3


def test_n_samples_differ_and_share_the_prompt(llm):
    output = one(llm, PROMPT + STORY, max_tokens=20, n=4, seed=3)
    assert [c.index for c in output.outputs] == [0, 1, 2, 3]
    assert len({c.text for c in output.outputs}) == 4
    again = one(llm, PROMPT + STORY, max_tokens=20, n=4, seed=3)
    assert [c.text for c in again.outputs] == [c.text for c in output.outputs]


def test_temperature_sampling_follows_the_model_distribution(llm):
    """Compares the first token over many seeds with the model's probabilities (chi-square)."""
    from scipy import stats

    top = one(llm, max_tokens=1, temperature=0, logprobs=20, prompt="One day").outputs[0]
    ids, p = zip(*((i, np.exp(lp)) for i, lp in top.logprobs[0].top if lp > -4), strict=True)
    params = [SamplingParams(max_tokens=1, seed=s) for s in range(600)]
    drawn = [o.outputs[0].token_ids[0]
             for o in llm.generate(["One day"] * 600, params, progress=False)]  # fmt: skip
    observed = [drawn.count(i) for i in ids]
    rest, rest_p = 600 - sum(observed), 1 - sum(p)
    assert stats.chisquare([*observed, rest], np.array([*p, rest_p]) * 600).pvalue > 1e-6


def test_top_k_one_is_greedy(llm):
    greedy = one(llm, max_tokens=20, temperature=0).text
    for params in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert one(llm, max_tokens=20, temperature=1.5, seed=1, **params).text == greedy


def test_logit_bias_forces_and_forbids_tokens(llm):
    forced = one(llm, max_tokens=5, temperature=0, logit_bias={300: 100.0})
    assert forced.outputs[0].token_ids == (300,) * 5
    first = one(llm, max_tokens=1, temperature=0).outputs[0].token_ids[0]
    other = one(llm, max_tokens=1, temperature=0, logit_bias={first: -100.0})
    assert other.outputs[0].token_ids[0] != first
    # A slot's bias does not outlive its sequence.
    assert one(llm, max_tokens=40, temperature=0).text.startswith(STORY[:30])


@pytest.mark.parametrize(
    "penalty",
    [{"presence_penalty": 1.5}, {"frequency_penalty": 0.7}],
)
def test_penalties_follow_their_formulas(llm, penalty):
    output = one(llm, PROMPT + STORY, max_tokens=30, temperature=0, logprobs=20, **penalty)
    tokens = list(output.outputs[0].token_ids)
    plain = one(llm, PROMPT + STORY, max_tokens=30, temperature=0)
    assert tokens != list(plain.outputs[0].token_ids), "the penalty must matter here"
    params = SamplingParams(**penalty)
    for i, alternatives in enumerate(output.outputs[0].logprobs):
        seen = tokens[:i]
        scores = {
            token: logprob
            - params.frequency_penalty * seen.count(token)
            - params.presence_penalty * (token in seen)
            for token, logprob in alternatives.top
        }
        assert max(scores, key=scores.__getitem__) == tokens[i]


def test_penalties_survive_preemption_and_prefix_hits(make_llm, llm):
    tight = make_llm(num_blocks=12, max_model_len=160)
    params = SamplingParams(max_tokens=60, temperature=0, frequency_penalty=0.6, logprobs=0)
    prompts = [PROMPT, "The dog", "One day", "A big red ball", "Lily", "Tom", "Sue", "My mom"]
    before = core_of(tight).scheduler.num_preemptions
    roomy = [llm.generate(p, params, progress=False)[0] for p in prompts]
    for got, expected in zip(tight.generate(prompts, params, progress=False), roomy, strict=True):
        assert_same(got, expected)
    assert core_of(tight).scheduler.num_preemptions > before


def test_min_tokens_suppresses_the_eos_token(llm):
    stop = one(llm, max_tokens=1, temperature=0).outputs[0].token_ids[0]
    at_once = one(llm, max_tokens=20, temperature=0, stop_token_ids=[stop]).outputs[0]
    assert (at_once.finish_reason, at_once.stop_reason, at_once.text) == ("stop", stop, "")
    held = one(llm, max_tokens=20, temperature=0, stop_token_ids=[stop], min_tokens=6).outputs[0]
    assert len(held.token_ids) >= 6 and stop not in held.token_ids[:6]


def test_eos_token_ends_the_output_unless_ignored(llm):
    eos = llm.tokenizer.eos_token_id
    biased = {"logit_bias": {eos: 100.0}, "temperature": 0, "max_tokens": 5}
    ended = one(llm, **biased).outputs[0]
    assert (ended.finish_reason, ended.stop_reason, ended.token_ids) == ("stop", None, (eos,))
    went_on = one(llm, ignore_eos=True, **biased).outputs[0]
    assert (went_on.finish_reason, len(went_on.token_ids)) == ("length", 5)


@pytest.mark.parametrize("stop", ["Lily", "named L", " She loved", ". She"])
def test_stop_string_ends_the_text_across_token_boundaries(llm, stop):
    output = one(llm, max_tokens=60, temperature=0, stop=[stop]).outputs[0]
    assert output.text == STORY[: STORY.index(stop)]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    kept = one(llm, max_tokens=60, temperature=0, stop=[stop], include_stop_str_in_output=True)
    assert kept.text == STORY[: STORY.index(stop)] + stop
    assert used_blocks(llm) == 0


def test_streamed_text_equals_the_whole_text(llm):
    deltas = list(llm.stream(PROMPT, GREEDY))
    assert "".join(d.text for d in deltas) == one(llm, max_tokens=40, temperature=0).text
    assert deltas[-1].finish_reason == "length"


def test_leaving_a_stream_early_frees_its_blocks(llm):
    for delta in llm.stream(PROMPT, SamplingParams(max_tokens=200, temperature=0)):
        if delta.text:
            break
    assert used_blocks(llm) == 0


def test_logprobs_match_the_models_own(llm):
    output = one(llm, max_tokens=10, temperature=0, logprobs=5, frequency_penalty=1.0).outputs[0]
    for token, entry in zip(output.token_ids, output.logprobs, strict=True):
        assert entry.token_id == token and len(entry.top) == 5
        values = [lp for _, lp in entry.top]
        assert values == sorted(values, reverse=True)
        assert dict(entry.top).get(token, entry.logprob) == entry.logprob


def test_prompt_logprobs_match_decoding_the_same_tokens(make_llm, llm):
    written = one(llm, max_tokens=30, temperature=0, logprobs=2).outputs[0]
    prompt = llm.tokenizer.encode(PROMPT)
    for engine in (llm, make_llm(prefill_chunk_size=7, prefix_cache=False)):
        read = one(engine, [*prompt, *written.token_ids], max_tokens=0, prompt_logprobs=2)
        assert len(read.prompt_logprobs) == len(prompt) + 30 - 1
        tail = read.prompt_logprobs[len(prompt) - 1 :]
        assert [e.token_id for e in tail] == list(written.token_ids)
        np.testing.assert_allclose(
            [e.logprob for e in tail], [e.logprob for e in written.logprobs], atol=2e-4
        )
        assert [e.top[0][0] for e in tail] == list(written.token_ids)


def test_text_that_can_never_fit_is_rejected_before_encoding(llm, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("encoded")

    text = "word " * 100_000
    monkeypatch.setattr(Tokenizer, "encode", never)
    with pytest.raises(ContextLengthError) as error:
        one(llm, [text], max_tokens=1)
    assert error.value.param == "prompt"
    assert llm._parts.tokenizer is not None
    monkeypatch.setattr(llm._parts, "chat_template", ChatTemplate("{{ messages[0].content }}"))
    monkeypatch.setattr(Tokenizer, "encode_template", never)
    with pytest.raises(ContextLengthError) as error:
        llm.chat([{"role": "user", "content": text}], progress=False)
    assert error.value.param == "messages"


def test_prompt_that_can_never_fit_is_rejected_by_field(llm):
    with pytest.raises(ContextLengthError) as too_long:
        one(llm, [5] * 600, max_tokens=1)
    assert too_long.value.param == "prompt"
    with pytest.raises(ContextLengthError) as too_many:
        one(llm, [5] * 10, max_tokens=100_000)
    assert too_many.value.param == "max_tokens"
    for ids in ([[]], [512], [-1]):
        with pytest.raises(RequestError, match="prompt"):
            one(llm, ids, max_tokens=1)
    with pytest.raises(RequestError) as bias:
        one(llm, max_tokens=1, logit_bias={512: 1.0})
    assert bias.value.param == "logit_bias"
    assert not core_of(llm).has_work


def test_nothing_compiles_after_the_engine_is_ready(llm):
    params = [
        SamplingParams(max_tokens=5, n=5, logprobs=20),
        SamplingParams(max_tokens=9, presence_penalty=1.0, top_p=0.5, min_tokens=3),
        SamplingParams(max_tokens=2, prompt_logprobs=1, logit_bias={1: 1.0}, top_k=3),
        SamplingParams(max_tokens=3, temperature=0),
    ]
    before = llm._parts.compilations()  # process-wide, because other tests create engines
    llm.generate([[7] * 300, PROMPT, [9] * 33, [3]], params, progress=False)
    assert llm._parts.compilations() == before


def test_conflicting_options_are_rejected(stories):
    with pytest.raises(ConfigError, match="max_model_len=100000"):
        LLM(stories, max_model_len=100_000)
    with pytest.raises(ConfigError, match="block_size"):
        LLM(stories, block_size=12)
    with pytest.raises(ConfigError, match="no such option: block_sise; did you mean block_size"):
        LLM(stories, block_sise=16)
    with pytest.raises(ConfigError, match='backend="cuda"'):
        LLM(stories, backend="cuda")


def test_slot_history_counts_prompt_and_output():
    from forge_jax.schedule.plan import Admission

    admission = Admission(
        slot=3,
        seed=1,
        params=SamplingParams(logit_bias={4: -2.5}),
        stop_ids=(),
        prompt_len=3,
        block_table=(),
        tokens=[1, 2, 2, 5, 5, 1],
        seq_key=("r", 0),
    )
    packed = jnp.array(slots.pack_history(admission, 8))
    shape = slots.slots_shape(4, 2, 8)
    empty = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shape)
    state = slots.set_history(empty, packed)
    np.testing.assert_array_equal(state.counts[3], [0, IN_PROMPT + 1, IN_PROMPT, 0, 0, 2, 0, 0])
    assert float(state.bias[3, 0]) == -2.5 and int(state.bias_ids[3, 0]) == 4
    assert not state.counts[:3].any()


# ---- one engine, several callers -------------------------------------------------------------


def test_streams_may_be_interleaved_with_generate(llm):
    params = SamplingParams(max_tokens=20, temperature=0)
    alone = {p: one(llm, p, max_tokens=20, temperature=0).text for p in (PROMPT, "The dog", "Tom")}
    first, second = llm.stream(PROMPT, params), llm.stream("The dog", params)
    texts = ["", ""]
    for a, b in zip(first, second, strict=True):
        texts[0] += a.text
        texts[1] += b.text
    assert texts == [alone[PROMPT], alone["The dog"]]

    begun = llm.stream(PROMPT, params)
    start = next(begun).text
    assert llm.generate("Tom", params, progress=False)[0].text == alone["Tom"]
    other = llm.stream("The dog", params)
    next(other)
    other.close()
    assert start + "".join(d.text for d in begun) == alone[PROMPT]
    assert used_blocks(llm) == 0


def test_threads_may_share_an_engine(llm):
    prompts = [PROMPT, "The dog", "Tom", "One day"]
    alone = [o.text for o in llm.generate(prompts, GREEDY, progress=False)]
    with ThreadPoolExecutor(4) as pool:
        together = pool.map(lambda p: llm.generate(p, GREEDY, progress=False)[0].text, prompts)
        assert list(together) == alone


@pytest.fixture
def no_collections():
    """Disable collections: an interrupt inside a collector callback is lost."""
    gc.disable()
    yield
    gc.enable()


def test_ctrl_c_leaves_the_engine_usable(llm, no_collections):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have set it to ignored
    long = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)
    for delay_s in (0.05, 0.1, 0.15):
        timer = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate([PROMPT] * 800, long, progress=False)
        assert used_blocks(llm) == 0
    assert one(llm, max_tokens=40, temperature=0).text.startswith(STORY[:60])


# ---- edge cases of parameters ------------------------------------------------------------------


def test_stop_string_that_starts_before_min_tokens_matches(llm):
    for min_tokens in range(5):
        text = one(llm, max_tokens=30, temperature=0, stop=["named Lily"], min_tokens=min_tokens)
        assert text.text == STORY[: STORY.index("named Lily")]
    later = one(llm, max_tokens=30, temperature=0, stop=[", there"], min_tokens=12)
    assert later.outputs[0].finish_reason == "length" and later.text.startswith(", there")


@pytest.mark.parametrize("params", [{"top_p": 1e-40}, {"temperature": 1e-38}, {"min_p": 1.0}])
def test_extreme_values_are_greedy(llm, params):
    greedy = one(llm, max_tokens=8, temperature=0).text
    assert one(llm, max_tokens=8, seed=1, **params).text == greedy


def test_leading_space_survives_a_prompt_ending_in_special_tokens(llm):
    ids = [*llm.tokenizer.encode(PROMPT), *[1] * 8]
    output = one(llm, ids, max_tokens=1, temperature=0, logit_bias={432: 100.0})
    assert output.text == llm.tokenizer.decode([*ids, 432])[len(llm.tokenizer.decode(ids)) :]


def test_parameters_can_be_copied_hashed_and_pickled():
    params = SamplingParams(logit_bias={3: 1.0}, stop=["x"])
    assert copy.deepcopy(params) == pickle.loads(pickle.dumps(params)) == params
    assert len({params, SamplingParams(), SamplingParams()}) == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": 10**400}, {"temperature": float("nan")}, {"top_p": 0.0}, {"n": True},
        {"repetition_penalty": 1e-30}, {"stop": ["x"], "detokenize": False}, {"logprobs": 21},
        {"min_tokens": 5, "max_tokens": 4}, {"stop": [""]}, {"logit_bias": {-1: 0.0}},
    ],
)  # fmt: skip
def test_invalid_parameter_is_named_in_the_error(wrong):
    with pytest.raises(RequestError) as error:
        SamplingParams(**wrong)
    assert error.value.param in wrong


def test_numpy_integer_prompts_are_accepted_and_floats_are_not(llm):
    ids = llm.tokenizer.encode(PROMPT)
    assert one(llm, np.array(ids), max_tokens=5, temperature=0).prompt_token_ids == tuple(ids)
    with pytest.raises(RequestError, match="integers"):
        llm.generate([[1.5] * 40], GREEDY, progress=False)
    assert one(llm, max_tokens=2, temperature=0).text


@pytest.mark.parametrize(
    "wrong",
    [
        {"scheduling_policy": "nonsense"}, {"kv_cache": "pagd"}, {"eviction": "x"},
        {"kv_dtype": "fp4"},
        {"max_num_seqs": 2.5}, {"max_num_seqs": 10**6}, {"num_blocks": 0},
        {"num_blocks": 10**12}, {"num_blocks": 3, "max_model_len": 200},
    ],
)  # fmt: skip
def test_invalid_option_is_named_in_the_error(stories, wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        LLM(stories, **wrong)


def test_broken_checkpoint_is_rejected_before_any_long_work(stories, tmp_path, monkeypatch):
    from safetensors.numpy import load_file, save_file

    from forge_jax.errors import CheckpointError
    from forge_jax.step.runner import Runner

    tensors = load_file(stories / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((stories / "config.json").read_text())
    monkeypatch.setattr(Runner, "compile", lambda *_: pytest.fail("compiled"))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is missing"):
        LLM(tmp_path)
