"""Multi-head latent attention: its config, cache and quantized matrices, and the whole engine."""

import json
import math
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import quant_writer as writer
from paged import PagedRun

from forge_jax import LLM, SamplingParams
from forge_jax.checkpoint.load import check_weights, load_weights
from forge_jax.checkpoint.matrix import StoredMatrix
from forge_jax.checkpoint.model_spec import read_spec
from forge_jax.checkpoint.safetensors import read_header
from forge_jax.config.hf_config import HFConfig
from forge_jax.errors import CheckpointError, ConfigError, ModelError
from forge_jax.models import build_model
from forge_jax.models.families import ARCHITECTURES
from forge_jax.models.kv import EIGHT_BITS
from forge_jax.models.latent import LatentSpec
from forge_jax.models.weight_map import RowsOfHeads, Tensor
from forge_jax.research import LoadedModel
from forge_jax.step.kv_cache import kv_shape
from forge_jax.testing import core_of
from forge_jax.weights.formats import WeightFormats

GOLDENS = Path(__file__).parent.parent / "fixtures" / "goldens"
FOLDER = GOLDENS / "deepseek_v3"
NAMES = ["deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "glm4_moe_lite"]
YARN = {
    **{"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1},
    "original_max_position_embeddings": 4096,
}


def read(architecture: str, **fields) -> LatentSpec:
    spec = ARCHITECTURES[architecture].read(HFConfig(fields), HFConfig({}))
    assert isinstance(spec, LatentSpec)
    return spec


def golden(name: str) -> dict[str, np.ndarray]:
    stored = read_header(GOLDENS / name / "golden.safetensors")
    return {key: np.array(tensor.read()) for key, tensor in stored.items()}


# ---- config.json -------------------------------------------------------------------------------


def test_published_fields_of_deepseek_v3_are_read():
    spec = read(
        "DeepseekV3ForCausalLM",
        **{"vocab_size": 129280, "torch_dtype": "bfloat16", "max_position_embeddings": 163840},
        **{"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
        **{"ep_size": 1, "num_nextn_predict_layers": 1, "rope_theta": 10000},
        rope_scaling=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    )
    assert (spec.cached_dim, spec.qk_head_dim, spec.v_head_dim) == (576, 192, 128)
    assert spec.sm_scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert (spec.rope.attention_factor, spec.rope.interleaved) == (1.0, True)
    assert spec.experts is not None and spec.experts.dense_layers == {0, 1, 2}
    router = spec.experts.router
    assert (spec.experts.count, spec.experts.per_token, router.scale) == (256, 8, 2.5)
    assert (router.scores, router.groups, router.kept_groups) == ("sigmoid", 8, 4)
    assert router.correction and router.best_of_group == 2


def test_published_fields_of_deepseek_v2_lite_are_read():
    spec = read(
        "DeepseekV2ForCausalLM",
        **{"hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16},
        **{"num_key_value_heads": 16, "q_lora_rank": None, "n_group": 1, "topk_group": 1},
        **{"num_experts_per_tok": 6, "moe_intermediate_size": 1408, "scoring_func": "softmax"},
        **{"first_k_dense_replace": 1, "max_position_embeddings": 163840, "topk_method": "greedy"},
        rope_scaling=YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    )
    assert (spec.q_lora_rank, spec.cached_dim, spec.max_context) == (None, 576, 163840)
    assert spec.experts is not None and spec.experts.shared_size == 2 * 1408
    assert (spec.experts.router.groups, spec.experts.normalized) == (1, False)


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("DeepseekV3ForCausalLM", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not"),
        ("DeepseekV3ForCausalLM", {"topk_method": "greedy"}, "topk_method 'greedy' is not"),
        ("DeepseekV3ForCausalLM", {"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported"),
        ("DeepseekV3ForCausalLM", {"num_key_value_heads": 8}, "must be num_attention_heads"),
        ("DeepseekV3ForCausalLM", {"head_dim": 128}, r"head_dim must be qk_rope_head_dim \(64\)"),
        ("DeepseekV3ForCausalLM", {"qk_rope_head_dim": 63}, "qk_rope_head_dim must be even"),
        ("DeepseekV3ForCausalLM", {"kv_lora_rank": 0}, "kv_lora_rank must be an integer"),
        (
            "DeepseekV3ForCausalLM",
            {"rope_scaling": {"type": "linear", "factor": 2, "mscale_all_dim": 1}},
            "mscale_all_dim is supported only with rope type yarn",
        ),
        ("DeepseekV2ForCausalLM", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not"),
        ("DeepseekV2ForCausalLM", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not"),
        ("DeepseekV2ForCausalLM", {"norm_topk_prob": True}, "norm_topk_prob is not supported"),
        ("DeepseekV2ForCausalLM", {"mlp_bias": True}, "mlp_bias is not supported"),
        (
            "DeepseekV2ForCausalLM",
            {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 1},
            "n_group must be a divisor of the 64 experts",
        ),
        (
            "DeepseekV2ForCausalLM",
            {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 3},
            r"topk_group must be at most n_group \(2\)",
        ),
        (
            "DeepseekV2ForCausalLM",
            {"topk_method": "group_limited_greedy", "n_group": 32, "topk_group": 2},
            "num_experts_per_tok must be at most the 4 experts of topk_group groups",
        ),
        ("Glm4MoeLiteForCausalLM", {"mlp_layer_types": ["dense"]}, "must be a list of 47"),
    ],
)
def test_unsupported_fields_are_named_in_the_error(architecture, changes, message):
    with pytest.raises(ModelError, match=message):
        read(architecture, **{"num_experts_per_tok": 6, **changes})


# ---- cache and options -------------------------------------------------------------------------


@pytest.mark.parametrize(("platform", "storage"), [("cpu", "uint16"), ("gpu", "bfloat16")])
def test_cache_has_one_latent_per_token_and_layer(platform, storage):
    spec = read("DeepseekV3ForCausalLM", torch_dtype="bfloat16")
    shape = partial(kv_shape, spec, num_blocks=4, block_size=64, platform=platform)
    (kv,) = set(shape(dtype="bfloat16").layers)
    assert (kv.shape, kv.dtype) == ((4, 1, 1, 64, 576), storage)
    assert shape(dtype="bfloat16").block_bytes == 61 * 64 * 576 * 2
    for name, dtype in EIGHT_BITS.items():
        with pytest.raises(ConfigError, match=f"--kv-dtype {name} is not supported for Deepseek"):
            shape(dtype=dtype)


def test_decoded_matrix_is_read_once_for_many_heads():
    values, reads = np.arange(64 * 4, dtype=np.float32).reshape(64, 4), []

    class Decoded:
        dtype, shape = values.dtype, values.shape

        def read_rows(self, out, first):
            reads.append(first)
            out[...] = values[first : first + len(out)]

    part = Tensor("w", (64, 4), of_heads=RowsOfHeads(8, 5, 8))
    found = StoredMatrix([part], {"w": Decoded()}).read((24, 4), np.float32)
    assert reads == [5]
    np.testing.assert_array_equal(found, values.reshape(8, 8, 4)[:, 5:].reshape(24, 4))


def test_unsupported_options_are_named_in_the_error():
    spec = read_spec(FOLDER)
    with pytest.raises(ConfigError, match="LoRA adapters are not supported for DeepseekV3"):
        build_model(spec, formats=WeightFormats(lora=True))


# ---- weights -----------------------------------------------------------------------------------


def fp8_blocks(w, rng):
    return writer.fp8(w, rows=16, columns=16, name="weight_scale_inv")


def gptq_ordered(w, rng):
    # Matrices that are computed together have the same groups.
    index = np.random.default_rng(w.shape[1]).permutation(np.arange(w.shape[1]) // 8)
    return writer.gptq(w, group=8, rng=rng, ordered=True, index=index)


FP8 = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": True, "sym": True}
CASES = {"fp8 blocks": (fp8_blocks, FP8, 0.3), "gptq, ordered": (gptq_ordered, GPTQ, 0.8)}


def write_quantized(folder: Path, case: str) -> dict[str, np.ndarray]:
    """Write deepseek_v3 with quantized layers, and return the matrices that they represent."""
    quantize, quantization, _ = CASES[case]
    rng, tensors, exact = np.random.default_rng(0), {}, {}
    for name, tensor in read_header(FOLDER / "model.safetensors").items():
        w = np.array(tensor.read())
        if not name.endswith(("_proj.weight", "_with_mqa.weight")):
            tensors[name] = w
            continue
        module = name.removesuffix(".weight")
        parts, exact[name] = quantize(w, rng)
        tensors |= {f"{module}.{part}": array for part, array in parts.items()}
    writer.save(tensors, folder / "model.safetensors")
    config = json.loads((FOLDER / "config.json").read_text())
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    return exact


@pytest.mark.parametrize("case", CASES)
def test_quantized_up_projections_are_decoded(tmp_path, case):
    """W_UK and W_UV have the values of the checkpoint, and all other matrices stay quantized."""
    exact = write_quantized(tmp_path, case)
    model = build_model(read_spec(tmp_path))
    leaves = load_weights(model, tmp_path, progress=False)
    for layer in range(3):
        both = exact[f"model.layers.{layer}.self_attn.kv_b_proj.weight"].reshape(4, 40, 32)
        for name, part in (("key_up", both[:, :16]), ("value_up", both[:, 16:])):
            found = leaves[model.names.index(f"layers.{layer}.attention.{name}")]
            found = np.asarray(found).reshape(part.shape)
            np.testing.assert_allclose(found, part, rtol=1e-6, atol=1e-9)
    assert model.leaf("layers.0.attention.q.weight").dtype != np.float32
    want = golden("deepseek_v3")
    run = PagedRun(LoadedModel(model, leaves, tmp_path), 3)
    found = np.stack(run.step(want["input_ids"].tolist()))
    error = np.linalg.norm(found - want["logits"]) / np.linalg.norm(want["logits"])
    assert 1e-3 < error < CASES[case][2]


def test_missing_and_misshapen_scales_are_named_in_the_error(tmp_path):
    write_quantized(tmp_path, "fp8 blocks")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [16, 8]
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = r"kv_b_proj.weight_scale_inv has shape \(10, 2\), not \(10, 4\)"
    with pytest.raises(CheckpointError, match=message):
        check_weights(build_model(read_spec(tmp_path)), tmp_path)
    shutil.copy(FOLDER / "model.safetensors", tmp_path)
    with pytest.raises(CheckpointError, match=r"kv_b_proj.weight_scale_inv is missing"):
        check_weights(build_model(read_spec(tmp_path)), tmp_path)


def test_published_scales_of_blocks_may_be_partial(tmp_path):
    """DeepSeek-V3's `kv_a_proj_with_mqa` has 576 rows, which is 4.5 blocks of 128."""
    write_quantized(tmp_path, "fp8 blocks")
    stored = read_header(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"
    assert stored[name].shape == (3, 4)  # the matrix has 40 rows
    check_weights(build_model(read_spec(tmp_path)), tmp_path)


def test_undescribed_quantization_is_rejected(tmp_path):
    write_quantized(tmp_path, "fp8 blocks")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="quantization_config does not describe it"):
        check_weights(build_model(read_spec(tmp_path)), tmp_path)


@pytest.mark.parametrize(("values", "limit"), [("int8", 0.1), ("fp8", 0.3)])
@pytest.mark.quick_cases(1)
def test_rounded_matrices_stay_close(values, limit):
    model = build_model(read_spec(FOLDER), formats=WeightFormats(rounded=values))
    assert model.leaf("layers.0.attention.key_up").dtype == np.float32
    want = golden("deepseek_v3")
    loaded = LoadedModel(model, load_weights(model, FOLDER, progress=False), FOLDER)
    found = np.stack(PagedRun(loaded, 3).step(want["input_ids"].tolist()))
    error = np.linalg.norm(found - want["logits"]) / np.linalg.norm(want["logits"])
    assert 1e-3 < error < limit


@pytest.mark.parametrize("part", ["scale", "interleaved", "groups", "correction"])
def test_each_part_changes_the_result(part):
    """A model without one of them differs from transformers' results."""
    spec = read_spec(FOLDER)
    assert spec.experts is not None
    changed = {
        "scale": {"attention_scale": 24**-0.5},
        "interleaved": {"rope": replace(spec.rope, interleaved=False)},
        "groups": {"router": replace(spec.experts.router, best_of_group=1)},
        "correction": {"router": replace(spec.experts.router, correction=False)},
    }[part]
    if "router" in changed:
        changed = {"experts": replace(spec.experts, **changed)}
    model = build_model(replace(spec, **changed))
    want = golden("deepseek_v3")
    loaded = LoadedModel(model, load_weights(model, FOLDER, progress=False), FOLDER)
    found = np.stack(PagedRun(loaded, 3).step(want["input_ids"].tolist()))
    assert np.abs(found - want["logits"]).max() > 0.01


# ---- the engine --------------------------------------------------------------------------------

OPTIONS = {"max_num_seqs": 4, "block_size": 16, "max_model_len": 96}


def generate(name: str, count: int = 24, **options):
    """Return the greedy tokens of the golden's prompts, and the engine's scheduler."""
    prompts = golden(name)["input_ids"].tolist()
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    with LLM(str(GOLDENS / name), **OPTIONS | options) as llm:
        tokens = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]
        return tokens, core_of(llm).scheduler


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.quick_cases(1)
def test_engine_generates_the_tokens_of_transformers(name):
    """Prompts are computed in chunks, and 11 blocks for 3 sequences of 6 force preemptions."""
    options = {"max_num_batched_tokens": 32, "num_blocks": 11, "enable_prefix_caching": False}
    tokens, scheduler = generate(name, **options)
    assert tokens == golden(name)["greedy_ids"].tolist()
    assert scheduler.num_preemptions > 0


def test_speculation_keeps_the_tokens():
    tokens, _ = generate("deepseek_v2", speculation="ngram", max_num_batched_tokens=64)
    assert tokens == golden("deepseek_v2")["greedy_ids"].tolist()


@pytest.mark.slow
def test_deterministic_logprobs_do_not_depend_on_the_batch():
    """The bits are the same alone, in a batch, from the prefix cache, and with drafts."""
    prompts = golden("deepseek_v3")["input_ids"].tolist()
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=24, logprobs=2, ignore_eos=True)

    def first(outputs) -> list:
        (sample,) = outputs[0].outputs
        return [list(sample.token_ids), sample.logprobs]

    options = OPTIONS | {"deterministic": True, "max_num_batched_tokens": 32}
    with LLM(str(FOLDER), **options) as llm:
        want = first(llm.generate(prompts[:1], params))
        assert first(llm.generate(prompts, params)) == want
        assert core_of(llm).scheduler.pool.hit_tokens > 0
    with LLM(str(FOLDER), **options, speculation="ngram") as llm:
        assert first(llm.generate(prompts, params)) == want
