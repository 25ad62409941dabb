"""A GGUF file gives the same model as its source folder."""

import dataclasses
import json
import shutil

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest
from gguf_writer import Q, interleaved, write_gguf
from paged import PagedRun
from safetensors.numpy import load_file, save_file

import forge_jax
from forge_jax import LLM, SamplingParams
from forge_jax.checkpoint.gguf import read_gguf
from forge_jax.checkpoint.gguf.tensors import weights_of
from forge_jax.checkpoint.hub import resolve
from forge_jax.checkpoint.model_spec import read_spec
from forge_jax.checkpoint.safetensors import read_header
from forge_jax.engine.fingerprint import system_fingerprint
from forge_jax.errors import CheckpointError, ModelError, UnsupportedModelError
from forge_jax.models import build_model

GATING = gguf.ExpertGatingFuncType
SAME = (
    *("llama2", "llama_bias", "mistral_window", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"),
    *("mixtral", "qwen2_yarn"),
    *("gemma", "phi", "stablelm", "stablelm_parallel", "cohere", "cohere2", "granite", "olmo2"),
    *("gpt_neox", "exaone4", "exaone4_full", "seed_oss", "glm4", "ernie4_5"),
    *("glm4_moe", "ernie4_5_moe", "granitemoe", "gpt2", "glm", "ministral3"),
    *("falcon", "falcon_grouped"),
)
# Models of which a GGUF file can hold only a variant: the fields to change first.
VARIANTS = {
    "starcoder2": {"sliding_window": None},  # llama.cpp computes StarCoder2 without windows
    "gpt_neox_sequential": {"hidden_act": "gelu"},  # files do not name the activation
    "smollm3": {"no_rope_layers": [1, 1, 1, 0]},  # hard-coded in llama.cpp
    "llama4": {
        **{"no_rope_layers": [1, 1, 1, 0], "layer_types": None, "floor_scale": 8192},
        **{"attention_chunk_size": 8192, "attn_scale": 0.1},
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "olmo3": {  # YaRN with the default attention factor
        "rope_parameters": {
            "full_attention": {
                **{"rope_type": "yarn", "rope_theta": 3e5, "factor": 8.0},
                "original_max_position_embeddings": 32,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 3e5},
        }
    },
}
STRETCHED = ("llama31", "llama32_tied", "phi3_long", "phi3_partial")


@pytest.fixture(scope="session")
def stories_gguf(stories):
    return stories.parent / "stories260k-gguf" / "tinyllamas-stories-260k-f32.gguf"


def load(path, **options):
    return forge_jax.load(str(path), progress=False, **options)


def golden(folder):
    stored = read_header(folder / "golden.safetensors")
    return {key: np.array(tensor.read()) for key, tensor in stored.items()}


def assert_same_weights(got, expected, atol=0.0):
    assert got.model.names == expected.model.names
    for name, ours, theirs in zip(got.model.names, got.leaves, expected.leaves, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize("name", SAME)
def test_gguf_model_equals_the_folders(name, goldens, tmp_path, figure):
    folder = goldens / name
    got = load(write_gguf(folder, tmp_path / "model.gguf"))
    expected = load(folder)
    spec = dataclasses.replace(expected.spec, attention_scale=got.spec.attention_scale)
    assert got.spec == spec
    assert got.spec.sm_scale == pytest.approx(expected.spec.sm_scale, rel=1e-6)
    # The file stores Gemma's norms plus 1.
    assert_same_weights(got, expected, atol=1e-7 if name.startswith("gemma") else 0.0)
    figure("families", name, "gguf", "norms to 1e-7" if name.startswith("gemma") else "same bits")


@pytest.mark.parametrize("kind", [Q.F32, Q.Q8_0])
def test_gguf_model_with_fused_queries_keys_and_values_equals_the_folders(kind, goldens, tmp_path):
    """The first releases of GLM-4 have them in one matrix."""
    folder = tmp_path / "glm"
    shutil.copytree(goldens / "glm", folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if ".q_proj." in name]:
        parts = [tensors.pop(name.replace(".q_proj.", f".{part}_proj.")) for part in "qkv"]
        tensors[name.replace(".q_proj.", ".qkv_proj.")] = np.concatenate(parts)
    save_file(tensors, folder / "model.safetensors")
    got = load(write_gguf(folder, tmp_path / "fused.gguf", kind), dtype="float32")
    expected = load(write_gguf(goldens / "glm", tmp_path / "model.gguf", kind), dtype="float32")
    ids = [[5, 9, 40, 7, 99, 3, 18, 150, 31, 4, 77, 2, 60]]
    np.testing.assert_array_equal(*(PagedRun(model, 1).step(ids) for model in (got, expected)))


@pytest.mark.parametrize("name", VARIANTS)
def test_gguf_model_equals_the_variant_that_it_can_hold(name, goldens, tmp_path):
    folder = tmp_path / name
    shutil.copytree(goldens / name, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | VARIANTS[name]))
    got, expected = load(write_gguf(folder, tmp_path / "model.gguf")), load(folder)
    assert got.spec == expected.spec
    assert_same_weights(got, expected)


def test_scales_of_minicpm_follow_from_the_file(goldens, tmp_path):
    got = load(write_gguf(goldens / "minicpm", tmp_path / "m.gguf"))
    expected = load(goldens / "minicpm")
    scale = got.spec.residual_scale  # a float32 in the file
    assert np.float32(scale) == np.float32(expected.spec.residual_scale)
    spec = dataclasses.replace(expected.spec, residual_scale=scale)
    assert got.spec == spec
    assert_same_weights(got, expected)


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("qwen2_vl", "Qwen2ForCausalLM"),
        ("qwen2_5_vl", "Qwen2ForCausalLM"),
        ("qwen3_vl", "Qwen3ForCausalLM"),
        ("qwen3_vl_moe", "Qwen3MoeForCausalLM"),
    ],
)
def test_text_model_of_a_multimodal_file_equals_the_folders(name, own, goldens, tmp_path, figure):
    got, expected = load(write_gguf(goldens / name, tmp_path / "model.gguf")), load(goldens / name)
    assert got.spec == dataclasses.replace(expected.spec, architecture=own)
    assert_same_weights(got, expected)
    figure("families", name, "gguf", "same bits")


