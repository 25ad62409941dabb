"""The interface of a model family: weight maps, its decoders and KV cache."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from paged import PagedRun
from safetensors.numpy import load_file, save_file

import forge_jax
from forge_jax import LLM, SamplingParams
from forge_jax.checkpoint.load import load_weights
from forge_jax.checkpoint.model_spec import read_spec
from forge_jax.config.hf_config import HFConfig
from forge_jax.errors import ConfigError, ModelError
from forge_jax.models import (
    Architecture,
    Decoder,
    Linear,
    PagedLayout,
    build_model,
    decoder_spec,
    plugins,
    register,
)
from forge_jax.models.families import ARCHITECTURES
from forge_jax.models.registry import spec_of
from forge_jax.models.weight_map import Tensor, decoder_weights, renamed
from forge_jax.research import LoadedModel
from forge_jax.weights.formats import WeightFormats
from forge_jax.weights.partition import partition_of

GOLDENS = Path(__file__).parent.parent / "fixtures" / "goldens"
LLAMA = read_spec(GOLDENS / "llama2")
PLAIN_MLP = replace(LLAMA, mlp_gated=False, mlp_bias=True, norm_type="layer", norm_bias=True)


def test_weight_map_covers_every_leaf_of_an_ungated_mlp_and_layer_norms():
    weights, model = decoder_weights(PLAIN_MLP), build_model(PLAIN_MLP)
    assert weights.keys() == set(model.names)
    assert {"norm.bias", "layers.0.mlp.norm.bias", "layers.0.mlp.up.bias"} <= weights.keys()
    assert not any("gate" in name for name in model.names)
    for name, leaf in zip(model.names, model.leaves, strict=True):
        assert sum(part.shape[0] for part in weights[name]) == leaf.shape[0]


def test_ungated_mlp_is_split_by_its_inner_columns():
    shard = build_model(PLAIN_MLP, shards=2)
    rows = PLAIN_MLP.intermediate_size
    for name, axis in (("up.weight", -2), ("up.bias", -1), ("down.weight", -1)):
        partition = partition_of(f"layers.0.mlp.{name}", PLAIN_MLP, 2)
        assert partition is not None and partition.axis == axis and partition.size == rows // 2
        assert shard.leaf(f"layers.0.mlp.{name}").shape[axis] == rows // 2
    assert partition_of("layers.0.mlp.down.bias", PLAIN_MLP, 2) is None


def test_weights_of_heads_and_the_bias_of_the_head_are_split():
    spec = replace(PLAIN_MLP, num_key_value_heads=2, norm_bias=False)
    spec = replace(spec, qk_norm="each_head", head_bias=True)
    heads, kv_heads, D = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim
    shards = 2 * kv_heads  # two devices have the same key head
    shard = build_model(spec, shards=shards)
    for name, count in (("q_norm", heads), ("k_norm", kv_heads)):
        leaf = f"layers.0.attention.{name}.weight"
        partition = partition_of(leaf, spec, shards)
        assert partition is not None
        whole = np.arange(count * D, dtype=np.float32).reshape(count, D)
        rows = max(1, count // shards)
        for index in range(shards):
            first = index * count // shards
            np.testing.assert_array_equal(partition.shard(whole, index), whole[first:][:rows])
        assert shard.leaf(leaf).shape == (rows, D)
    partition = partition_of("head.bias", spec, shards)
    assert partition is not None
    assert partition.axis == -1 and shard.leaf("head.bias").shape == (partition.size,)
    assert decoder_weights(spec)["head.bias"] == (Tensor("lm_head.bias", (spec.vocab_size,)),)


def test_rows_stored_by_head_are_stacked():
    heads, D, columns = 3, 4, 5
    tensor = Tensor("qkv.weight", (heads * 3 * D, columns), heads=heads)
    stored = np.arange(heads * 3 * D * columns).reshape(heads, 3, D, columns)
    queries, keys, values = np.split(stored.reshape(-1, columns)[tensor.stored_rows()], 3)
    np.testing.assert_array_equal(queries.reshape(heads, D, columns), stored[:, 0])
    np.testing.assert_array_equal(keys.reshape(heads, D, columns), stored[:, 1])
    np.testing.assert_array_equal(values.reshape(heads, D, columns), stored[:, 2])
    assert Tensor("qkv.weight", (heads * 3 * D, columns)).stored_rows() is None


def test_older_name_of_an_architecture_is_the_same_family():
    config = json.loads((GOLDENS / "llama2" / "config.json").read_text())
    old = HFConfig({**config, "architectures": ["LLaMAForCausalLM"]})
    assert spec_of(old, HFConfig({})) == LLAMA
    with pytest.raises(ModelError, match=r"LLaMAForCausalLM.* it is already built in"):
        register("LLaMAForCausalLM", ARCHITECTURES["LlamaForCausalLM"])


def test_renamed_fields_are_named_as_in_the_file():
    names = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer"}
    config = HFConfig({"n_embd": 8, "n_layer": "x"}).renamed(names)
    assert config.integer("hidden_size") == 8 and config.has("num_hidden_layers")
    with pytest.raises(ModelError, match=r"n_layer must be an integer from 1 to .*, not 'x'"):
        config.integer("num_hidden_layers")
    both = HFConfig({"n_embd": 8, "hidden_size": 16}).renamed(names)
    assert both.integer("hidden_size") == 16
    default = HFConfig({}).with_defaults({"n_embd": 0}).renamed(names)
    with pytest.raises(ModelError, match=r"n_embd must be .* default because the field is missing"):
        default.integer("hidden_size")


def test_renamed_replaces_whole_parts_of_names_in_order():
    d, inner = PLAIN_MLP.hidden_size, PLAIN_MLP.intermediate_size
    names = {"model.layers": "transformer.h", "mlp.up_proj": "mlp.c_fc", "model": "transformer"}
    weights = renamed(decoder_weights(PLAIN_MLP), names, transposed={"c_fc"})
    (up,) = weights["layers.1.mlp.up.weight"]
    assert up == Tensor("transformer.h.1.mlp.c_fc.weight", (d, inner), transpose=True)
    assert (up.rows, up.columns) == (inner, d)
    assert weights["layers.1.mlp.up.bias"] == (Tensor("transformer.h.1.mlp.c_fc.bias", (inner,)),)
    (down,) = weights["layers.1.mlp.down.weight"]
    assert down == Tensor("transformer.h.1.mlp.down_proj.weight", (d, inner))
    assert weights["norm.bias"] == (Tensor("transformer.norm.bias", (d,)),)


@pytest.mark.parametrize(
    ("limit", "options", "message"),
    [
        ("tensor_parallel", {"shards": 2}, "--tensor-parallel is not supported for LlamaFor"),
        ("lora", {"formats": WeightFormats(lora=True)}, "LoRA adapters are not supported for Ll"),
    ],
)
def test_limits_of_an_architecture_are_enforced(monkeypatch, limit, options, message):
    build_model(LLAMA, **options)
    own = replace(ARCHITECTURES["LlamaForCausalLM"], **{limit: False})
    monkeypatch.setitem(ARCHITECTURES, "LlamaForCausalLM", own)
    build_model(LLAMA)
    with pytest.raises(ConfigError, match=message):
        build_model(LLAMA, **options)


# ---- a decoder with its own cache ----------------------------------------------------------------


class LatentLayer(nnx.Module):
    """Attention whose keys and values are one latent vector per token, f32[DIM]."""

    def __init__(self, spec, dtype, matrix, layer):
        self.heads, self.dim = spec.num_attention_heads, spec.head_dim
        d, name = spec.hidden_size, f"layers.{layer}"
        self.query = Linear(matrix(f"{name}.query.weight", self.heads * self.dim, d))
        self.latent = Linear(matrix(f"{name}.latent.weight", self.dim, d))
        self.out = Linear(matrix(f"{name}.out.weight", d, self.heads * self.dim))

    def __call__(self, x, kv, ragged):
        T, (N, _, _, bs, dim) = len(x), kv.shape
        latents = kv.reshape(N * bs, dim).at[ragged.slot_mapping].set(self.latent(x), mode="drop")
        sequence = jnp.searchsorted(ragged.cu_q_lens, jnp.arange(T), side="right") - 1
        tables = ragged.block_tables[jnp.minimum(sequence, len(ragged.block_tables) - 1)]
        seen = latents.reshape(N, bs, dim)[tables].reshape(T, -1, dim)
        is_past = jnp.arange(seen.shape[1])[None] <= ragged.positions[:, None]
        seen = jnp.where(is_past[..., None], seen, 0.0)  # free blocks may hold NaN
        query = self.query(x).reshape(T, self.heads, dim)
        scores = jnp.einsum("thd,tsd->ths", query, seen)
        weights = jax.nn.softmax(jnp.where(is_past[:, None], scores, -jnp.inf), axis=-1)
        out = jnp.einsum("ths,tsd->thd", weights, seen).reshape(T, -1)
        return latents.reshape(kv.shape), self.out(out, residual=x)


class LatentDecoder(Decoder):
    layer = LatentLayer


def latent_weights(spec):
    d, rows = spec.hidden_size, spec.num_attention_heads * spec.head_dim
    shapes = {"norm": (d,), "head": (spec.vocab_size, d)}
    for index in range(spec.num_hidden_layers):
        shapes |= {
            f"layers.{index}.{name}": shape
            for name, shape in (
                ("query", (rows, d)),
                ("latent", (spec.head_dim, d)),
                ("out", (d, rows)),
            )
        }
    return {f"{name}.weight": (Tensor(f"{name}.weight", s),) for name, s in shapes.items()}


LATENT = Architecture(
    read_spec=lambda config, generation: decoder_spec(config, generation, "LatentForCausalLM"),
    defaults={
        **{"hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 1e4},
        **{"tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": None},
    },
    decoder=LatentDecoder,
    cache=lambda spec: (PagedLayout(planes=1, heads=1, dim=spec.head_dim),) * 2,
    weights=latent_weights,
)
LATENT_V = 512


@pytest.fixture
def latent_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(plugins, "_registered", {})
    register("LatentForCausalLM", LATENT)
    config = {
        **{"architectures": ["LatentForCausalLM"], "vocab_size": LATENT_V, "hidden_size": 32},
        **{"num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 1},
        "max_position_embeddings": 96,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    weights = latent_weights(read_spec(tmp_path))
    tensors = {
        part.name: (0.3 * rng.standard_normal(part.shape)).astype(np.float32)
        for (part,) in weights.values()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(GOLDENS.parent / "stories260k-hf/tokenizer.json", tmp_path)
    return tmp_path


def latent_logits(tensors, ids):
    """Return f64[T, V] of the latent model for one whole sequence."""
    w = {name.removesuffix(".weight"): value.astype(np.float64) for name, value in tensors.items()}
    x, T = w["head"][ids], len(ids)
    for layer in ("layers.0", "layers.1"):
        latent = x @ w[f"{layer}.latent"].T
        query = (x @ w[f"{layer}.query"].T).reshape(T, 4, 8)
        scores = np.einsum("thd,sd->hts", query, latent)
        scores = np.exp(np.where(np.tri(T, dtype=bool), scores, -np.inf))
        weights = scores / scores.sum(-1, keepdims=True)
        x = x + np.einsum("hts,sd->thd", weights, latent).reshape(T, -1) @ w[f"{layer}.out"].T
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w["norm"]
    return x @ w["head"].T


@pytest.mark.parametrize("chunk", [40, 7])
def test_decoder_with_its_own_cache_matches_a_reference(latent_folder, chunk):
    loaded = forge_jax.load(str(latent_folder), progress=False)
    tensors = load_file(latent_folder / "model.safetensors")
    ids = np.random.default_rng(1).integers(0, LATENT_V, (2, 40))
    run = PagedRun(loaded, 2)
    assert {layer.shape[1:] for layer in run.kv} == {(1, 1, 16, 8)}
    scores = [np.stack(run.step(ids[:, i : i + chunk].tolist())) for i in range(0, 40, chunk)]
    want = [latent_logits(tensors, row) for row in ids]
    np.testing.assert_allclose(np.concatenate(scores, axis=1), want, atol=2e-4, rtol=0)


def test_engine_runs_a_decoder_with_its_own_cache(latent_folder):
    tensors = load_file(latent_folder / "model.safetensors")
    prompts = np.random.default_rng(2).integers(0, LATENT_V, (3, 30)).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    options = {"max_num_seqs": 3, "block_size": 16, "num_blocks": 7, "max_model_len": 64}
    with LLM(str(latent_folder), max_num_batched_tokens=16, **options) as llm:
        found = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]
    for ids, output in zip(prompts, found, strict=True):
        for token in output:
            assert token == latent_logits(tensors, ids)[-1].argmax()
            ids.append(token)


def test_8_bit_cache_requires_keys_and_values(latent_folder):
    loaded = forge_jax.load(str(latent_folder), progress=False)
    with pytest.raises(ValueError, match="LatentForCausalLM does not support a KV cache of int8"):
        forge_jax.new_kv(loaded, 4, 16, dtype="int8")


# ---- GPT-2 ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpt2():
    return forge_jax.load(str(GOLDENS / "gpt2"), progress=False)


def copied(folder, tensors, **changes):
    """Write GPT-2 with other tensors, or with `changes` of its config."""
    config = json.loads((GOLDENS / "gpt2/config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def gpt2_tensors():
    return load_file(GOLDENS / "gpt2/model.safetensors")


def test_gpt2_without_its_prefix_and_with_buffers_has_the_same_leaves(gpt2, gpt2_tensors, tmp_path):
    tensors = {name.removeprefix("transformer."): array for name, array in gpt2_tensors.items()}
    tensors["h.0.attn.bias"] = np.tri(8, dtype=np.float32)  # the causal mask of old files
    same = forge_jax.load(str(copied(tmp_path, tensors)), progress=False)
    for name, leaf, other in zip(gpt2.model.names, gpt2.leaves, same.leaves, strict=True):
        np.testing.assert_array_equal(leaf, other, err_msg=name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is not sup"),
        ({"add_cross_attention": True}, "add_cross_attention is not supported"),
        ({"activation_function": "relu"}, "activation_function 'relu' is not supported"),
        ({"n_head": 5}, r"n_head must be a divisor of hidden_size \(64\), not 5"),
        ({"n_embd": "64"}, "n_embd must be an integer from 1"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}},
            "h.0.attn.c_attn.weight is stored transposed, which is not supported for quantized",
        ),
    ],
)
def test_gpt2_rejects_what_it_does_not_compute(gpt2_tensors, tmp_path, changes, message):
    with pytest.raises(ModelError, match=message):
        build_model(read_spec(copied(tmp_path, gpt2_tensors, **changes)))


def test_tied_head_of_gpt2_is_compared_with_its_own_embedding(gpt2_tensors, tmp_path):
    head = gpt2_tensors["transformer.wte.weight"]
    forge_jax.load(str(copied(tmp_path, {**gpt2_tensors, "lm_head.weight": head})), progress=False)
    other = copied(tmp_path, {**gpt2_tensors, "lm_head.weight": head + 1})
    with pytest.raises(ModelError, match=r"differs from transformer\.wte\.weight: set tie_word"):
        forge_jax.load(str(other), progress=False)


@pytest.mark.parametrize(("values", "bound"), [("int8", 0.03), ("int4", 0.3)])
def test_gpt2_rounds_its_transposed_matrices(values, bound):
    golden = load_file(GOLDENS / "gpt2/golden.safetensors")
    model = build_model(read_spec(GOLDENS / "gpt2"), "float32", WeightFormats(rounded=values))
    loaded = LoadedModel(
        model, load_weights(model, GOLDENS / "gpt2", progress=False), GOLDENS / "gpt2"
    )
    found = np.stack(PagedRun(loaded, 3).step(golden["input_ids"].tolist()))
    error = np.linalg.norm(found - golden["logits"]) / np.linalg.norm(golden["logits"])
    assert 1e-4 < error < bound
    assert sum(values in name for name in model.formats) == 1
