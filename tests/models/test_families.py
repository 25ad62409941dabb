"""The families' config fields, and packed matrices of each family."""

import json
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
from forge_jax.errors import ModelError, UnsupportedModelError
from forge_jax.models import RopeSpec, build_model
from forge_jax.models.decoder import rope_frequencies, rope_kinds
from forge_jax.models.families import ARCHITECTURES
from forge_jax.models.spec import read_rope
from forge_jax.research import LoadedModel
from forge_jax.weights.formats import WeightFormats
from forge_kernels import cpu
from forge_kernels.attention.cpu_ffi import unsupported

GOLDENS = Path(__file__).parent.parent / "fixtures" / "goldens"
MODELS = sorted(path.parent.name for path in GOLDENS.glob("*/golden.safetensors"))


def architecture_of(name: str) -> str:
    return json.loads((GOLDENS / name / "config.json").read_text())["architectures"][0]


BY_FAMILY = {architecture_of(name): name for name in MODELS}
# After rounding, the routers of these choose other experts, which differ completely. In
# transformers, bfloat16 changes the logits of qwen3_next by 16%, those of qwen3_5_moe by 13% and
# those of qwen3_5_moe_text by 14%.
REROUTED = {
    *("mixtral_window", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"),
    *("deepseek_v3", "glm4_moe_lite"),
}
PACKED = sorted(
    {
        *BY_FAMILY.values(),
        *("mistral_window", "mixtral", "qwen2_window", "qwen3_moe", "gpt_oss", "gemma4_moe"),
    }
    - REROUTED
)


@pytest.fixture
def spec_of(tmp_path):
    def read(name, without=(), **changes):
        config = json.loads((GOLDENS / name / "config.json").read_text()) | changes
        config = {key: value for key, value in config.items() if key not in without}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return read_spec(tmp_path)

    return read


def test_every_family_has_a_golden():
    assert set(ARCHITECTURES) == set(BY_FAMILY)


def test_windows_have_defaults_without_a_layer_list(spec_of):
    assert spec_of("mistral_window").windows == (24,) * 3
    assert spec_of("mistral_window", sliding_window=None).windows == ()
    assert spec_of("qwen2").windows == ()
    assert spec_of("qwen2_window", without=("layer_types",)).windows == (None, 16, 16)
    assert spec_of("gemma2", without=("layer_types",)).windows == (16, None, 16, None)
    gemma3 = ("layer_types", "_sliding_window_pattern")
    assert spec_of("gemma3", without=gemma3).windows == (16,) * 5 + (None, 16)
    assert spec_of("gemma3", without=gemma3, sliding_window_pattern=3).windows[2::3] == (None, None)


def test_gemma_3_has_two_rotations_in_both_spellings(spec_of):
    new = spec_of("gemma3")
    assert (new.rope.theta, new.local_rope.theta) == (1e6, 1e4)
    assert rope_kinds(new) == [new.local_rope, new.rope]
    old = spec_of(
        "gemma3",
        without=("rope_parameters",),
        rope_theta=2e6,
        rope_local_base_freq=5e3,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    assert old.rope == RopeSpec(type="linear", theta=2e6, factor=8.0)
    assert old.local_rope == RopeSpec(theta=5e3)
    assert spec_of("gemma3", without=("rope_parameters",)).rope.theta == 1e6


def test_longrope_is_read_in_both_spellings(spec_of):
    new = spec_of("phi3_long")
    section = json.loads((GOLDENS / "phi3_long" / "config.json").read_text())["rope_parameters"]
    old = {key: section[key] for key in ("short_factor", "long_factor")}
    without = ("rope_parameters",)
    assert spec_of("phi3_long", without, rope_scaling={"type": "longrope", **old}) == new
    assert new.rope.factors == tuple(section["long_factor"])
    assert new.rope.attention_factor == pytest.approx((1 + np.log(16) / np.log(32)) ** 0.5)
    section["original_max_position_embeddings"] = 512  # the field next to the section counts
    assert spec_of("phi3_long", rope_parameters=section) == new
    short = spec_of("phi3_long", original_max_position_embeddings=512)
    assert short.rope.factors == tuple(section["short_factor"])
    assert short.rope.attention_factor == 1.0


def test_rope_frequencies_match_transformers():
    """`make_ropes.py` made the table."""
    cases = json.loads((GOLDENS / "rope_frequencies.json").read_text())
    assert {case["rope_parameters"]["rope_type"] for case in cases} == {
        *("yarn", "dynamic", "linear", "llama3")
    }
    for case in cases:
        config, head_dim = HFConfig(case), case["head_dim"]
        rope = read_rope(config, case["max_position_embeddings"], head_dim, partial_rotary=True)
        found = rope_frequencies(rope, head_dim)
        np.testing.assert_allclose(found, case["frequencies"], rtol=2e-5, err_msg=str(case))
        assert rope.attention_factor == pytest.approx(case["attention_factor"], abs=1e-6)


def test_yarn_extends_the_context(spec_of):
    spec = spec_of("qwen2_yarn")
    assert (spec.max_position_embeddings, spec.max_context) == (64, 4 * 24)
    assert spec_of("mistral_yarn").max_context == 512
    dynamic = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    assert spec_of("qwen2_yarn", rope_parameters=dynamic).max_context == 64


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"factor": "4"}, "factor must be a number, not '4'"),
        ({"rope_theta": 1}, "rope_theta must be above 1 for YaRN, not 1"),
        ({"beta_fast": -1}, "beta_fast must be a finite number above 0"),
        ({"mscale": "1"}, "mscale must be a number, not '1'"),
        ({"truncate": 1}, "truncate must be true or false, not 1"),
        ({"attention_factor": 0}, "attention_factor must be a finite number above 0"),
        ({"original_max_position_embeddings": 0}, "original_max_position_embeddings must be an"),
    ],
)
def test_invalid_yarn_fields_are_named_in_the_error(spec_of, changes, message):
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, **changes}
    with pytest.raises(ModelError, match=f"rope_parameters: {message}"):
        spec_of("qwen2", rope_parameters=yarn)


