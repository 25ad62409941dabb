"""gpt-oss: its config, the formats of its experts, and refused options."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from paged import PagedRun

from forge_jax.checkpoint.load import check_weights, load_weights
from forge_jax.checkpoint.model_spec import read_spec
from forge_jax.checkpoint.safetensors import read_header
from forge_jax.config.hf_config import HFConfig
from forge_jax.errors import CheckpointError, ModelError
from forge_jax.models import build_model
from forge_jax.models.families import ARCHITECTURES
from forge_jax.models.families.gpt_oss import GptOssSpec
from forge_jax.research import LoadedModel
from forge_jax.weights.formats import PLAIN, WeightFormats
from forge_kernels.linear import QuantizedWeight
from forge_kernels.linear.quantized import (
    expert_product,
    mxfp4_values,
    powers_of_two,
    products_by_expert,
    products_by_pair,
)

FOLDER = Path(__file__).parent.parent / "fixtures" / "goldens" / "gpt_oss"
SPEC = read_spec(FOLDER)
MXFP4 = FOLDER.with_name("gpt_oss_mxfp4")
GATE_UP = "layers.0.mlp.gate_up.weight"


def logits(formats: WeightFormats | None = None) -> np.ndarray:
    stored = read_header(FOLDER / "golden.safetensors")
    ids = np.array(stored["input_ids"].read()).tolist()
    model = build_model(SPEC, formats=formats)
    run = PagedRun(LoadedModel(model, load_weights(model, FOLDER, progress=False), FOLDER), 3)
    return np.stack(run.step(ids))


def test_published_fields_are_read_with_defaults():
    """The fields of gpt-oss 20B; its rotation is in `rope_scaling`."""
    config = {
        **{"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 201088},
        **{"num_hidden_layers": 24, "num_local_experts": 32, "eos_token_id": 200002},
        **{"experts_per_token": 4, "initial_context_length": 4096, "swiglu_limit": 7.0},
        "rope_scaling": {
            **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0},
            **{"truncate": False, "original_max_position_embeddings": 4096},
        },
        "rope_theta": 150000,
    }
    spec = ARCHITECTURES["GptOssForCausalLM"].read(HFConfig(config), HFConfig({}))
    assert isinstance(spec, GptOssSpec) and spec.experts is not None
    assert spec.windows == (128, None) * 12 and spec.head_dim == 64
    assert (spec.experts.count, spec.experts.per_token) == (32, 4)
    assert (spec.rope.type, spec.rope.truncate, spec.max_context) == ("yarn", False, 131072)
    assert (spec.swiglu_limit, spec.swiglu_alpha) == (7.0, 1.702)
    quantized = {**config, "quantization_config": {"quant_method": "mxfp4"}}
    read = ARCHITECTURES["GptOssForCausalLM"].read(HFConfig(quantized), HFConfig({}))
    assert (spec.dtype, read.dtype) == ("float32", "bfloat16")
    del config["rope_scaling"]
    assert ARCHITECTURES["GptOssForCausalLM"].read(HFConfig(config), HFConfig({})) == spec
    for name in ("swiglu_limit", "swiglu_alpha"):
        with pytest.raises(ModelError, match=f"{name} must be a finite number above 0"):
            ARCHITECTURES["GptOssForCausalLM"].read(HFConfig({**config, name: 0}), HFConfig({}))


@pytest.mark.parametrize(("values", "limit"), [("int8", 0.1), ("fp8", 0.3)])
def test_rounded_experts_stay_close(values, limit):
    want, found = logits(), logits(WeightFormats(rounded=values))
    error = np.linalg.norm(found - want) / np.linalg.norm(want)
    assert 1e-3 < error < limit


def test_kernels_leave_experts_to_plain_xla():
    packed = build_model(SPEC, "bfloat16", WeightFormats(layers="bf16", head="bf16"))
    assert packed.matrices[GATE_UP].format == PLAIN
    assert packed.matrices["layers.0.attention.qkv.weight"].packing is not None
    rounded = build_model(SPEC, "bfloat16", WeightFormats(layers="int8", head="int8"))
    weight = rounded.matrices[GATE_UP]
    assert isinstance(weight.format.weight(weight.shape, jnp.bfloat16), QuantizedWeight)
    assert weight.packing is None


def test_mxfp4_values_and_scales_match_their_definition():
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    found = mxfp4_values(jnp.arange(16, dtype=jnp.uint8))
    np.testing.assert_array_equal(found, [*values, *(-value for value in values)])
    exponents = np.arange(255, dtype=np.uint8)
    want = np.ldexp(np.float32(1), exponents.astype(int) - 127)
    np.testing.assert_array_equal(powers_of_two(jnp.asarray(exponents))[1:], want[1:])


def test_mxfp4_experts_have_the_bits_that_transformers_decodes():
    model = build_model(read_spec(MXFP4))
    leaves = load_weights(model, MXFP4, progress=False)
    w = model.weight(leaves, GATE_UP)
    assert isinstance(w, QuantizedWeight)
    assert (w.weight.shape, w.scale.shape) == ((4, 128, 32), (4, 128, 2))
    assert w.weight.dtype == w.scale.dtype == jnp.uint8
    want = np.asarray(read_header(MXFP4 / "golden.safetensors")["gate_up"].read(), np.float32)
    one = jnp.eye(64, dtype=jnp.float32)
    for expert in range(4):  # by tiles of rows, as on CPUs, and by pair, as on GPUs
        found = expert_product(one, w, jnp.int32(expert))
        np.testing.assert_array_equal(found, want[expert])
        by_pair = products_by_pair(one, w, jnp.full(64, expert, jnp.int32))
        np.testing.assert_array_equal(by_pair, want[expert])
    np.testing.assert_array_equal(products_by_expert(one, w), want)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "mxfp4", "bits": 4}, "'bits' is not a known field"),
        ({"quant_method": "mxfp4", "modules_to_not_convert": 1}, "modules_to_not_convert must be"),
    ],
)
def test_unsupported_quantizations_are_named_in_the_error(tmp_path, changes, message):
    config = json.loads((MXFP4 / "config.json").read_text()) | {"quantization_config": changes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        read_spec(tmp_path)


def test_missing_or_misshapen_mxfp4_tensors_are_named_in_the_error(tmp_path):
    config = json.loads((MXFP4 / "config.json").read_text())
    config |= {"intermediate_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(MXFP4 / "model.safetensors", tmp_path)
    message = r"gate_up_proj_blocks has shape \(4, 128, 2, 16\), not \(4, 64, 2, 16\)"
    with pytest.raises(CheckpointError, match=message):
        check_weights(build_model(read_spec(tmp_path)), tmp_path)
    shutil.copy(FOLDER / "model.safetensors", tmp_path)
    with pytest.raises(CheckpointError, match="gate_up_proj_blocks is missing"):
        check_weights(build_model(read_spec(MXFP4)), tmp_path)


def test_sinks_limits_and_biases_change_the_result():
    """A model without each of them differs from transformers' results."""
    model = build_model(SPEC)
    leaves = dict(zip(model.names, load_weights(model, FOLDER, progress=False), strict=True))
    stored = read_header(FOLDER / "golden.safetensors")
    ids, want = np.array(stored["input_ids"].read()), np.array(stored["logits"].read())

    def error(model, leaves) -> float:
        run = PagedRun(LoadedModel(model, tuple(leaves.values()), FOLDER), 3)
        return np.abs(np.stack(run.step(ids.tolist())) - want).max()

    assert error(model, leaves) < 2e-4
    assert error(build_model(replace(SPEC, swiglu_limit=7.0)), leaves) > 0.01
    for name in ("attention.sinks", "mlp.router.bias", "mlp.gate_up_bias", "mlp.down_bias"):
        name = f"layers.0.{name}"
        value = jnp.full_like(leaves[name], -1e9 if name.endswith("sinks") else 0)
        assert error(model, {**leaves, name: value}) > 0.01, name