def test_correction_of_ernie_may_be_a_vector(goldens, tmp_path, monkeypatch):
    add_tensor = gguf.GGUFWriter.add_tensor

    def add(self, name, tensor, *args, **options):
        is_correction = name.endswith("exp_probs_b.bias")
        add_tensor(self, name, tensor[0] if is_correction else tensor, *args, **options)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", add)
    file = write_gguf(goldens / "ernie4_5_moe", tmp_path / "m.gguf")
    assert read_gguf(file).tensors["blk.1.exp_probs_b.bias"].shape == (8,)
    assert_same_weights(load(file), load(goldens / "ernie4_5_moe"))


def test_head_of_gpt2_may_be_stored_twice(goldens, tmp_path):
    """Older converters wrote a copy of the embedding as the head."""
    stored = read_header(goldens / "gpt2" / "model.safetensors")["transformer.wte.weight"]

    def more(writer):
        writer.add_tensor("output.weight", np.array(stored.read()))

    got = load(write_gguf(goldens / "gpt2", tmp_path / "m.gguf", more=more))
    assert not got.spec.tie_word_embeddings
    np.testing.assert_array_equal(got.leaf("head.weight"), got.leaf("embedding.weight"))


def test_logit_scale_that_cannot_divide_is_rejected(goldens, tmp_path):
    def wrong(writer):
        del writer.kv_data[0]["minicpm.logit_scale"]
        writer.add_logit_scale(0.0)

    file = write_gguf(goldens / "minicpm", tmp_path / "model.gguf", more=wrong)
    with pytest.raises(ModelError, match=r"minicpm\.logit_scale must be above 0"):
        load(file)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        *(("gpt_neox", "qkv"), ("gpt2", "qkv")),
        *(("granitemoe", "gate_up"), ("ernie4_5_moe", "down")),
    ],
)
def test_blocks_in_another_layout_match_the_decoded_ones(name, part, goldens, tmp_path):
    file = write_gguf(goldens / name, tmp_path / "model.gguf", Q.Q8_0)
    ids, logits = golden(goldens / name)["input_ids"].tolist(), []
    for kept in ("packed", "decoded"):
        model = load(file, dtype="float32", gguf_weights=kept)
        assert any(f"{part}.scale" in name for name in model.model.names) == (kept == "packed")
        logits.append(np.stack(PagedRun(model, 3).step(ids)))
    np.testing.assert_allclose(*logits, atol=1e-4, rtol=0)


