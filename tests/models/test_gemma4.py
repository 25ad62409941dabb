"""Gemma 4: published sizes, layers of two sizes, and layers that share the keys of others."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged import rows_alone

from forge_jax import LLM, SamplingParams
from forge_jax.checkpoint.model_spec import read_spec
from forge_jax.config.hf_config import HFConfig
from forge_jax.errors import ConfigError, ModelError
from forge_jax.models import PagedLayout, build_model
from forge_jax.models.families import ARCHITECTURES
from forge_jax.models.families.gemma4_decoder import Gemma4Spec
from forge_jax.step.kv_cache import kv_shape
from forge_jax.weights.formats import WeightFormats
from forge_kernels.attention.cpu_ffi import unsupported

GOLDENS = Path(__file__).parent.parent / "fixtures" / "goldens"
ARCHITECTURE = ARCHITECTURES["Gemma4ForCausalLM"]
SLIDING, FULL = "sliding_attention", "full_attention"
# Sizes of the published models.
E2B = {
    **{"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35},
    **{"num_attention_heads": 8, "num_key_value_heads": 1, "num_kv_shared_layers": 20},
    **{"use_double_wide_mlp": True, "layer_types": ([SLIDING] * 4 + [FULL]) * 7},
    "final_logit_softcapping": 30.0,
}
E4B = {
    **{"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 42},
    **{"num_attention_heads": 8, "num_key_value_heads": 2, "num_kv_shared_layers": 18},
}
LARGE = {"attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "sliding_window": 1024}
DENSE = {
    **LARGE,
    **{"hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 60},
    **{"num_attention_heads": 32, "num_key_value_heads": 16, "num_global_key_value_heads": 4},
}
MOE = {
    **LARGE,
    **{"hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30},
    **{"num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 2},
    **{"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8},
    "moe_intermediate_size": 704,
}


def spec_of(config: dict) -> Gemma4Spec:
    spec = ARCHITECTURE.read(HFConfig(config), HFConfig({}))
    assert isinstance(spec, Gemma4Spec)
    return spec


def golden_with(name: str, **changes) -> Gemma4Spec:
    config = json.loads((GOLDENS / name / "config.json").read_text())
    return spec_of({**config, **changes})


@pytest.mark.parametrize(
    ("config", "billions"), [(E2B, 4.63), (E4B, 7.46), (DENSE, 30.7), (MOE, 25.2)]
)
def test_published_sizes_have_their_parameters(config, billions):
    """The counts are of the text models: E2B and E4B have 0.45 billion more in their encoders."""
    weights = ARCHITECTURE.weights(spec_of(config))
    count = sum(math.prod(part.shape) for parts in weights.values() for part in parts)
    assert count / 1e9 == pytest.approx(billions, rel=0.01)


def test_layers_have_their_own_sizes_and_projections():
    spec = spec_of(DENSE)
    sliding, full = spec.of_layer(0), spec.of_layer(5)
    assert (sliding.head_dim, sliding.num_key_value_heads, spec.window(0)) == (256, 16, 1024)
    assert (full.head_dim, full.num_key_value_heads, spec.window(5)) == (512, 4, None)
    assert (spec.projections(0), spec.projections(5)) == ("qkv", "qk")
    assert (spec.rope.theta, spec.rope.dims, spec.rope.pairs) == (1e6, 512, 64)
    small = spec_of(E2B)
    assert [small.projections(layer) for layer in (13, 14, 15, 34)] == ["qkv", "qkv", "q", "q"]
    assert small.kv_sources[13:20] == (13, 14, 13, 13, 13, 13, 14)
    assert [small.of_layer(layer).intermediate_size for layer in (14, 15)] == [6144, 12288]
    assert small.of_layer(15) == small.of_layer(15).of_layer(15)


def test_layers_that_share_keys_have_no_cache():
    spec = spec_of(E2B)
    layouts = ARCHITECTURE.cache(spec)
    assert layouts[13] == PagedLayout(heads=1, dim=256)
    assert layouts[34] == PagedLayout(heads=1, dim=512, shares=14)
    shape = kv_shape(spec, num_blocks=4, block_size=16, dtype="bfloat16", platform="gpu")
    numbers = sum(2 * 512 if spec.window(layer) is None else 2 * 256 for layer in range(15))
    assert shape.block_bytes == 16 * 2 * numbers


def test_cpu_kernels_support_both_head_dims():
    sizes = {spec_of(E2B).of_layer(layer).head_dim for layer in range(35)}
    assert sizes == {256, 512}
    assert not any(unsupported(size, jnp.dtype("bfloat16"), "cpu") for size in sizes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers must be so small that each type has"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is not supported"),
        ({"vocab_size_per_layer_input": 100}, "vocab_size_per_layer_input must be at least vocab"),
        ({"per_layer_config": {"1": {"sliding_window": 4}}}, "not supported with 'sliding_window'"),
        ({"per_layer_config": {"1": {"head_dim": 8}}}, "if layers with full_attention differ"),
        ({"per_layer_config": {"9": {"head_dim": 8}}}, "9 must be missing: the model has 5 layers"),
        ({"rope_parameters": {FULL: {}}}, "full_attention: rope_type must be a string"),
        ({"enable_moe_block": True}, "use_double_wide_mlp is not supported with enable_moe_block"),
        ({"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input must be an integer"),
        (
            {
                **{"enable_moe_block": True, "use_double_wide_mlp": False},
                "hidden_activation": "gelu",
            },
            "hidden_activation 'gelu' is not supported with enable_moe_block; supported: gelu_py",
        ),
    ],
)
def test_invalid_or_unsupported_fields_are_named_in_the_error(changes, message):
    with pytest.raises(ModelError, match=message):
        golden_with("gemma4_shared", **changes)


def test_inputs_of_layers_have_the_exact_gelu():
    model = build_model(
        golden_with("gemma4_shared", hidden_activation="gelu"), "float32", WeightFormats()
    )
    rng = np.random.default_rng(0)
    leaves = tuple(jnp.asarray(0.2 * rng.normal(size=x.shape), x.dtype) for x in model.leaves)
    gate, projection, norm = (
        np.asarray(leaves[model.names.index(f"layers.0.input.{each}.weight")])
        for each in ("gate", "projection", "post_norm")
    )
    x, own = (rng.normal(size=(3, n)).astype(np.float32) for n in gate.shape[::-1])
    decoder: Any = model.decoder(leaves)
    step = rows_alone(np.int32(3))
    added = np.asarray(decoder.layers[0].input(jnp.asarray(x), jnp.asarray(own), step)) - x
    y = np.asarray(jax.nn.gelu(x @ gate.T, approximate=False) * own) @ projection.T
    want = y / np.sqrt((y * y).mean(axis=1, keepdims=True)) * norm
    np.testing.assert_allclose(added, want, atol=2e-5)


def test_fields_of_both_spellings_agree():
    new = golden_with("gemma4")
    config = json.loads((GOLDENS / "gemma4" / "config.json").read_text())
    del config["per_layer_config"]
    old = spec_of({**config, "global_head_dim": 32, "num_global_key_value_heads": 1})
    assert old == new and (new.global_head_dim, new.global_kv_heads) == (32, 1)


def test_adapters_are_rejected():
    spec = read_spec(GOLDENS / "gemma4")
    with pytest.raises(ConfigError, match="LoRA adapters are not supported for Gemma4ForCausalLM"):
        build_model(spec, formats=WeightFormats(lora=True))


def test_first_layers_have_the_leaves_of_the_whole_model():
    spec = read_spec(GOLDENS / "gemma4_shared")
    whole, part = build_model(spec), build_model(replace(spec, num_hidden_layers=3))
    assert set(part.names) < set(whole.names)
    assert all(part.leaf(name) == whole.leaf(name) for name in part.names)


@pytest.mark.quick_cases(1)
def test_drafts_by_the_first_layers_change_no_token():
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 96}
    params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    prompts = [[3, 4, 5, 6] * 6, [7, 8, 9]]
    outputs = []
    for speculation in (
        {},
        {"speculation": "draft", "draft_model": "self", "draft_layers": 2, "max_draft_tokens": 2},
    ):
        llm = LLM(str(GOLDENS / "gemma4_shared"), num_blocks=24, **options, **speculation)
        found = llm.generate(prompts, params, progress=False)
        outputs.append([list(each.outputs[0].token_ids) for each in found])
    assert outputs[0] == outputs[1]
