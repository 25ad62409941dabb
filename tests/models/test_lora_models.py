"""LoRA adapters: their files, and the model with several of them in one step.

A model with an adapter must equal the same model merged with the adapter, which numpy computes in
`lora_files.py`.
"""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lora_files import merged, projections, write_adapter
from safetensors.numpy import load_file, save_file

from forge_jax.checkpoint.adapter import adapter_digest, check_adapter, read_adapter
from forge_jax.checkpoint.load import load_weights
from forge_jax.checkpoint.model_spec import read_spec
from forge_jax.errors import CheckpointError, ModelError, UnsupportedModelError
from forge_jax.models import build_model
from forge_jax.models.lora import Lora, LoraShape, set_adapter
from forge_jax.research import new_kv
from forge_jax.weights.formats import WeightFormats
from forge_kernels.lora import lora
from forge_kernels.lora.xla import all_places, own_places

SHAPE = LoraShape(places=3, rank=8)
BLOCK, LENGTH = 16, 13
CLOSE = {"atol": 1e-4, "rtol": 0}


def make_model(folder, dtype="float32", **formats):
    return build_model(read_spec(folder), dtype, WeightFormats(lora=True, **formats))


def empty_stacks(model, shape=SHAPE):
    return tuple(jnp.zeros(s.shape, s.dtype) for s in shape.stacks(model.spec, model.dtype))


def stacks_of(model, by_place, shape=SHAPE):
    stacks = empty_stacks(model, shape)
    for place, folder in by_place.items():
        arrays = read_adapter(folder, model, shape).arrays
        stacks = jax.jit(set_adapter)(stacks, jnp.int32(place), arrays)
    return stacks


def prompts(model, count):
    ids = np.random.default_rng(3).integers(0, model.spec.vocab_size, (count, LENGTH))
    return ids.astype(np.int32)


def logits_of(model):
    """Return a function of (leaves, i32[S, LENGTH], stacks, places of each sequence) to logits.

    It gives f32[S, LENGTH, V] in one step, compiled once for the leaves of any checkpoint.
    """

    @jax.jit
    def run(leaves, ids, stacks, places):
        seqs = len(ids)
        at, seq = jnp.tile(jnp.arange(LENGTH), seqs), jnp.repeat(jnp.arange(seqs), LENGTH)
        chosen = None if stacks is None else Lora(stacks, places[seq])
        _, hidden = model.forward(
            leaves, new_kv(model, seqs, BLOCK, num_slots=seqs), ids.reshape(-1), at,
            seq * BLOCK + at, jnp.arange(seqs)[:, None], jnp.full(seqs, LENGTH),
            jnp.arange(seqs + 1) * LENGTH, jnp.int32(seqs), lora=chosen,
        )  # fmt: skip
        return model.logits(leaves, hidden).reshape(seqs, LENGTH, -1)

    def call(leaves, ids, stacks=None, places=None):
        places = None if places is None else jnp.asarray(places, jnp.int32)
        return np.asarray(run(leaves, ids, stacks, places))

    return call


# ---- computation --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("phi3", "qwen2", "gemma2", "qwen3_moe", "gpt2", "gpt_oss"),
        *("gpt_neox", "phi", "cohere", "starcoder2", "llama4", "falcon_grouped"),
        *("qwen3_next", "qwen3_5", "qwen3_5_text", "granitemoehybrid_dense"),
    ],
)
@pytest.mark.quick_cases(1)
@pytest.mark.ci_cases(8)
def test_adapters_in_one_step_match_merged_weights(name, goldens, tmp_path, figure):
    base = goldens / name
    model = make_model(base)
    leaves = load_weights(model, base, progress=False)
    names = ("q_proj", "down_proj", "qkv_proj", "c_attn", "c_fc", "query_key_value", "fc1")
    some = projections(base, names)
    first = write_adapter(tmp_path / "first", base, seed=1)
    second = write_adapter(tmp_path / "second", base, seed=2, modules=some, rank=2, alpha=1.0)
    ids = prompts(model, 3)
    stacks = stacks_of(model, {3: first, 1: second})
    got = logits_of(model)(leaves, ids, stacks, [3, 0, 1])
    folders = [
        merged(tmp_path / "merged 1", base, first, 8.0 / 4),
        base,
        merged(tmp_path / "merged 2", base, second, 1.0 / 2),
    ]
    # The model without adapters fuses its SwiGLU into the product.
    plain = build_model(read_spec(base), "float32", WeightFormats())
    run = logits_of(plain)
    wanted = [run(load_weights(plain, folder, progress=False), ids) for folder in folders]
    expected = np.stack([w[i] for i, w in enumerate(wanted)])
    figure("families", name, "adapters", np.abs(got - expected).max())
    np.testing.assert_allclose(got, expected, **CLOSE)
    assert np.abs(got[0] - wanted[1][0]).max() > 0.01, "the adapter does nothing"


