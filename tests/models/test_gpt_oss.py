"""gpt-oss: its config, the formats of its experts, and refused options."""

from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from paged import PagedRun

from forge_jax.checkpoint.load import load_weights
from forge_jax.checkpoint.model_spec import read_spec
from forge_jax.checkpoint.safetensors import read_header
from forge_jax.config.hf_config import HFConfig
from forge_jax.errors import ConfigError, ModelError
from forge_jax.models import build_model
from forge_jax.models.families import ARCHITECTURES
from forge_jax.models.families.gpt_oss import GptOssSpec
from forge_jax.research import LoadedModel
from forge_jax.weights.formats import PLAIN, WeightFormats
from forge_kernels.linear import QuantizedWeight

FOLDER = Path(__file__).parent.parent / "fixtures" / "goldens" / "gpt_oss"
SPEC = read_spec(FOLDER)
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


def test_tensor_parallelism_is_rejected():
    with pytest.raises(ConfigError, match="--tensor-parallel is not supported for GptOssFor"):
        build_model(SPEC, shards=2)


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
