"""The compiled step on a tiny random model, compared with dense forwards of whole sequences."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forge_jax.models.kv import keys_and_values
from forge_jax.sampling_params import SamplingParams
from forge_jax.schedule.plan import FED_BACK, Admission, ScheduledSequence, StepPlan
from forge_jax.step.kv_cache import KVShape
from forge_jax.step.options import RunnerOptions
from forge_jax.step.runner import Runner
from forge_jax.step.step import ROWS_AT_ONCE
from forge_jax.step.step_shapes import step_shapes
from forge_jax.testing import random_leaves, tiny_model
from forge_kernels import cpu

V, BLOCK, MAX_BLOCKS, BLOCKS, SLOTS = 64, 8, 4, 40, 10
NAN_TOKEN = V - 1  # its embedding is NaN
GREEDY = SamplingParams(temperature=0, max_tokens=16)


@pytest.fixture(scope="module")
def model():
    return tiny_model(vocab_size=V, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def leaves(model):
    made = list(random_leaves(model, seed=4))
    embedding = model.names.index("embedding.weight")
    made[embedding] = made[embedding].at[NAN_TOKEN].set(jnp.nan)
    return tuple(made)


@pytest.fixture(scope="module", params=["xla", "cpu"])
def compiled(request, model, leaves):
    if request.param == "cpu" and not cpu.available():
        pytest.skip("no CPU kernels on this machine")
    spec = model.spec
    runner = Runner(
        model,
        RunnerOptions(
            shapes=step_shapes(
                max_num_seqs=SLOTS,
                max_num_batched_tokens=48,
                max_rows=32,
                block_size=BLOCK,
                max_drafts=4,
            ),
            kv_shape=KVShape(
                layouts=keys_and_values(spec),
                num_blocks=BLOCKS,
                block_size=BLOCK,
                storage=model.dtype,
            ),
            num_slots=SLOTS,
            max_blocks=MAX_BLOCKS,
            device=jax.devices()[0],
            sampler=request.param,
        ),
    )
    runner.compile()
    runner.start(leaves)
    return runner


@pytest.fixture
def runner(compiled):
    """Return the runner with NaN in its free blocks, because unwritten values must not be read."""
    compiled.state.kv = tuple(jnp.full_like(layer, jnp.nan) for layer in compiled.state.kv)
    return compiled


@pytest.fixture(scope="module")
def dense_logits(model, leaves):
    """Return a function from tokens to f32[len, V], by one forward pass in a separate cache."""
    T = 32

    @jax.jit
    def run(tokens, length):
        spec = model.spec
        shape = (T // BLOCK, 2, spec.num_key_value_heads, BLOCK, spec.head_dim)
        kv = tuple(jnp.zeros(shape, model.dtype) for _ in range(spec.num_hidden_layers))
        at = jnp.arange(T)
        slot = jnp.where(at < length, at, T)
        tables = jnp.arange(T // BLOCK)[None]
        cu = jnp.stack([0, length]).astype(jnp.int32)
        _, hidden = model.forward(
            leaves, kv, tokens, at, slot, tables, length[None], cu, jnp.int32(1),
            implementation="reference",
        )  # fmt: skip
        return model.logits(leaves, hidden)

    def logits(tokens):
        padded = jnp.zeros(T, jnp.int32).at[: len(tokens)].set(jnp.array(tokens))
        return np.asarray(run(padded, jnp.int32(len(tokens))))[: len(tokens)]

    return logits


def greedy(dense_logits, prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(dense_logits(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def admission(slot, tokens, *, params=GREEDY, prompt_len=None, stop_ids=(), blocks=None):
    table = blocks if blocks is not None else tuple(range(4 * slot, 4 * slot + 4))
    return Admission(
        slot=slot,
        seed=1000 + slot,
        params=params,
        stop_ids=stop_ids,
        prompt_len=len(tokens) if prompt_len is None else prompt_len,
        block_table=table,
        tokens=tokens,
        seq_key=(f"r{slot}", 0),
    )


def rows(slot, start, tokens, *, num_rows=1, samples=True, num_output=0, new_blocks=(), **kwargs):
    return ScheduledSequence(
        slot=slot,
        start=start,
        token_ids=tuple(tokens),
        num_rows=num_rows,
        samples=samples,
        new_blocks=new_blocks,
        num_output=num_output,
        **kwargs,
    )


def run(runner, sequences, admissions=()):
    plan = StepPlan(1, tuple(admissions), tuple(sequences))
    return runner.read(runner.dispatch(plan)).sequences


PROMPT = [5, 9, 2, 40, 7, 7, 13, 1, 30]


def test_tokens_are_fed_back_on_the_device(runner, dense_logits):
    pending = [runner.dispatch(StepPlan(1, (admission(0, PROMPT),), (rows(0, 0, PROMPT),)))]
    for i in range(3):
        step = rows(0, len(PROMPT) + i, [FED_BACK], num_output=i + 1)
        pending.append(runner.dispatch(StepPlan(2 + i, (), (step,))))
    got = [runner.read(p).sequences[0].token_ids[0] for p in pending]
    assert got == greedy(dense_logits, PROMPT, 4)


@contextlib.contextmanager
def uploads_of(runner, name):
    """Record the uploads of an executable's calls; any other upload raises."""
    step, uploads = runner.state.compiled[name], []

    def upload_and_call(*args):
        uploads.extend(arg for arg in args if isinstance(arg, np.ndarray))
        return step(*[jax.device_put(a) if isinstance(a, np.ndarray) else a for a in args])

    runner.state.compiled[name] = upload_and_call
    try:
        with jax.transfer_guard_host_to_device("disallow"):  # rejects implicit uploads
            yield uploads
    finally:
        runner.state.compiled[name] = step