@pytest.mark.slow
def test_rslora_patterns_and_16_bit_files_are_read(goldens, tmp_path):
    base = goldens / "llama2"
    model = make_model(base)
    leaves = load_weights(model, base, progress=False)
    odd, *rest = projections(base, ("q_proj", "up_proj"))
    adapter = write_adapter(
        tmp_path / "adapter",
        base,
        seed=5,
        modules=[odd, *rest],
        rank=4,
        ranks={odd: 7},
        alpha_pattern={"layers.1.self_attn.q_proj": 3, "q_proj": 5.0},
        use_rslora=True,
        dtype=np.float16,
    )
    scaling = {m: 8.0 / math.sqrt(7 if m == odd else 4) for m in (odd, *rest)}
    for module in scaling:
        if module.endswith("q_proj"):
            alpha = 3.0 if "layers.1." in module else 5.0
            scaling[module] = alpha / math.sqrt(7 if module == odd else 4)
    ids = prompts(model, 1)
    run = logits_of(model)
    got = run(leaves, ids, stacks_of(model, {2: adapter}), [2])
    folder = merged(tmp_path / "merged", base, adapter, scaling)
    others = load_weights(model, folder, progress=False)
    np.testing.assert_allclose(got, run(others, ids, empty_stacks(model), [0]), **CLOSE)
    assert read_adapter(adapter, model, SHAPE).rank == 7


@pytest.mark.slow
def test_packed_matrices_support_adapters(goldens, tmp_path):
    from forge_kernels import cpu

    if not cpu.available() or jax.default_backend() != "cpu":
        pytest.skip("no C++ kernels here")
    base = goldens / "llama2"
    adapter = write_adapter(tmp_path / "adapter", base, seed=4)
    got = []
    for dtype, form in (("float32", None), ("bfloat16", "bf16")):
        model = make_model(base, dtype, layers=form, head=form)
        leaves = load_weights(model, base, progress=False)
        ids = np.repeat(prompts(model, 1), 2, axis=0)
        shape = dataclasses.replace(SHAPE, packed=form is not None)
        stacks = stacks_of(model, {1: adapter}, shape)
        got.append(logits_of(model)(leaves, ids, stacks, [1, 0]))
    exact, packed = got
    error, effect = np.linalg.norm(packed - exact), np.linalg.norm(exact[0] - exact[1])
    assert error < 0.03 * np.linalg.norm(exact) < 0.1 * effect


@pytest.mark.full_compile
@pytest.mark.parametrize("products", [all_places, own_places])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_row_bits_depend_only_on_its_own_adapter(dtype, products):
    """It must not depend on the batch, on other adapters, or on the adapter's place."""
    rng = np.random.default_rng(0)
    places, rank, rows = 4, 8, 16

    def random(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    x, a, b = random(rows, 48), random(places, rank, 48), random(40, places, rank)
    run = jax.jit(products)
    chosen = jnp.asarray([1, 2, 3, 4, 0] * 3 + [1], jnp.int32)
    together = run(x, a, b, chosen)
    assert not together[chosen == 0].any()
    for place in range(1, places + 1):
        mine = np.asarray(chosen == place)
        alone = run(jnp.where(mine[:, None], x, jnp.nan), a, b, jnp.where(mine, place, 0))
        np.testing.assert_array_equal(alone[mine], together[mine])
        # The same adapter in another place, without the others.
        a_moved, b_moved = jnp.zeros_like(a).at[1].set(a[place - 1]), jnp.zeros_like(b)
        b_moved = b_moved.at[:, 1].set(b[:, place - 1])
        moved = run(x, a_moved, b_moved, jnp.where(mine, 2, 1))
        np.testing.assert_array_equal(moved[mine], together[mine])
    wanted = jnp.einsum("ti,tri,otr->to", x[:4], a[chosen[:4] - 1], b[:, chosen[:4] - 1])
    close = {"rtol": 0, "atol": 1e-3 if dtype == jnp.float32 else 1.0}
    np.testing.assert_allclose(together[:4].astype("f4"), wanted.astype("f4"), **close)


@pytest.mark.parametrize(("rows", "own"), [(1, True), (4, True), (5, False), (64, False)])
def test_gpus_read_only_the_adapters_of_few_rows(rows, own):
    places, rank, inputs, outputs = 8, 16, 64, 48
    shapes = ((rows, inputs), (places, rank, inputs), (outputs, places, rank))
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    place = jax.ShapeDtypeStruct((rows,), jnp.int32)
    for platform, selects in (("cuda", own), ("cpu", False)):
        lowered = jax.jit(lora).trace(*arrays, place).lower(lowering_platforms=(platform,))
        assert ("gather" in lowered.as_text()) == selects


# ---- their files -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(goldens):
    return goldens / "llama2", make_model(goldens / "llama2")


def change_config(folder, **changes):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_tensors(folder, change):
    file = folder / "adapter_model.safetensors"
    tensors = {name: np.array(value) for name, value in load_file(file).items()}
    change(tensors)
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"peft_type": "IA3"}, "peft_type must be LORA, got 'IA3'"),
        ({"use_dora": True}, "use_dora: adapters with DoRA"),
        ({"bias": "lora_only"}, "bias must be none, got 'lora_only'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is true, but the base model does not store"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"init_lora_weights": "pissa_niter_16"}, "pissa_niter_16"),
        ({"alpha_pattern": {"(a+)+$": 3}}, "alpha_pattern"),
    ],
)
def test_adapters_other_than_plain_lora_are_rejected_by_name(llama, tmp_path, changes, named):
    base, model = llama
    write_adapter(tmp_path, base, seed=1)
    change_config(tmp_path, **changes)
    with pytest.raises(UnsupportedModelError) as caught:
        check_adapter(tmp_path, model, SHAPE)
    message = str(caught.value)
    assert named in message
    assert any(remedy in message for remedy in ("merge_and_unload", "convert", "write one entry"))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"r": 0}, "r must be an integer of at least 1"),
        ({"r": "4"}, "r must be an integer of at least 1"),
        ({"r": 5}, "not (5, 176) as r and this model require"),
        ({"r": 9}, "--max-lora-rank"),
        ({"lora_alpha": None}, "lora_alpha must be a number"),
        ({"lora_alpha": 1e42}, "not finite"),
        ({"use_rslora": "yes"}, "use_rslora"),
        ({"rank_pattern": [1]}, "rank_pattern must be an object"),
    ],
)
def test_invalid_adapter_config_is_rejected(llama, tmp_path, changes, named):
    base, model = llama
    write_adapter(tmp_path, base, seed=1)
    change_config(tmp_path, **changes)
    with pytest.raises(CheckpointError) as caught:
        read_adapter(tmp_path, model, SHAPE)
    assert named in str(caught.value)