def test_partial_rotation_is_read_inside_and_outside_the_section(spec_of):
    spec = spec_of("phi3_partial")
    assert spec.rope.dims == 12 and len(spec.rope.factors) == 6
    section = json.loads((GOLDENS / "phi3_partial" / "config.json").read_text())["rope_parameters"]
    assert spec_of("phi3_partial", rope_parameters=section, partial_rotary_factor=0.5) == spec
    del section["partial_rotary_factor"]
    assert spec_of("phi3_partial", rope_parameters=section) == spec
    for share in (0.35, 0.05, 1.25):
        with pytest.raises(ModelError, match="must be an even share of the head dim 16"):
            spec_of("phi3", partial_rotary_factor=share)


def test_interleaved_model_matches_hugging_face_logits_if_its_rows_are_reordered():
    """Neighboring pairs are the pairs of two halves after the rows of queries and keys move."""
    stored = read_header(GOLDENS / "llama2" / "golden.safetensors")
    ids, want = np.array(stored["input_ids"].read()), np.array(stored["logits"].read())
    spec = read_spec(GOLDENS / "llama2")
    model = build_model(replace(spec, rope=replace(spec.rope, interleaved=True)))
    leaves = load_weights(model, GOLDENS / "llama2", progress=False)
    D, rotated = spec.head_dim, spec.num_attention_heads + spec.num_key_value_heads
    order = np.arange(D).reshape(2, D // 2).T.ravel()  # 0, D / 2, 1, D / 2 + 1, ...
    rows = np.arange((rotated + spec.num_key_value_heads) * D)
    moved = rows[: rotated * D].reshape(rotated, D)[:, order].ravel()
    rows = np.concatenate([moved, rows[rotated * D :]])
    leaves = tuple(
        leaf[rows] if name.endswith("attention.qkv.weight") else leaf
        for name, leaf in zip(model.names, leaves, strict=True)
    )
    run = PagedRun(LoadedModel(model, leaves, GOLDENS / "llama2"), 3)
    scores = [np.stack(run.step(ids[:, part].tolist())) for part in (slice(40), slice(40, None))]
    np.testing.assert_allclose(np.concatenate(scores, axis=1), want, atol=2e-4, rtol=0)


def test_smollm_3_skips_rotation_in_every_fourth_layer(spec_of):
    assert spec_of("smollm3").no_rope == {2}
    assert spec_of("smollm3", without=("no_rope_layers",)).no_rope == {3}
    spec = spec_of("smollm3", without=("no_rope_layers",), no_rope_layer_interval=2)
    assert spec.no_rope == {1, 3}


def test_quantized_rows_stored_by_head_are_rejected_by_name(spec_of):
    scheme = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
    with pytest.raises(
        UnsupportedModelError,
        match=r"attention.query_key_value.weight has the queries, keys and values of each head "
        r"together, which is not supported for quantized matrices: use a checkpoint in floats",
    ):
        build_model(spec_of("gpt_neox", quantization_config=scheme))


def test_cohere_2_rotates_in_layers_with_a_window(spec_of):
    assert spec_of("cohere2").no_rope == {3}
    spec = spec_of("cohere2", ("layer_types",), sliding_window_pattern=2)
    assert spec.windows == (16, None, 16, None) and spec.no_rope == {1, 3}
    full = spec_of("cohere2", layer_types=["full_attention"] * 4)
    assert full.windows == (None,) * 4 and full.no_rope == {0, 1, 2, 3}


def test_gpt_neox_20b_has_its_own_name_of_an_activation(spec_of):
    assert spec_of("gpt_neox", hidden_act="gelu_fast").activation == "gelu_tanh"


def test_expert_layers_follow_the_config(spec_of):
    def layers(name, without=(), **changes):
        spec = spec_of(name, without, num_hidden_layers=6, **changes)
        return [layer for layer in range(6) if spec.experts_of(layer) is not None]

    assert layers("mixtral") == [0, 1, 2, 3, 4, 5]
    assert layers("qwen3_moe") == [0, 2, 3, 4, 5]
    assert layers("qwen3_moe", mlp_only_layers=None) == [0, 1, 2, 3, 4, 5]
    assert layers("qwen3_moe", mlp_only_layers=[2, 5], decoder_sparse_step=3) == []
    assert layers("qwen3_moe", mlp_only_layers=[2], decoder_sparse_step=3) == [5]
    assert layers("qwen3_moe_step") == [1, 3, 5]
    assert layers("qwen3", ("layer_types",), num_experts=4) == []
    assert spec_of("qwen3_moe", num_local_experts=0).experts is None


def test_experts_are_read_in_both_spellings_and_by_default(spec_of):
    new = spec_of("qwen3_moe").experts
    assert (new.count, new.per_token, new.intermediate_size, new.normalized) == (12, 4, 16, True)
    assert spec_of("qwen3_moe", ("num_local_experts",), num_experts=12).experts == new
    names = ("num_local_experts", "num_experts_per_tok", "moe_intermediate_size")
    large = spec_of("qwen3_moe", (*names, "norm_topk_prob")).experts
    assert (large.count, large.per_token, large.intermediate_size) == (128, 8, 768)
    assert not large.normalized
    mixtral = spec_of("mixtral", ("num_local_experts", "num_experts_per_tok", "rope_parameters"))
    assert (mixtral.experts.count, mixtral.experts.per_token) == (8, 2)
    assert mixtral.rope == RopeSpec(theta=1e6) and mixtral.windows == ()
    assert spec_of("mixtral_window").windows == (24, 24)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mixtral", {"num_local_experts": "8"}, "num_local_experts must be an integer from 1"),
        (
            "mixtral",
            {"num_experts_per_tok": 5},
            r"num_experts_per_tok must be at most num_local_experts \(4\), not 5",
        ),
        ("mixtral", {"num_experts_per_tok": 0}, "num_experts_per_tok must be an integer from 1"),
        ("mixtral", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act .* not supported with exp"),
        (
            "qwen3_moe",
            {"shared_expert_intermediate_size": 64},
            "shared_expert_intermediate_size is not supported: this architecture has no shared",
        ),
        ("qwen3_moe", {"n_shared_experts": 1}, "n_shared_experts is not supported"),
        ("qwen3_moe", {"mlp_only_layers": [3]}, "mlp_only_layers must be a list of integers from"),
        ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers must be a list of integers from 0"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step must be an integer from 1"),
        ("qwen3_moe", {"moe_intermediate_size": -1}, "moe_intermediate_size must be an integer"),
        ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob must be true or false"),
        ("mistral_window", {"sliding_window": 0}, "sliding_window must be an integer from 1"),
        ("qwen2_window", {"layer_types": ["full_attention"]}, "layer_types must be a list of 3"),
        ("qwen2_window", {"layer_types": ["x", "y", "z"]}, "layer_types must be a list of 3"),
        ("qwen2_window", {"use_sliding_window": 1}, "use_sliding_window must be true or false"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a finite number"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping must be a finite"),
        ("gemma2", {"hidden_activation": "relu"}, "hidden_activation 'relu' is not supported"),
        (
            "smollm3",
            {"no_rope_layers": [1, 2, 1, 1]},
            "no_rope_layers must be a list of 4 zeros and ones",
        ),
        ("granite", {"logits_scaling": 0}, "logits_scaling must be a finite number above 0"),
        (
            "granitemoehybrid",
            {"layer_types": ["mamba"] * 4},
            "layer_types without full_attention is not supported",
        ),
        ("granitemoehybrid", {"layer_types": ["moe"] * 4}, "layer_types must be a list of 4, each"),
        (
            "granitemoehybrid",
            {"position_embedding_type": "alibi"},
            "position_embedding_type 'alibi' is not supported; supported: nope, rope",
        ),
        (
            "granitemoehybrid",
            {"hidden_act": "gelu", "num_local_experts": 0},
            "hidden_act 'gelu' is not supported with Mamba-2",
        ),
        ("granitemoehybrid", {"mamba_n_heads": 7}, r"divisor of mamba_expand \* hidden_size \(128"),
        ("granitemoehybrid", {"mamba_n_groups": 3}, r"a divisor of mamba_n_heads \(8\), not 3"),
        ("granitemoehybrid", {"mamba_d_head": 8}, r"hidden_size / mamba_n_heads \(16\), not 8"),
        *(
            (
                "granitemoehybrid",
                {"time_step_limit": limit},
                "time_step_limit must be a list of two",
            )
            for limit in ([0.1], [0.2, 0.1], [-1, 1], ["0", "1"])
        ),
        (
            "gemma3",
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention is not supported",
        ),
        (
            "phi3_long",
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "short_factor": [1.0] * 8,
                    "long_factor": [1.0] * 7,
                }
            },
            "long_factor must be a list of 8 positive numbers",
        ),
        (
            "qwen3",
            {"partial_rotary_factor": 0.75},
            "partial_rotary_factor is not supported in this architecture: all numbers of a head",
        ),
        ("qwen3", {"rope_parameters": {"rope_type": "axial"}}, "rope type 'axial' is not support"),
        ("phi", {"qk_layernorm": True}, "qk_layernorm true is not supported"),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm true is not supported"),
        ("gpt_neox", {"head_dim": 8}, r"head_dim must be hidden_size / num_attention_heads \(16\)"),
        ("gpt_neox", {"rotary_emb_base": 0}, "rotary_emb_base must be a finite number above 0"),
    ],
)
def test_invalid_or_unsupported_fields_are_named_in_the_error(spec_of, name, changes, message):
    with pytest.raises((ModelError, UnsupportedModelError), match=message):
        spec_of(name, **changes)


