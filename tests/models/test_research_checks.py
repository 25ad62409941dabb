"""Arguments that cannot be right are rejected, also in compiled functions with `checkify`."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import checkify

import forge_jax
from forge_jax.research import steps

GOLDENS = Path(__file__).parent.parent / "fixtures" / "goldens"

# Two sequences in a cache of four blocks of four tokens: a prompt and the decode of a third token.
# Two rows of padding follow.
STEP = {
    "tokens": [1, 2, 3, 4, 5, 6, -1, 999],
    "cu_q_lens": [0, 5, 6],
    "kv_lens": [5, 3],
    "block_tables": [[0, 1], [2, 99]],
}
WHOLE = STEP | {
    "positions": [0, 1, 2, 3, 4, 2, -5, 7000],
    "slot_mapping": [0, 1, 2, 3, 4, 10, 16, 16],
    "num_seqs": 2,
}
WRONG_VALUES = [
    ({"kv_lens": [9, 3]}, "block_tables: sequence 0 has 9 tokens .* room for 8: pass more blocks"),
    ({"kv_lens": [4, 3]}, "kv_lens: sequence 0 has 4 tokens, fewer than its 5 new ones"),
    ({"block_tables": [[0, 4], [2, 9]]}, "block_tables: sequence 0 has the block 4, .* 0 to 3"),
    ({"block_tables": [[0, -1], [2, 9]]}, "block_tables: sequence 0 has the block -1"),
    ({"tokens": [1, 2, 3, 4, 5, 331, 0, 0]}, "tokens: 331 is not a token id .* 0 to 330"),
    ({"tokens": [1, -2, 3, 4, 5, 6, 0, 0]}, "tokens: -2 is not a token id"),
    ({"cu_q_lens": [1, 5, 6]}, "cu_q_lens starts with 1: it must start with 0"),
    ({"cu_q_lens": [0, 5, 9], "kv_lens": [5, 4]}, "cu_q_lens has the offset 9, beyond the 8"),
]
WRONG_IN_FORWARD = [
    ({"positions": [0, 1, 2, 3, 512, 2, 0, 0]}, "positions: 512 is out of range: .* 0 to 511"),
    ({"positions": [-1, 1, 2, 3, 4, 2, 0, 0]}, "positions: -1 is out of range"),
    ({"slot_mapping": [0, 1, 2, 3, 4, 10, 16, -1]}, "slot_mapping: -1 is not a slot .* or 16 to"),
    ({"slot_mapping": [17, 1, 2, 3, 4, 10, 16, 16]}, "slot_mapping: 17 is not a slot"),
    ({"num_seqs": 3}, "num_seqs is 3: pass 0 to 2"),
    ({"cu_q_lens": [0, 5, 4]}, "cu_q_lens: sequence 1 has -1 new tokens, .* at least 0"),
]


@pytest.fixture(scope="module")
def model():
    return forge_jax.load(str(GOLDENS / "llama2"), dtype="float32", progress=False)


def arrays(values):
    return {
        name: each if isinstance(each, jax.Array) else jnp.asarray(each, jnp.int32)
        for name, each in values.items()
    }


def run(model, function, values, **options):
    kv = forge_jax.new_kv(model, 4, 4)
    return function(model, model.leaves, kv, **arrays(values), **options)


def compiled_error(model, function, values):
    """Return the message of the check that fails in the compiled function."""
    kv = forge_jax.new_kv(model, 4, 4)
    step = jax.jit(checkify.checkify(partial(function, model, checks=True)))
    error, _ = step(model.leaves, kv, **arrays(values))
    return error.get()


@pytest.mark.parametrize(
    ("function", "values"), [(forge_jax.decode_step, STEP), (forge_jax.forward, WHOLE)]
)
def test_right_arguments_pass(model, function, values):
    assert run(model, function, values)
    assert compiled_error(model, function, values) is None


@pytest.mark.parametrize(("change", "message"), WRONG_VALUES)
def test_wrong_values_are_rejected(model, change, message):
    for function, values in ((forge_jax.decode_step, STEP), (forge_jax.forward, WHOLE)):
        with pytest.raises(ValueError, match=message):
            run(model, function, values | change)


@pytest.mark.parametrize(("change", "message"), WRONG_IN_FORWARD)
def test_wrong_values_of_forward_are_rejected(model, change, message):
    with pytest.raises(ValueError, match=message):
        run(model, forge_jax.forward, WHOLE | change)


def test_max_q_len_bounds_the_new_tokens(model):
    message = "max_q_len is 4, but sequence 0 has 5 new tokens"
    with pytest.raises(ValueError, match=message):
        run(model, forge_jax.forward, WHOLE, max_q_len=4)
    kv = forge_jax.new_kv(model, 4, 4)
    step = partial(forge_jax.forward, model, max_q_len=4, checks=True)
    assert message in jax.jit(checkify.checkify(step))(model.leaves, kv, **arrays(WHOLE))[0].get()
    with pytest.raises(ValueError, match="max_q_len must be at least 1, got 0"):
        run(model, forge_jax.forward, WHOLE, max_q_len=0)
    _, found = run(model, forge_jax.forward, WHOLE, max_q_len=5)
    _, expected = run(model, forge_jax.forward, WHOLE)
    assert jnp.allclose(found[:6], expected[:6], atol=1e-5)


@pytest.mark.parametrize("function", [forge_jax.decode_step, forge_jax.forward])
def test_steps_without_tokens_or_sequences_are_rejected(model, function):
    values = STEP if function is forge_jax.decode_step else WHOLE
    none = {"tokens": [], "positions": [], "slot_mapping": []}
    none = {name: each for name, each in none.items() if name in values}
    with pytest.raises(ValueError, match="tokens has 0 tokens: pass at least 1"):
        run(model, function, values | none)
    none = {"block_tables": jnp.zeros((0, 2), jnp.int32), "kv_lens": [], "cu_q_lens": [0]}
    with pytest.raises(ValueError, match="block_tables has 0 sequences"):
        run(model, function, values | none)
    with pytest.raises(ValueError, match="its 0 blocks of 4 tokens have room for 0"):
        run(model, function, values | {"block_tables": jnp.zeros((2, 0), jnp.int32)})


def test_decode_step_checks_its_arguments_once(model, monkeypatch):
    calls = []
    check = steps.check_step
    monkeypatch.setattr(
        steps, "check_step", lambda *args, **options: calls.append(1) or check(*args, **options)
    )
    run(model, forge_jax.decode_step, STEP)
    assert len(calls) == 1


def test_decode_step_needs_a_token_of_each_sequence(model):
    change = {"cu_q_lens": [0, 5, 5]}
    with pytest.raises(ValueError, match="sequence 1 has 0 new tokens, but needs at least 1"):
        run(model, forge_jax.decode_step, STEP | change)


def test_context_is_limited_by_the_positions(model):
    kv = forge_jax.new_kv(model, 130, 4)
    table = jnp.arange(130)[None]
    batch = jnp.array([1]), jnp.array([0, 1]), jnp.array([513]), table
    with pytest.raises(ValueError, match=r"kv_lens: sequence 0 has 513 .* 512 positions"):
        forge_jax.decode_step(model, model.leaves, kv, *batch)


def test_compiled_function_makes_the_same_checks(model):
    """One executable per function serves all cases."""
    cases = [(forge_jax.decode_step, STEP, each) for each in WRONG_VALUES]
    cases += [(forge_jax.forward, WHOLE, each) for each in WRONG_IN_FORWARD]
    kv, steps = forge_jax.new_kv(model, 4, 4), {}
    for function, values, (change, message) in cases:
        if function not in steps:
            steps[function] = jax.jit(checkify.checkify(partial(function, model, checks=True)))
        error, _ = steps[function](model.leaves, kv, **arrays(values | change))
        with pytest.raises(checkify.JaxRuntimeError, match=message):
            error.throw()


def test_compiled_call_makes_the_same_checks(model):
    call = jax.jit(checkify.checkify(partial(model, checks=True)))
    assert call(jnp.array([[1, 2], [3, 4]]), lengths=jnp.array([1, 2]))[0].get() is None
    for ids, lengths, message in (
        ([[1, 2], [3, 331]], [1, 2], "token_ids: 331 is not a token id"),
        ([[1, 2], [3, 4]], [1, 3], "lengths: sequence 1 has 3 tokens: pass 1 to 2"),
    ):
        error, _ = call(jnp.array(ids), lengths=jnp.array(lengths))
        assert message in error.get()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": jnp.zeros(8)}, r"tokens must be an integer array \[T\], got float32\[8\]"),
        ({"tokens": [[1, 2]]}, r"tokens must be an integer array \[T\], got int32\[1, 2\]"),
        ({"positions": [0, 1]}, r"positions must be an integer array \[8\], got int32\[2\]"),
        ({"slot_mapping": [0]}, r"slot_mapping must be an integer array \[8\]"),
        ({"kv_lens": [5]}, r"kv_lens must be an integer array \[2\]"),
        ({"cu_q_lens": [0, 5]}, r"cu_q_lens must be an integer array \[3\]"),
        ({"block_tables": [0, 1]}, r"block_tables must be an integer array \[S, max_blocks\]"),
        ({"num_seqs": [2]}, r"num_seqs must be an integer array \[\]"),
        ({"inputs_embeds": jnp.zeros((8, 64))}, "either tokens or inputs_embeds, got both"),
    ],
)
def test_wrong_shapes_are_rejected_also_when_compiled(model, change, message):
    with pytest.raises(ValueError, match=message):
        run(model, forge_jax.forward, WHOLE | change)
    kv = forge_jax.new_kv(model, 4, 4)
    step = jax.jit(partial(forge_jax.forward, model))
    with pytest.raises(ValueError, match=message):
        step(model.leaves, kv, **arrays(WHOLE | change))


def test_wrong_caches_leaves_and_embeddings_are_rejected(model):
    kv, rest = forge_jax.new_kv(model, 4, 4), arrays(WHOLE)
    with pytest.raises(ValueError, match="kv must have 3 layers, got 2: create it with new_kv"):
        forge_jax.forward(model, model.leaves, kv[:2], **rest)
    with pytest.raises(ValueError, match="leaves must be the"):
        forge_jax.forward(model, model.leaves[:2], kv, **rest)
    rest["tokens"] = None
    with pytest.raises(ValueError, match="either tokens or inputs_embeds, got neither"):
        forge_jax.forward(model, model.leaves, kv, **rest)
    for name, count in (("num_blocks", 0), ("block_size", -1), ("num_slots", 0)):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got {count}"):
            forge_jax.new_kv(model, **({"num_blocks": 1, "block_size": 1} | {name: count}))
    with pytest.raises(ValueError, match=r"inputs_embeds must be a float array \[T, \d+\]"):
        forge_jax.forward(model, model.leaves, kv, **rest, inputs_embeds=jnp.zeros((8, 3)))


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        ([1, 331], {}, "token_ids: 331 is not a token id of this model: ids are 0 to 330"),
        ([1, 2**32], {}, "token_ids must be 32-bit integers"),
        ([[1, 2], [3]], {}, "token_ids has sequences of different lengths: pad them, and pass"),
        ([1.5], {}, "token_ids must be integers, got float"),
        ([], {}, "token_ids has 0 tokens: pass 1 to 512"),
        ([1] * 513, {}, "token_ids has 513 tokens: pass 1 to 512"),
        (jnp.zeros((0, 2), jnp.int32), {}, "token_ids has 0 sequences: pass at least 1"),
        ([[[1]]], {}, r"token_ids must be an integer array \[T\]"),
        ([1], {"lengths": [1]}, "lengths requires a batch"),
        ([[1, 2]], {"lengths": [3]}, "lengths: sequence 0 has 3 tokens: pass 1 to 2"),
        ([[1, 2]], {"lengths": [0]}, "lengths: sequence 0 has 0 tokens"),
        ([[1, 2]], {"lengths": [1, 2]}, r"lengths must be an integer array \[1\]"),
        (None, {}, "either token_ids or inputs_embeds, got neither"),
        (None, {"inputs_embeds": jnp.zeros((2, 3))}, r"inputs_embeds must be a float array \[T, "),
    ],
)
def test_wrong_arguments_of_a_call_are_rejected(model, ids, options, message):
    with pytest.raises(ValueError, match=message):
        model(ids, **options)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 331], "token_ids: 331 is not a token id of this model: ids are 0 to 330"),
        ([[1, 2], [3, -1]], "token_ids: -1 is not a token id"),
        (-1, "token_ids: -1 is not a token id"),
        ([1.5], "token_ids must be integers"),
    ],
)
def test_wrong_ids_have_no_embeddings(model, ids, message):
    with pytest.raises(ValueError, match=message):
        model.embed(ids)


def test_compiled_embed_makes_the_same_checks(model):
    embed = jax.jit(checkify.checkify(partial(model.embed, checks=True)))
    assert embed(jnp.array([[1, 330]]))[0].get() is None
    assert "token_ids: 331 is not a token id" in embed(jnp.array([[1, 331]]))[0].get()
    assert jax.jit(model.embed)(jnp.array([1, 331])).shape == (2, model.spec.hidden_size)


def test_shapes_of_embeddings_and_logits_follow_their_arguments(model):
    d, vocab = model.spec.hidden_size, model.spec.vocab_size
    for shape in ((), (0,), (2, 3), (2, 0)):
        embeds = model.embed(jnp.zeros(shape, jnp.int32))
        assert embeds.shape == (*shape, d)
        assert model.unembed(embeds).shape == (*shape, vocab)


@pytest.mark.parametrize("resid", [jnp.zeros((2, 3)), jnp.zeros(()), jnp.zeros((2, 64, 3))])
def test_stream_of_another_width_has_no_logits(model, resid):
    d = model.spec.hidden_size
    with pytest.raises(ValueError, match=rf"resid must be a float array \[.*{d}\]"):
        model.unembed(resid)
    with pytest.raises(ValueError, match=rf"hidden must be a float array \[B, {d}\]"):
        forge_jax.logits(model, model.leaves, resid)


@pytest.mark.parametrize("dtype", ["fp16", "float64", jnp.int32, object()])
def test_types_that_no_cache_has_are_rejected(model, dtype):
    with pytest.raises(ValueError, match="must be float32, fp8 or int8, got"):
        forge_jax.new_kv(model, 1, 4, dtype)


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_cache_of_latents_has_no_8_bits(dtype):
    latent = forge_jax.load(str(GOLDENS / "deepseek_v3"), progress=False)
    message = f"dtype: Deepseek.* does not support a KV cache of {dtype}.*model's dtype or float32"
    with pytest.raises(ValueError, match=message):
        forge_jax.new_kv(latent, 1, 4, dtype)


def test_state_slots_require_a_model_with_state(model):
    with pytest.raises(ValueError, match=r"state_slots: Llama.* has no layers with state: omit it"):
        run(model, forge_jax.forward, WHOLE | {"state_slots": [0, 1]})
