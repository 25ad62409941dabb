"""Activations by name (`taps`, `edit`) and `inputs_embeds`, in whole calls and in paged steps."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import forge_jax
from forge_jax.models.decoder import Decoder, Ragged

GOLDENS = Path(__file__).parent.parent / "fixtures" / "goldens"
ALL = ["embed", "layers.*", "final_norm"]
IDS = np.array([[5, 9, 30, 2, 17, 80], [11, 4, 4, 70, 8, 3]], np.int32)
BLOCK = 4


@pytest.fixture(scope="module")
def models():
    """Return a function that loads a model once."""
    loaded = {}

    def load(name):
        if name not in loaded:
            loaded[name] = forge_jax.load(str(GOLDENS / name), dtype="float32", progress=False)
        return loaded[name]

    return load


def softmax(scores):
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def paged(model, rows, start, kv, **options):
    """Run tokens i32[2, n] of two sequences from `start` on, in scattered blocks."""
    count = rows.shape[1]
    tables = jnp.array([[3, 0], [1, 2]])
    positions = np.tile(np.arange(start, start + count), 2)
    blocks = np.array([[3, 0], [1, 2]])[np.repeat([0, 1], count), positions // BLOCK]
    return forge_jax.forward(
        model, model.leaves, kv, jnp.asarray(rows.reshape(-1)), jnp.asarray(positions),
        jnp.asarray(blocks * BLOCK + positions % BLOCK), tables,
        jnp.full(2, start + count), jnp.arange(3) * count, jnp.int32(2), **options,
    )  # fmt: skip


# ---- the activations -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama2", "gpt2"])
def test_activations_add_up_to_the_residual_stream(models, name):
    model = models(name)
    logits, taps = model(IDS, taps=ALL)
    x = taps["embed"]
    for layer in range(model.spec.num_hidden_layers):
        at = f"layers.{layer}"
        x = x + taps[f"{at}.attn.out"] + taps[f"{at}.mlp.out"]
        np.testing.assert_allclose(taps[f"{at}.resid"], x, atol=1e-5)
    np.testing.assert_allclose(model.unembed(x), logits, atol=1e-4)
    np.testing.assert_allclose(model(IDS), logits, atol=1e-5)
    assert list(taps) == list(model.tap_names())


def test_mlp_output_is_the_product_of_the_inner_activations(models):
    model = models("llama2")
    _, taps = model(IDS, taps=["layers.1.mlp.*"])
    down = np.asarray(model.leaf("layers.1.mlp.down.weight"))
    assert list(taps) == ["layers.1.mlp.inner", "layers.1.mlp.out"]
    expected = np.asarray(taps["layers.1.mlp.inner"]) @ down.T
    np.testing.assert_allclose(taps["layers.1.mlp.out"], expected, atol=1e-5)


def test_pattern_is_the_causal_softmax_of_queries_and_keys(models):
    model = models("gpt2")  # without rotary embeddings
    _, taps = model(IDS, taps="layers.0.attn.[qkp]*")
    q, k, pattern = (np.asarray(taps[f"layers.0.attn.{name}"]) for name in ("q", "k", "pattern"))
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) * model.spec.sm_scale
    causal = np.tril(np.ones((6, 6), bool))
    np.testing.assert_allclose(pattern, softmax(np.where(causal, scores, -np.inf)), atol=1e-5)


@pytest.mark.parametrize("name", ["mistral_window", "gpt_oss"])
def test_pattern_has_the_window_and_the_sinks(models, name):
    model, ids = models(name), np.arange(1, 41, dtype=np.int32)
    _, taps = model(ids, taps="layers.*.attn.pattern")
    for layer in range(model.spec.num_hidden_layers):
        pattern = np.asarray(taps[f"layers.{layer}.attn.pattern"])
        window, distance = model.spec.window(layer), np.arange(40)[:, None] - np.arange(40)
        seen = (distance >= 0) & (distance < (window or 40))
        assert pattern[:, seen].min() > 0 and not pattern[:, ~seen].any()
        total = pattern.sum(axis=-1)
        assert (total < 0.9999).all() if name == "gpt_oss" else np.allclose(total, 1, atol=1e-5)
        assert window is None or (~seen).sum() > 40 * 39 / 2


def test_router_chooses_the_highest_logits(models):
    model = models("qwen3_moe")
    _, taps = model(IDS, taps="*.mlp.router.*")
    logits = np.asarray(taps["layers.0.mlp.router.logits"])
    chosen = np.asarray(taps["layers.0.mlp.router.chosen"])
    count = model.spec.experts.per_token
    assert chosen.shape == (*IDS.shape, count) and chosen.dtype == np.int32
    highest = np.argsort(-logits, axis=-1)[..., :count]
    np.testing.assert_array_equal(np.sort(chosen), np.sort(highest))


def test_latent_attention_has_its_latents(models):
    _, taps = models("deepseek_v3")(IDS, taps=["layers.1.attn.latent", "layers.1.attn.pattern"])
    assert taps["layers.1.attn.latent"].shape == (
        *IDS.shape,
        models("deepseek_v3").spec.kv_lora_rank,
    )
    pattern = np.asarray(taps["layers.1.attn.pattern"])
    np.testing.assert_allclose(pattern.sum(axis=-1), 1, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    ["llama2", *(pytest.param(n, marks=pytest.mark.slow) for n in ("deepseek_v3", "qwen3_5"))],
)
def test_paged_steps_have_the_activations_of_whole_sequences(models, name):
    model = models(name)
    _, expected = model(IDS, taps=ALL)
    kv, found = forge_jax.new_kv(model, 4, BLOCK, jnp.float32, num_slots=2), []
    for start, end in ((0, 3), (3, 6)):
        kv, _, taps = paged(model, IDS[:, start:end], start, kv, taps=ALL)
        assert taps.keys() == expected.keys()
        found.append(taps)
    for key, whole in expected.items():
        parts = [np.asarray(each[key]).reshape(2, 3, *each[key].shape[1:]) for each in found]
        ours = np.concatenate(parts, axis=1)
        if key.endswith("pattern"):
            assert not ours[..., 6:].any()
            ours = ours.swapaxes(1, 2)[..., :6]
        np.testing.assert_allclose(ours, whole, atol=1e-4, err_msg=key)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_pattern_with_other_cache_types_is_close(dtype):
    model = forge_jax.load(str(GOLDENS / "llama2"), dtype="bfloat16", progress=False)
    kv = forge_jax.new_kv(model, 4, BLOCK, dtype)
    kv = jax.tree.map(lambda a: a.at[3, :, :, 3].set(-1) if a.ndim == 5 else a, kv)  # unused slots
    _, hidden, taps = paged(model, IDS[:, :3], 0, kv, taps="layers.0.attn.pattern")
    _, whole = model(IDS[:, :3], taps="layers.0.attn.pattern")
    ours = np.asarray(taps["layers.0.attn.pattern"]).reshape(2, 3, -1, 8).swapaxes(1, 2)[..., :3]
    np.testing.assert_allclose(ours, whole["layers.0.attn.pattern"], atol=0.02)
    _, plain = paged(model, IDS[:, :3], 0, kv)
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (hidden, plain)), atol=0.1)


# ---- edits ---------------------------------------------------------------------------------------


def test_patched_activation_gives_the_logits_of_its_source(models):
    model = models("llama2")
    source, taps = model(IDS[0], taps="layers.1.resid")
    edit = {"layers.1.resid": lambda x: taps["layers.1.resid"]}
    np.testing.assert_allclose(model(IDS[1], edit=edit), source, atol=1e-5)
    call = jax.jit(lambda model, ids, x: model(ids, edit={"layers.1.resid": lambda _: x}))
    found = call(model, IDS[1], taps["layers.1.resid"])
    np.testing.assert_allclose(found, source, atol=1e-5)


@pytest.mark.parametrize("point", ["embed", "layers.1.attn.pattern", "layers.*.mlp.inner"])
def test_edits_of_steps_and_of_whole_sequences_agree(models, point):
    model = models("llama2")
    edit = {point: lambda x: 0.5 * x}
    kv = forge_jax.new_kv(model, 4, BLOCK, jnp.float32)
    _, hidden = jax.jit(partial(paged, model, IDS, 0, edit=edit))(kv)
    logits = forge_jax.logits(model, model.leaves, hidden).reshape(2, 6, -1)
    np.testing.assert_allclose(logits, model(IDS, edit=edit), atol=1e-4)
    assert np.abs(logits - model(IDS)).max() > 0.01


def test_taps_return_edited_values_in_the_order_of_the_edits(models):
    edit = {"layers.*.resid": lambda x: x + 1, "layers.1.*": lambda x: 2 * x}
    _, plain = models("llama2")(IDS, taps=["layers.0.resid"])
    _, taps = models("llama2")(IDS, taps="layers.[01].resid", edit=edit)
    np.testing.assert_allclose(taps["layers.0.resid"], plain["layers.0.resid"] + 1, atol=1e-5)
    keep = {"layers.1.resid": lambda x: (taps["layers.1.resid"] / 2 - 1) * 2 + 2}
    _, again = models("llama2")(IDS, taps="layers.1.resid", edit=keep)
    np.testing.assert_allclose(again["layers.1.resid"], taps["layers.1.resid"], atol=1e-4)


def test_activations_have_gradients(models):
    model = models("llama2")

    @jax.jit
    @jax.grad
    def gradient(delta):
        return model(IDS[0], edit={"layers.0.resid": lambda x: x + delta})[-1, 7]

    x = jnp.zeros((6, model.spec.hidden_size))
    found = gradient(x)
    step = 1e-2 * found / jnp.linalg.norm(found)
    ahead, behind = (
        model(IDS[0], edit={"layers.0.resid": lambda x, s=s: x + s})[-1, 7] for s in (step, -step)
    )
    assert (ahead - behind) / 2e-2 == pytest.approx(float(jnp.linalg.norm(found)), rel=1e-2)


@pytest.mark.parametrize("options", [{}, {"implementation": "reference"}, {"uniform": True}])
@pytest.mark.parametrize("name", ["llama2", "gemma2", "qwen3_moe", "deepseek_v3", "gemma4_shared"])
def test_program_without_taps_is_that_without_probes(models, monkeypatch, name, options):
    model = models(name)
    i32 = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    shapes = [i32(shape) for shape in ((6,), (6,), (6,), (2, 2), (2,), (3,), ())]
    kv = forge_jax.new_kv(model, 4, BLOCK, num_slots=2)

    def lowered():
        def step(leaves, kv, *arrays):
            return forge_jax.forward(model, leaves, kv, *arrays, **options)

        return jax.jit(step).lower(model.leaves, kv, *shapes).as_text()

    ours = lowered()
    monkeypatch.setattr(Ragged, "tap", lambda self, point, x: x)
    monkeypatch.setattr(Ragged, "wants", lambda self, point: False)
    monkeypatch.setattr(Ragged, "in_layer", lambda self, layer: self)
    monkeypatch.setattr(Ragged, "embeddings", lambda self: None)
    monkeypatch.setattr(Ragged, "attention", lambda self: None)
    assert lowered() == ours


# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"taps": "layers.1.attn.patern"}, r"'layers.1.attn.patern' .* layers.1.attn.pattern"),
        ({"taps": ["embed", "layers.99.resid"]}, r"'layers.99.resid' matches no .*layers.\d.resid"),
        ({"taps": "layers.0.attn.latent"}, "layer 0 of Llama.* has no attn.latent: it has attn.q"),
        ({"taps": "layers.0.mlp.router.logits"}, "has no mlp.router.logits: it has"),
        ({"taps": [1]}, "taps must be names such as .* got 1 in taps"),
        ({"taps": [["embed"]]}, r"taps must be names such as .* got \['embed'\] in taps"),
        ({"taps": 3}, "taps must be names such as .* got 3"),
        ({"edit": {3: lambda x: x}}, "edit must have functions by names .* got the name 3"),
        ({"edit": [lambda x: x]}, "edit must have functions by name, got list"),
        ({"edit": {"layers.*.x": lambda x: x}}, r"edit: 'layers.\*.x' matches no activation"),
        ({"edit": {"embed": 3}}, r"edit\['embed'\] must be a function"),
        ({"edit": {"embed": lambda x: x[:2]}}, "returned .* for embed: return the shape"),
    ],
)  # fmt: skip
def test_wrong_names_and_edits_are_rejected(models, options, message):
    model = models("llama2")
    with pytest.raises(ValueError, match=message):
        model(IDS[0], **options)
    with pytest.raises(ValueError, match=message):
        paged(model, IDS, 0, forge_jax.new_kv(model, 4, BLOCK), **options)


def test_layer_with_state_has_no_pattern(models):
    model = models("qwen3_5")
    names = model.tap_names()
    layer = next(i for i in range(4) if f"layers.{i}.attn.pattern" not in names)
    assert f"layers.{layer}.attn.out" in names
    with pytest.raises(
        ValueError, match=f"layer {layer} of .* has no attn.pattern: it has attn.out"
    ):
        model(IDS, taps=f"layers.{layer}.attn.pattern")


def test_hidden_states_exclude_taps(models):
    model = models("llama2")
    kv = forge_jax.new_kv(model, 4, BLOCK)
    with pytest.raises(ValueError, match=r"add 'embed' and 'layers\.\*\.resid' to taps"):
        paged(model, IDS, 0, kv, taps=["embed"], return_hidden_states=True)


# ---- embeddings ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama2", "gpt2", "gemma2", "deepseek_v3", "qwen3_5"])
def test_embeddings_of_tokens_replace_the_tokens(models, name):
    model = models(name)
    embeds = model.embed(IDS)
    assert embeds.shape == (*IDS.shape, model.spec.hidden_size)
    np.testing.assert_allclose(model(inputs_embeds=embeds), model(IDS), atol=1e-5)


def test_steps_take_embeddings(models):
    model = models("gemma2")
    kv = forge_jax.new_kv(model, 4, BLOCK)
    batch = jnp.array([0, 4, 6]), jnp.array([4, 2]), jnp.array([[3, 0], [1, 2]])
    tokens = jnp.asarray(IDS[0])
    step = partial(forge_jax.decode_step, model, model.leaves, kv)
    _, expected, logits = step(tokens, *batch)
    _, found, ours = jax.jit(step)(None, *batch, inputs_embeds=model.embed(tokens))
    np.testing.assert_allclose(ours, logits, atol=1e-4)
    np.testing.assert_array_equal(found, expected)


def test_embeddings_may_be_numpy_arrays_or_lists(models):
    model = models("llama2")
    embeds = np.asarray(model.embed(IDS[0]))
    edit = {"embed": lambda x: x.at[0].set(0.0)}
    expected = model(IDS[0], edit=edit)
    for each in (embeds, embeds.astype(np.float64), embeds.tolist()):
        np.testing.assert_allclose(model(inputs_embeds=each, edit=edit), expected, atol=1e-5)
    batch = jnp.array([0, 6]), jnp.array([6]), jnp.array([[0, 1]])
    step = partial(forge_jax.decode_step, model, model.leaves, forge_jax.new_kv(model, 2, BLOCK))
    _, found, _ = step(None, *batch, inputs_embeds=embeds)
    np.testing.assert_array_equal(found, step(jnp.asarray(IDS[0]), *batch)[1])
    step = partial(paged, model, IDS, 0, forge_jax.new_kv(model, 4, BLOCK), edit=edit)
    with pytest.raises(ValueError, match="pass either tokens or inputs_embeds, got both"):
        step(inputs_embeds=embeds)
    with pytest.raises(ValueError, match="inputs_embeds must be an array of floats"):
        model(inputs_embeds=[[1.0, 2.0], [3.0]])


@pytest.mark.parametrize("name", ["llama2", "deepseek_v3"])
def test_undefined_embeddings_affect_no_earlier_tokens(models, name):
    model = models(name)
    embeds = model.embed(IDS)
    undefined = embeds.at[0, 4].set(np.nan).at[1, 3].set(np.inf)

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def gradient(embeds):
        logits = model(inputs_embeds=embeds)
        return jnp.sum(jnp.sin(logits[0, :4])) + jnp.sum(jnp.sin(logits[1, :3])), logits

    (_, expected), slopes = gradient(embeds)
    (_, logits), found = gradient(undefined)
    for row, count in ((0, 4), (1, 3)):
        np.testing.assert_allclose(logits[row, :count], expected[row, :count], atol=1e-6)
        assert not np.isfinite(logits[row, count:]).any()
        np.testing.assert_allclose(found[row, :count], slopes[row, :count], atol=1e-5)


def test_embeddings_of_padding_are_ignored(models):
    model = models("llama2")
    embeds = model.embed(IDS)
    undefined, lengths = embeds.at[0, 4:].set(np.nan), jnp.array([4, 6])

    @jax.jit
    @jax.value_and_grad
    def gradient(model, embeds):
        return jnp.sum(jnp.sin(model(inputs_embeds=embeds, lengths=lengths)))

    value, of_weights = gradient(model, undefined)
    expected, theirs = gradient(model, embeds)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    for found, wanted in zip(of_weights.leaves, theirs.leaves, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_soft_prompt_lowers_its_loss(models):
    model = models("llama2")

    @jax.jit
    def loss(prompt):
        embeds = jnp.concatenate([prompt, model.embed(IDS[0])])
        return -jax.nn.log_softmax(model(inputs_embeds=embeds)[-1])[7]

    prompt = model.embed([1, 2])
    better = prompt - 0.1 * jax.grad(loss)(prompt)
    assert loss(better) < loss(prompt) - 1e-3


def test_per_layer_inputs_require_token_ids(models):
    model = models("gemma4_shared")
    assert model.spec.per_layer_size
    with pytest.raises(ValueError, match=r"not supported by Gemma 4 .* token ids"):
        model(inputs_embeds=jnp.zeros((3, model.spec.hidden_size)))


@pytest.mark.parametrize("options", [{}, {"taps": ["embed"]}, {"edit": {"embed": lambda x: x}}])
def test_decoder_that_ignores_embeddings_is_rejected(models, monkeypatch, options):
    """It taps the embeddings of tokens, as a family with its own decoder may."""
    model = forge_jax.load(str(GOLDENS / "llama2"), dtype="float32", progress=False)
    embeds = model.embed(IDS)
    monkeypatch.setattr(Decoder, "embed", lambda self, tokens, ragged: self.embed_tokens(tokens))
    message = "inputs_embeds is not supported by LlamaForCausalLM, whose decoder does not read"
    with pytest.raises(ValueError, match=message):
        model(inputs_embeds=embeds, **options)
    batch = jnp.array([0, 6]), jnp.array([6]), jnp.array([[0, 1]])
    kv = forge_jax.new_kv(model, 2, BLOCK)
    with pytest.raises(ValueError, match=message):
        forge_jax.decode_step(model, model.leaves, kv, None, *batch, inputs_embeds=embeds[0])
    assert model(IDS, **options)[0] is not None