MODULE = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.clear(), "no tensors"),
        (lambda t: t.pop(f"{MODULE}.lora_B.weight"), "q_proj.lora_B.weight is missing"),
        (lambda t: t[f"{MODULE}.lora_A.weight"].fill(np.nan), "not finite"),
        (
            lambda t: t.update({f"{MODULE}.lora_A.weight": np.zeros((4, 3), np.float32)}),
            "lora_A.weight has shape (4, 3)",
        ),
        (
            lambda t: t.update({f"{MODULE}.lora_A.weight": np.zeros((4, 64), np.int8)}),
            "lora_A.weight",
        ),
    ],
)
def test_mismatched_tensors_are_rejected(llama, tmp_path, change, named):
    base, model = llama
    write_adapter(tmp_path, base, seed=1)
    change_tensors(tmp_path, change)
    with pytest.raises(CheckpointError) as caught:
        read_adapter(tmp_path, model, SHAPE)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.lm_head.lora_A.weight",
        "base_model.model.model.embed_tokens.lora_embedding_A",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias",
        "base_model.model.model.layers.99.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.0.input_layernorm.lora_A.weight",
        "model.layers.0.self_attn.q_proj.lora_A.weight",
    ],
)
def test_unknown_tensor_is_rejected_by_name(llama, tmp_path, name):
    base, model = llama
    write_adapter(tmp_path, base, seed=1)
    change_tensors(tmp_path, lambda t: t.update({name: np.zeros((4, 64), np.float32)}))
    with pytest.raises(UnsupportedModelError) as caught:
        read_adapter(tmp_path, model, SHAPE)
    assert name in str(caught.value) and "merge_and_unload" in str(caught.value)


@pytest.mark.parametrize("other", ["qwen2", "gemma2"])
def test_adapter_of_another_model_names_that_model(llama, goldens, tmp_path, other):
    """Covers a model with other matrix shapes, and one with more matrices."""
    write_adapter(tmp_path, goldens / other, seed=1, base_model_name_or_path=f"someone/{other}")
    with pytest.raises(ModelError, match=f"made for 'someone/{other}' .base_model_name_or_path"):
        check_adapter(tmp_path, llama[1], SHAPE)


def test_expert_matrices_are_rejected_by_name(goldens, tmp_path):
    base = goldens / "qwen3_moe"
    write_adapter(tmp_path, base, seed=1, modules=["model.layers.0.mlp.experts.0.up_proj"])
    with pytest.raises(UnsupportedModelError, match=r"experts\.0\.up_proj"):
        read_adapter(tmp_path, make_model(base), SHAPE)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_folder_with_a_missing_file_is_no_adapter(llama, tmp_path, name):
    base, model = llama
    write_adapter(tmp_path, base, seed=1)
    (tmp_path / name).unlink()
    with pytest.raises(CheckpointError, match=f"no {name}: it is not a PEFT adapter"):
        read_adapter(tmp_path, model, SHAPE)
    (tmp_path / "adapter_model.bin").touch()
    if name == "adapter_model.safetensors":
        with pytest.raises(
            CheckpointError, match=r"adapter_model\.bin is not supported.*save it as safetensors"
        ):
            read_adapter(tmp_path, model, SHAPE)


def test_digest_distinguishes_adapters(llama, tmp_path):
    base, model = llama
    write_adapter(tmp_path, base, seed=1)
    before = adapter_digest(tmp_path)
    assert before == read_adapter(tmp_path, model, SHAPE).digest
    change_config(tmp_path, lora_alpha=9)
    assert before != adapter_digest(tmp_path)