def test_rows_that_cannot_be_split_into_heads_are_rejected(goldens, tmp_path):
    def wrong(writer):
        del writer.kv_data[0]["gptneox.attention.head_count"]
        writer.add_head_count(7)

    file = write_gguf(goldens / "gpt_neox", tmp_path / "model.gguf", more=wrong)
    with pytest.raises(CheckpointError, match=r"attn_qkv.*cannot be split into .* of 7 heads"):
        load(file)


@pytest.mark.parametrize("name", STRETCHED)
def test_rope_factors_equal_the_folders(name, goldens, tmp_path):
    got = load(write_gguf(goldens / name, tmp_path / "model.gguf"))
    expected = load(goldens / name)
    assert dataclasses.replace(got.spec, rope=expected.spec.rope) == expected.spec
    assert_same_weights(got, expected)


@pytest.mark.parametrize(
    "name",
    [
        *("llama31", "gemma2", "phi3_long", "phi3_partial", "granite", "cohere", "glm4"),
        *("gpt_neox", "glm4_moe", "ernie4_5_moe", "granitemoe", "gpt2"),
    ],
)
@pytest.mark.quick_cases(1)
def test_logits_match_hugging_face(name, goldens, tmp_path):
    """Covers conversions beyond names: rows, norms, scales, rope factors."""
    want = golden(goldens / name)
    run = PagedRun(load(write_gguf(goldens / name, tmp_path / "model.gguf")), 3)
    scores = run.step(want["input_ids"].tolist())
    np.testing.assert_allclose(np.stack(scores), want["logits"], atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    "kind", [Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1], ids=lambda kind: kind.name
)
def test_rounded_matrices_match_ggml(kind, goldens, tmp_path):
    """The reference is a folder with the values from ggml's own package."""
    folder, rounded = goldens / "llama31", tmp_path / "rounded"
    rounded.mkdir()
    tensors = {}
    for name, stored in read_header(folder / "model.safetensors").items():
        values = np.array(stored.read())
        if values.ndim == 2 and values.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0:
            values = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
        tensors[name] = values
    save_file(tensors, rounded / "model.safetensors")
    (rounded / "config.json").write_text((folder / "config.json").read_text())
    file = write_gguf(folder, tmp_path / "model.gguf", kind)
    got = load(file, dtype="float32", gguf_weights="decoded")
    assert_same_weights(got, load(rounded))