def test_decode_step_uploads_only_one_array(runner, dense_logits):
    run(runner, [rows(0, 0, PROMPT)], [admission(0, PROMPT)])
    plan = StepPlan(1, (), (rows(0, len(PROMPT), [FED_BACK], num_output=1),))
    with uploads_of(runner, "decode[4]") as uploads:
        pending = runner.dispatch(plan)
    (packed,) = uploads
    assert packed.dtype == np.int32 and packed.nbytes < 4096
    assert runner.read(pending).sequences[0].token_ids[0] == greedy(dense_logits, PROMPT, 2)[1]


@pytest.mark.parametrize("chunk", [1, 4, 9])
def test_chunked_prompt_gives_the_same_token(runner, dense_logits, chunk):
    admissions = [admission(2, PROMPT)]
    for start in range(0, len(PROMPT), chunk):
        part = PROMPT[start : start + chunk]
        last = start + len(part) == len(PROMPT)
        step = rows(2, start, part, num_rows=int(last), samples=last)
        [result] = run(runner, [step], admissions)
        admissions = []
        assert bool(result.token_ids) == last
    assert list(result.token_ids) == greedy(dense_logits, PROMPT, 1)


def test_drafts_are_accepted_up_to_the_first_wrong_one(runner, dense_logits):
    truth = greedy(dense_logits, PROMPT, 5)
    for wrong_at in range(4):
        run(runner, [rows(1, 0, PROMPT)], [admission(1, PROMPT)])
        drafts = list(truth[1:4])
        if wrong_at < 3:
            drafts[wrong_at] = (drafts[wrong_at] + 1) % (V - 1)
        verify = rows(1, len(PROMPT), [FED_BACK, *drafts], num_rows=4, num_output=1)
        # A decode row in the same batch, so that offsets of rows and of sequences differ.
        other = rows(0, 0, [3])
        results = run(runner, [other, verify], [admission(0, [3])])
        assert list(results[1].token_ids) == truth[1 : 2 + wrong_at]
        # The last accepted token is fed back next.
        after = rows(1, len(PROMPT) + 1 + wrong_at, [FED_BACK], num_output=2 + wrong_at)
        [result] = run(runner, [after])
        assert list(result.token_ids) == greedy(dense_logits, PROMPT + truth[: 2 + wrong_at], 1)