@pytest.fixture
def _kernels(compilation_cache):
    if not cpu.available():
        pytest.skip("no CPU kernels on this machine")


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("name", PACKED)
@pytest.mark.quick_cases(1)
@pytest.mark.ci_cases(20)
def test_packed_matrices_are_as_close_to_float32_as_plain_ones(name, figure):
    stored = read_header(GOLDENS / name / "golden.safetensors")
    ids = np.array(stored["input_ids"].read()).tolist()
    want = np.array(stored["logits"].read())
    spec = read_spec(GOLDENS / name)
    packed, errors = WeightFormats(layers="bf16", head="bf16"), []
    attention = "xla" if unsupported(spec.head_dim, jnp.dtype("bfloat16"), "cpu") else "cpu"
    for implementation, formats in (("xla", None), (attention, packed)):
        model = build_model(spec, "bfloat16", formats)
        loaded = LoadedModel(
            model, load_weights(model, GOLDENS / name, progress=False), GOLDENS / name
        )
        run = PagedRun(loaded, 3, implementation=implementation)
        scores = [run.step([ids[i][at] for i in range(3)]) for at in (slice(40), slice(40, None))]
        found = np.concatenate([np.stack(part) for part in scores], axis=1)
        errors.append(np.linalg.norm(found - want) / np.linalg.norm(want))
    figure("families", name, "bfloat16", errors[0])
    figure("families", name, "packed", errors[1])
    # After rounding, a router may choose another expert, and random experts differ completely.
    assert errors[1] < 1.5 * errors[0] and errors[0] < (0.08 if spec.experts else 0.04)


def test_falcon_with_linear_biases_is_rejected(spec_of):
    with pytest.raises(UnsupportedModelError, match="alibi true is not supported"):
        spec_of("falcon_sequential", alibi=True)


def test_falcon_has_as_many_key_heads_as_its_layout(spec_of):
    assert spec_of("falcon", num_kv_heads=4).num_key_value_heads == 1  # as in Falcon 7B's file
    assert spec_of("falcon_grouped").num_key_value_heads == 2
    assert spec_of("falcon_sequential").num_key_value_heads == 4
    with pytest.raises(ModelError, match=r"num_kv_heads must be a divisor of num_attention_heads"):
        spec_of("falcon_grouped", num_kv_heads=3)