@pytest.mark.parametrize(
    "kind",
    [Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K, Q.Q4_0, Q.Q8_0, Q.IQ4_NL, Q.IQ4_XS],
    ids=lambda kind: kind.name,
)
def test_blocks_of_256_match_ggml(kind, tmp_path, monkeypatch):
    """Uses random blocks, in chunks of some rows, with the rows of queries reordered."""
    monkeypatch.setattr("forge_jax.checkpoint.gguf.weights.CHUNK_ELEMENTS", 512 * 3)
    rng = np.random.default_rng(kind)
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rows, heads = 64, 4
    data = rng.integers(0, 256, (rows, 512 // per_block, block_bytes), dtype=np.uint8)
    # Small float16 numbers, because random bits may be no number.
    for at in {Q.Q2_K: (80, 82), Q.Q3_K: (108,), Q.Q6_K: (208,)}.get(kind, (0, 2)):
        if kind in (Q.Q4_0, Q.Q8_0, Q.IQ4_NL, Q.IQ4_XS) and at:
            continue
        data[..., at : at + 2] = (
            rng.uniform(0.001, 0.1, data.shape[:2]).astype(np.float16)[..., None].view(np.uint8)
        )
    data = data.reshape(rows, -1)
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_head_count(heads)
    writer.add_block_count(1)
    for name in ("attn_q", "attn_v"):
        writer.add_tensor(f"blk.0.{name}.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    weights = weights_of(read_gguf(file))
    values = gguf.quants.dequantize(data, kind)
    for name, undone in (("q", True), ("v", False)):
        weight = weights[f"model.layers.0.self_attn.{name}_proj.weight"]
        out = np.empty(weight.shape, np.float32)
        weight.read_rows(out, 0)
        np.testing.assert_array_equal(interleaved(out, heads) if undone else out, values)
        rounded = np.empty(weight.shape, ml_dtypes.bfloat16)
        weight.read_rows(rounded, 0)
        np.testing.assert_array_equal(rounded, out.astype(ml_dtypes.bfloat16))
        some = np.array([5, 0, 63, 17])  # as numbers and scales, for computations on them
        np.testing.assert_array_equal(weight.read_blocks(some).floats(), out[some])


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(Q.F32, "float32"), (Q.F16, "float16"), (Q.BF16, "bfloat16"), (Q.Q8_0, "bfloat16")],
)
def test_auto_selects_the_dtype_of_the_matrices(kind, dtype, goldens, tmp_path):
    assert read_spec(write_gguf(goldens / "llama31", tmp_path / "model.gguf", kind)).dtype == dtype


def test_gemma_is_not_computed_in_float16(goldens, tmp_path):
    assert read_spec(write_gguf(goldens / "gemma2", tmp_path / "m.gguf", Q.F16)).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("tokens", "types", "ends"),
    [
        (["<|end|>", "<|eot_id|>"], [3, 1], (2, 7, 3)),  # the last is an ordinary token
        (["<|end|>", "<|call|>"], [3, 3], (2, 7, 3, 4)),
        (["<|end|>", "<|return|>", "<|call|>"], [3, 3, 3], (2, 7, 4, 5)),  # ends a message
        (["<turn|>", "<|tool_response>"], [3, 4], (2, 7, 3, 4)),
    ],
)
def test_every_eos_token_is_read(tokens, types, ends, goldens, tmp_path):
    def more(writer):
        writer.add_eot_token_id(7)
        writer.add_token_list(["<unk>", "<s>", "</s>", *tokens])
        writer.add_token_types([2, 3, 3, *types])

    file = write_gguf(goldens / "llama31", tmp_path / "model.gguf", more=more)
    assert read_spec(file).eos_token_ids == ends


def with_gating(writer, function):
    del writer.kv_data[0]["glm4moe.expert_gating_func"]
    writer.add_expert_gating_func(function)


@pytest.mark.parametrize(
    ("name", "more", "match"),
    [
        ("qwen2", lambda w: w.add_sliding_window(16), "qwen2.attention.sliding_window is 16"),
        ("qwen3", lambda w: w.add_expert_count(8), "qwen3.expert_count"),
        ("mixtral", lambda w: w.add_expert_shared_count(1), "llama.expert_shared_count is 1"),
        ("mixtral", lambda w: w.add_expert_gating_func(GATING.SIGMOID), "expert_gating_func is 2"),
        (
            "glm4_moe",
            lambda w: with_gating(w, GATING.SOFTMAX),
            "glm4moe.expert_gating_func is 1, which is not supported; supported: 2",
        ),
        *(
            (name, lambda w: w.add_expert_gating_func(GATING.SIGMOID), match)
            for name, match in (
                ("ernie4_5_moe", "ernie4_5-moe.expert_gating_func is 2, .*; supported: 1"),
                ("gpt_oss", "gpt-oss.expert_gating_func is 2, .*; supported: 3"),
                ("qwen3_5_moe", "qwen35moe.expert_gating_func is 2, .*; supported: 1"),
            )
        ),
        *(
            (name, lambda w: w.add_expert_weights_scale(2.5), "expert_weights_scale is not supp")
            for name in ("ernie4_5_moe", "gpt_oss", "qwen3_5_moe")
        ),
        (
            "granitemoe",
            lambda w: w.add_expert_shared_feed_forward_length(32),
            "granitemoe.expert_shared_feed_forward_length is 32",
        ),
        (
            "llama2",
            lambda w: w.add_key_length(8),
            "llama.rope.dimension_count must be the head dim 8, got 16",
        ),
        (
            "llama2",
            lambda w: (
                w.add_rope_scaling_type(gguf.RopeScalingType.YARN),
                w.add_rope_scaling_yarn_log_mul(0.1),
            ),
            "llama.rope.scaling.yarn_log_multiplier is 0.1, which is not supported with YaRN",
        ),
        (
            "llama2",
            lambda w: w.add_tensor("blk.0.attn_sinks.weight", np.zeros(4, np.float32)),
            "the tensor 'blk.0.attn_sinks.weight' is not part of any supported model",
        ),
        (
            "llama2",
            lambda w: w.add_tensor(
                "blk.0.ffn_sub_norm.weight", np.zeros((1, 110), np.uint8), raw_dtype=Q.IQ3_S
            ),
            "'blk.0.ffn_sub_norm.weight' is of type IQ3_S",
        ),
    ],
)
def test_unimplemented_features_are_rejected_by_name(name, more, match, goldens, tmp_path):
    file = write_gguf(goldens / name, tmp_path / "model.gguf", more=more)
    with pytest.raises(UnsupportedModelError, match=match):
        load(file)


