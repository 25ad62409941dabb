"""The interface of a model family: weight maps, decoders of its own, and its KV cache."""

from dataclasses import replace
from pathlib import Path

import pytest

from forge_jax.checkpoint.model_spec import read_spec
from forge_jax.config.hf_config import HFConfig
from forge_jax.errors import ConfigError, ModelError
from forge_jax.models import build_model
from forge_jax.models.families import ARCHITECTURES
from forge_jax.models.weight_map import Tensor, decoder_weights, renamed
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