@pytest.mark.parametrize("beside", [0, 12], ids=["verify shape", "mixed shape"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_count_as_output_in_later_rows_penalties(runner, beside, temperature):
    params = SamplingParams(
        temperature=temperature, max_tokens=16, frequency_penalty=2.0, repetition_penalty=1.8
    )
    # Row by row, then as drafts: the first two right, and all of them.
    run(runner, [rows(1, 0, PROMPT)], [admission(1, PROMPT, params=params)])
    truth = []
    for i in range(5):
        step = rows(1, len(PROMPT) + i, [FED_BACK], num_output=i + 1)
        truth += run(runner, [step])[0].token_ids
    for num_right in (2, 4):
        drafts = truth[:num_right] + [(t + 1) % (V - 1) for t in truth[num_right:4]]
        run(runner, [rows(1, 0, PROMPT)], [admission(1, PROMPT, params=params)])
        verify = rows(1, len(PROMPT), [FED_BACK, *drafts], num_rows=5, num_output=1)
        others = [rows(2, 0, [3] * beside)] if beside else []
        admissions = [admission(2, [3] * beside)] if beside else []
        assert run(runner, [verify, *others], admissions)[0].token_ids == tuple(
            truth[: num_right + 1]
        )
        # The counts on the device contain exactly the accepted tokens.
        after = rows(1, len(PROMPT) + 1 + num_right, [FED_BACK], num_output=2 + num_right)
        again = run(runner, [after])[0].token_ids
        if num_right < 4:
            assert again == tuple(truth[num_right + 1 : num_right + 2])


def test_non_finite_row_fails_alone(runner):
    prompts = {slot: [slot + 1, 8, 3] for slot in range(4)}
    admissions = [admission(slot, p) for slot, p in prompts.items()]
    clean = run(runner, [rows(s, 0, p) for s, p in prompts.items()], admissions)
    prompts[2] = [3, NAN_TOKEN, 3]
    admissions[2] = admission(2, prompts[2])
    beside = run(runner, [rows(s, 0, p) for s, p in prompts.items()], admissions)
    assert [r.fault for r in beside] == [False, False, True, False]
    assert [r for i, r in enumerate(beside) if i != 2] == [r for i, r in enumerate(clean) if i != 2]
    # Its slot and its blocks serve the next sequence, although they contain NaN.
    [result] = run(runner, [rows(2, 0, [3, 8, 3])], [admission(2, [3, 8, 3])])
    assert result == clean[2]


@pytest.mark.parametrize(
    "penalty",
    [
        {"presence_penalty": 1.3},
        {"frequency_penalty": 0.6},
        {"repetition_penalty": 1.7},
        {"presence_penalty": -1.0, "frequency_penalty": 0.4, "repetition_penalty": 0.8},
    ],
)
def test_penalties_follow_their_formulas(runner, dense_logits, penalty):
    params = SamplingParams(temperature=0, max_tokens=16, **penalty)
    history = list(PROMPT)
    steps = [rows(3, 0, PROMPT)] + [
        rows(3, len(PROMPT) + i, [FED_BACK], num_output=i + 1) for i in range(8)
    ]
    for i, step in enumerate(steps):
        admissions = [admission(3, PROMPT, params=params)] if i == 0 else []
        [result] = run(runner, [step], admissions)
        logits = dense_logits(history)[-1].astype(np.float64)
        for token in set(history):
            r = params.repetition_penalty
            logits[token] = logits[token] / r if logits[token] > 0 else logits[token] * r
        output = history[len(PROMPT) :]
        for token in set(output):
            logits[token] -= params.frequency_penalty * output.count(token)
            logits[token] -= params.presence_penalty
        assert result.token_ids == (int(logits.argmax()),)
        history += result.token_ids


def test_readmission_restores_the_counts(runner, dense_logits):
    """A preempted sequence returns with its output in the upload, not through the steps."""
    params = SamplingParams(temperature=0, max_tokens=16, frequency_penalty=2.0)
    known = [*PROMPT, 11, 11, 4]
    back = admission(5, known, params=params, prompt_len=len(PROMPT))
    [result] = run(runner, [rows(5, 0, known, num_output=3)], [back])
    logits = dense_logits(known)[-1].astype(np.float64)
    logits[11] -= 4.0
    logits[4] -= 2.0
    assert result.token_ids == (int(logits.argmax()),)


def test_logit_bias_and_min_tokens_change_the_greedy_token(runner, dense_logits):
    first = greedy(dense_logits, PROMPT, 1)[0]
    logits = dense_logits(PROMPT)[-1]
    second = int(np.argsort(-logits)[1])
    cases = [
        (SamplingParams(temperature=0, logit_bias={17: 100.0}), (), 17),
        (SamplingParams(temperature=0, logit_bias={first: -100.0}), (), second),
        (SamplingParams(temperature=0, min_tokens=1), (first,), second),
        (SamplingParams(temperature=0), (first,), first),
        (GREEDY, (), first),
    ]
    scored = SamplingParams(temperature=0, min_tokens=1, prompt_logprobs=0)
    entered = admission(6, PROMPT, params=scored, stop_ids=(first,))
    step = rows(6, 0, PROMPT, num_rows=len(PROMPT), scoring=True, targets=tuple(PROMPT[1:]))
    [result] = run(runner, [step], [entered])
    assert result.token_ids == (second,)
    for params, stop_ids, expected in cases:
        entered = admission(6, PROMPT, params=params, stop_ids=stop_ids)
        [result] = run(runner, [rows(6, 0, PROMPT)], [entered])
        assert result.token_ids == (expected,)


def test_logprobs_and_scoring_rows_match_the_log_softmax(runner, dense_logits):
    params = SamplingParams(temperature=0, logprobs=4, prompt_logprobs=3)
    step = rows(7, 0, PROMPT, num_rows=len(PROMPT), scoring=True, targets=tuple(PROMPT[1:]))
    plain = rows(8, 0, PROMPT)
    results = run(
        runner, [plain, step], [admission(7, PROMPT, params=params), admission(8, PROMPT)]
    )
    exact = dense_logits(PROMPT).astype(np.float64)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    scored = results[1].prompt_logprobs
    assert [e.token_id for e in scored] == PROMPT[1:]
    np.testing.assert_allclose(
        [e.logprob for e in scored], [exact[i, t] for i, t in enumerate(PROMPT[1:])], atol=1e-4
    )
    for i, entry in enumerate(scored):
        assert [t for t, _ in entry.top] == list(np.argsort(-exact[i])[:3])
    [own] = results[1].logprobs
    assert own.token_id == results[0].token_ids[0] == exact[-1].argmax()
    assert len(own.top) == 4 and own.top[0][1] == pytest.approx(exact[-1].max(), abs=1e-4)
    assert results[0].logprobs is None and results[0].prompt_logprobs is None


def test_processed_logprobs_of_more_rows_than_are_processed_at_once(runner, dense_logits):
    """A step of 10 rows has two parts of 8, which overlap."""
    assert ROWS_AT_ONCE < SLOTS < 2 * ROWS_AT_ONCE
    prompts = [[slot + 1, 2, slot + 3] for slot in range(SLOTS)]
    params = [
        SamplingParams(
            temperature=0.5 + slot / 4,
            logit_bias={slot: 2.0, 40 + slot: -1.5},
            logprobs=4,
            logprobs_mode="processed_logprobs",
        )
        for slot in range(SLOTS)
    ]
    entries = [admission(slot, prompts[slot], params=params[slot]) for slot in range(SLOTS)]
    first = run(runner, [rows(slot, 0, prompts[slot]) for slot in range(SLOTS)], entries)
    decodes = [rows(slot, 3, [FED_BACK], num_output=1) for slot in range(SLOTS)]
    second = run(runner, decodes)
    for slot, p in enumerate(params):
        tokens = prompts[slot]
        for result in (first[slot], second[slot]):
            exact = dense_logits(tokens)[-1].astype(np.float64)
            for token, bias in p.logit_bias.items():
                exact[token] += bias
            exact /= p.temperature
            exact -= np.log(np.exp(exact).sum())
            [token], [entry] = result.token_ids, result.logprobs
            assert entry.token_id == token
            assert entry.logprob == pytest.approx(exact[token], abs=1e-4)
            assert entry.rank == 1 + (exact > exact[token]).sum()
            assert [t for t, _ in entry.top] == list(np.argsort(-exact)[:4])
            tokens = [*tokens, token]


def test_admissions_beyond_one_upload_are_split(runner, dense_logits):
    prompts = [[slot + 1, 2, slot + 3] for slot in range(SLOTS)]
    results = run(
        runner,
        [rows(slot, 0, p) for slot, p in enumerate(prompts)],
        [admission(slot, p) for slot, p in enumerate(prompts)],
    )
    for prompt, result in zip(prompts, results, strict=True):
        assert list(result.token_ids) == greedy(dense_logits, prompt, 1)


def test_block_table_grows_with_the_sequence(runner, dense_logits):
    tokens = [i % (V - 1) for i in range(20)]
    run(
        runner,
        [rows(0, 0, tokens[:6], num_rows=0, samples=False)],
        [admission(0, tokens, blocks=(21,))],
    )
    run(runner, [rows(0, 6, tokens[6:14], num_rows=0, samples=False, new_blocks=((1, 5),))])
    [result] = run(runner, [rows(0, 14, tokens[14:], new_blocks=((2, 33),))])
    assert list(result.token_ids) == greedy(dense_logits, tokens, 1)


def test_sampled_token_depends_only_on_seed_and_position(runner):
    params = SamplingParams(temperature=1.5, max_tokens=4)
    mine = admission(4, PROMPT, params=params)
    [alone] = run(runner, [rows(4, 0, PROMPT)], [mine])
    others = [admission(s, [s + 2], params=params) for s in (0, 1)]
    crowd = run(runner, [rows(0, 0, [2]), rows(1, 0, [3]), rows(4, 0, PROMPT)], [*others, mine])
    assert crowd[2].token_ids == alone.token_ids


def masks_of(*rows):
    """Return i32[len(rows), 2]: the tokens that each row may sample; None: all."""
    masks = np.full((len(rows), -(-V // 32)), -1, np.int32)
    for mask, tokens in zip(masks, rows, strict=True):
        if tokens is not None:
            bits = np.zeros(32 * len(mask), np.uint8)
            bits[list(tokens)] = 1
            mask[:] = np.packbits(bits, bitorder="little").view(np.int32)
    return masks


def run_masked(runner, sequences, masks, admissions=()):
    plan = StepPlan(1, tuple(admissions), tuple(sequences), masks=masks)
    return runner.read(runner.dispatch(plan)).sequences


@pytest.mark.parametrize("allowed", [(3,), (31, 32), (0, 33, 62, 63), tuple(range(0, 64, 3))])
def test_mask_applies_only_to_its_row(runner, dense_logits, allowed):
    first, second = PROMPT, PROMPT[:4]
    random = SamplingParams(temperature=5.0, max_tokens=16, seed=1, top_k=40)
    for params in (GREEDY, random):
        admissions = [admission(0, first, params=params), admission(1, second)]
        got = run_masked(
            runner,
            [rows(0, 0, first), rows(1, 0, second)],
            masks_of(allowed, None),
            admissions,
        )
        assert got[0].token_ids[0] in allowed and not got[0].fault
        assert list(got[1].token_ids) == greedy(dense_logits, second, 1)
        if params is GREEDY:
            logits = dense_logits(first)[-1]
            assert got[0].token_ids[0] == max(allowed, key=lambda token: logits[token])


def test_each_draft_has_its_own_mask(runner, dense_logits):
    truth = greedy(dense_logits, PROMPT, 4)
    run(runner, [rows(1, 0, PROMPT)], [admission(1, PROMPT)])
    verify = rows(1, len(PROMPT), [FED_BACK, *truth[1:3]], num_rows=3, num_output=1)
    [got] = run_masked(runner, [verify], masks_of(None, {truth[2]}, {7, 9}))
    assert got.token_ids[:2] == tuple(truth[1:3]) and got.token_ids[2] in (7, 9)
    run(runner, [rows(1, 0, PROMPT)], [admission(1, PROMPT)])
    other = (truth[2] + 1) % (V - 1)
    [got] = run_masked(runner, [verify], masks_of(None, {other}, {7, 9}))
    assert got.token_ids == (truth[1], other)


def test_logprobs_are_taken_before_the_mask(runner, dense_logits):
    params = SamplingParams(temperature=0, max_tokens=16, logprobs=3)
    [free] = run(runner, [rows(0, 0, PROMPT)], [admission(0, PROMPT, params=params)])
    [got] = run_masked(
        runner,
        [rows(0, 0, PROMPT)],
        masks_of({free.logprobs[0].top[2][0]}),
        [admission(0, PROMPT, params=params)],
    )
    assert got.logprobs[0].top == free.logprobs[0].top
    assert got.logprobs[0].logprob == pytest.approx(free.logprobs[0].top[2][1])


def test_masks_are_the_only_other_upload(runner):
    run(runner, [rows(0, 0, PROMPT)], [admission(0, PROMPT)])
    step = rows(0, len(PROMPT), [FED_BACK], num_output=1)
    with uploads_of(runner, "decode[4]") as uploads:
        runner.dispatch(StepPlan(1, (), (step,), masks=masks_of({5})))
        assert sorted(x.ndim for x in uploads) == [1, 2]
        uploads.clear()
        runner.dispatch(StepPlan(1, (), (rows(0, len(PROMPT) + 1, [FED_BACK], num_output=2),)))
        assert len(uploads) == 1