def test_unknown_architecture_is_rejected_with_the_known_ones(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(
        UnsupportedModelError,
        match=r"'mamba' is not supported; supported: llama, q.*\. Use the model's safetensors",
    ):
        read_spec(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("pattern", "windowed"),
    [
        (None, [True, False, True, False]),  # a default built into llama.cpp
        (3, [True, True, False, True]),
        (1, [False] * 4),
        ([True, False, False, True], [True, False, False, True]),
    ],
)
def test_gemma_windows_follow_the_file(pattern, windowed, goldens, tmp_path):
    def more(writer):
        if pattern is not None:
            writer.add_sliding_window_pattern(pattern)

    spec = read_spec(write_gguf(goldens / "gemma2", tmp_path / "model.gguf", more=more))
    assert [window is not None for window in spec.windows] == windowed


# ---- the trained model --------------------------------------------------------------------------


def test_version_1_file_gives_the_same_model(stories, stories_gguf):
    assert read_gguf(stories_gguf).version == 1
    got, expected = load(stories_gguf), load(stories)
    for name in expected.model.names:
        np.testing.assert_array_equal(got.leaf(name), expected.leaf(name))
    np.testing.assert_array_equal(got.leaf("embedding.weight"), got.leaf("head.weight"))


@pytest.mark.slow
def test_gguf_model_writes_the_same_story(stories_gguf):
    llm = LLM(str(stories_gguf), max_num_seqs=4, max_num_batched_tokens=64)
    [output] = llm.generate(
        "Once upon a time", SamplingParams(max_tokens=40, temperature=0), progress=False
    )
    assert output.outputs[0].text == (
        ", there was a little girl named Lily. She loved to play outside in the park. "
        "One day, she saw a big, red ball."
    )


@pytest.mark.parametrize("version", [2, 3])
def test_later_versions_differ_only_in_64_bit_numbers(version, goldens, tmp_path):
    file = write_gguf(goldens / "llama31", tmp_path / "model.gguf")
    data = bytearray(file.read_bytes())
    assert data[4] == 3
    data[4] = version
    file.write_bytes(data)
    assert read_gguf(file).version == version and build_model(read_spec(file)).names


# ---- where models are found ----------------------------------------------------------------------


def test_file_and_folder_with_one_file_resolve_to_the_file(stories_gguf, tmp_path):
    assert resolve(str(stories_gguf)) == stories_gguf
    assert resolve(str(stories_gguf.parent)) == stories_gguf
    (tmp_path / "config.json").touch()
    (tmp_path / "extra.gguf").touch()
    assert resolve(str(tmp_path)) == tmp_path  # a folder in Hugging Face format resolves to itself


def test_folder_with_several_files_lists_them(tmp_path):
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(
        ModelError, match=r"has 2 GGUF files: pass one of them \(a\.gguf, b\.gguf\)"
    ):
        resolve(str(tmp_path))


def test_fingerprint_follows_the_file(stories_gguf, tmp_path):
    def fingerprint(file):
        return system_fingerprint(file, jax.devices()[0], {})

    other = tmp_path / stories_gguf.name
    data = bytearray(stories_gguf.read_bytes())
    other.write_bytes(data)
    assert fingerprint(other) == fingerprint(stories_gguf)
    data[-1] ^= 1
    other.write_bytes(data)
    assert fingerprint(other) != fingerprint(stories_gguf)


def test_llama_4_file_with_a_window_is_rejected(goldens, tmp_path):
    """llama.cpp would rotate and attend to all keys in every layer."""
    file = write_gguf(
        goldens / "llama4", tmp_path / "m.gguf", more=lambda writer: writer.add_sliding_window(0)
    )
    with pytest.raises(UnsupportedModelError, match=r"llama4\.attention\.sliding_window is not"):
        read_spec(file)
