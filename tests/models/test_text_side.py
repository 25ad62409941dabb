"""The text models of multimodal checkpoints."""

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from lora_files import projections, write_adapter
from paged import PagedRun
from safetensors.numpy import load_file, save_file

import forge_jax
from forge_jax.checkpoint.adapter import read_adapter
from forge_jax.checkpoint.model_spec import read_spec
from forge_jax.config.hf_config import HFConfig
from forge_jax.errors import CheckpointError, ModelError, UnsupportedModelError
from forge_jax.models.families import ARCHITECTURES
from forge_jax.models.lora import LoraShape
from forge_jax.text.template_files import folder_templates
from forge_jax.weights.names import multimodal_names, text_name

GOLDENS = Path(__file__).parent.parent / "fixtures" / "goldens"
MODELS = (
    *("gemma3_vision", "gemma4_vision", "gemma4_unified", "llama4_vision", "mistral3"),
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
)
# The prefixes of layers and head: a text checkpoint's, transformers 4's and transformers 5's.
LAYOUTS = (
    ("model.", "lm_head."),
    ("language_model.model.", "language_model.lm_head."),
    ("model.language_model.", "lm_head."),
)


@pytest.fixture
def copy_of(tmp_path):
    """Return a function that copies a golden model, with other fields or tensors."""

    def copy(name, change=lambda config: None, tensors=lambda tensors: tensors):
        folder = tmp_path / name
        shutil.copytree(GOLDENS / name, folder)
        config = json.loads((folder / "config.json").read_text())
        change(config)
        (folder / "config.json").write_text(json.dumps(config))
        stored = load_file(folder / "model.safetensors")
        save_file(tensors(stored), folder / "model.safetensors")
        return folder

    return copy


def load(folder):
    return forge_jax.load(str(folder), progress=False)


def assert_same_leaves(got, want):
    assert got.model.names == want.model.names
    for name, ours, theirs in zip(got.model.names, got.leaves, want.leaves, strict=True):
        np.testing.assert_array_equal(ours, theirs, err_msg=name)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["gemma3_vision", "qwen2_vl"])
def test_all_layouts_of_tensor_names_load(name, layout, copy_of, caplog):
    def renamed(tensors):
        found = {}
        for stored, values in tensors.items():
            ours = text_name(stored)
            if ours is None:
                found[f"model.visual.{stored}"] = values
            else:
                start = "lm_head." if ours.startswith("lm_head.") else "model."
                prefix = layout[1] if start == "lm_head." else layout[0]
                found[prefix + ours.removeprefix(start)] = values
        return found

    with caplog.at_level(logging.INFO, "forge_jax.checkpoint.text_side"):
        got = load(copy_of(name, tensors=renamed))
    assert_same_leaves(got, load(GOLDENS / name))
    (line,) = {r.getMessage() for r in caplog.records if r.name.endswith("text_side")} - {
        r.getMessage() for r in caplog.records if str(GOLDENS) in r.getMessage()
    }
    count = {"gemma3_vision": 34, "qwen2_vl": 19}[name]
    assert f": {count} tensors (" in line and "images, video and audio" in line


def test_two_tensors_with_the_same_name_are_rejected(copy_of):
    def doubled(tensors):
        return {**tensors, "model.language_model.norm.weight": tensors["model.norm.weight"]}

    folder = copy_of("qwen2_vl", tensors=doubled)
    with pytest.raises(CheckpointError, match=r"are both 'model\.norm\.weight'.*: remove one"):
        load(folder)


def test_transposed_experts_load(copy_of):
    def transposed(tensors):
        return {
            name: np.ascontiguousarray(values.swapaxes(1, 2)) if ".experts." in name else values
            for name, values in tensors.items()
        }

    got = load(copy_of("qwen3_vl_moe", tensors=transposed))
    assert_same_leaves(got, load(GOLDENS / "qwen3_vl_moe"))


def test_fields_of_the_text_model_may_be_flat(copy_of):
    def flat(config):
        text = config.pop("text_config")
        section = text.pop("rope_parameters")
        config |= {key: value for key, value in text.items() if key != "model_type"}
        config["rope_theta"] = section["rope_theta"]
        config["rope_scaling"] = {"type": "mrope", "mrope_section": section["mrope_section"]}

    assert read_spec(copy_of("qwen2_vl", flat)) == read_spec(GOLDENS / "qwen2_vl")


@pytest.mark.parametrize(
    "section",
    [
        {"type": "mrope", "rope_type": "default", "mrope_section": [2, 3, 3]},
        {"type": "default", "rope_type": "default", "mrope_section": [2, 3, 3]},
        {"rope_type": "mrope", "mrope_section": [2, 3, 3]},
    ],
)
def test_mrope_is_the_ordinary_rotation_of_texts(section, copy_of):
    def change(config):
        config["text_config"]["rope_parameters"] = {**section, "rope_theta": 10000.0}

    assert read_spec(copy_of("qwen2_vl", change)) == read_spec(GOLDENS / "qwen2_vl")


def test_fields_of_the_whole_model_come_first(copy_of):
    def change(config):
        config |= {"torch_dtype": "bfloat16", "eos_token_id": [5, 106]}
        config["text_config"]["dtype"] = "float16"
        del config["dtype"]

    spec = read_spec(copy_of("gemma3_vision", change))
    assert (spec.dtype, spec.eos_token_ids) == ("bfloat16", (5, 106))
    assert read_spec(GOLDENS / "gemma3_vision").eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("name", "whole", "text", "tied"),
    [
        ("gemma3_vision", None, None, True),
        ("mistral3", None, None, False),
        ("mistral3", None, True, True),
        ("qwen3_vl", False, True, False),
        ("qwen3_vl", True, False, True),
        ("qwen2_vl", False, True, True),
    ],
)
def test_either_section_may_tie_the_head(name, whole, text, tied, copy_of):
    def change(config):
        for section, value in ((config, whole), (config["text_config"], text)):
            section.pop("tie_word_embeddings", None)
            if value is not None:
                section["tie_word_embeddings"] = value

    assert read_spec(copy_of(name, change)).tie_word_embeddings == tied


def test_text_model_of_another_family_has_its_defaults(copy_of):
    def other(config):
        text = {"model_type": "ministral3", "vocab_size": 163, "num_hidden_layers": 2}
        config["text_config"] = text | {"tie_word_embeddings": False}

    spec = read_spec(copy_of("mistral3", other))
    own = ARCHITECTURES["Ministral3ForCausalLM"].read(
        HFConfig({"vocab_size": 163, "num_hidden_layers": 2}), HFConfig({})
    )
    assert spec == replace(own, architecture="Mistral3ForConditionalGeneration", dtype=spec.dtype)
    assert (spec.query_growth, spec.head_dim, spec.max_context) == (0.1, 128, 262144)


def test_other_text_models_are_rejected_by_name(copy_of):
    def other(config):
        config["text_config"]["model_type"] = "mistral4"

    with pytest.raises(
        UnsupportedModelError,
        match=r"'mistral4' is not supported in Mistral3.*; supported: mistral, ministral3$",
    ):
        read_spec(copy_of("mistral3", other))


def test_missing_section_is_named_in_the_error(copy_of):
    with pytest.raises(ModelError, match="text_config must be an object with the fields of the"):
        read_spec(copy_of("qwen3_vl", lambda config: config.pop("text_config")))


def _fp8(ignored):
    return {
        **{"quant_method": "compressed-tensors", "format": "float-quantized"},
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    **{"num_bits": 8, "type": "float", "strategy": "channel"},
                    **{"symmetric": True, "dynamic": False},
                },
                "input_activations": {
                    **{"num_bits": 8, "type": "float", "strategy": "token"},
                    **{"symmetric": True, "dynamic": True},
                },
            }
        },
        "ignore": ignored,
    }


@pytest.mark.parametrize(
    "ignored",
    [
        ["language_model.model.layers.1.mlp.down_proj", "language_model.lm_head"],
        ["model.language_model.layers.1.mlp.down_proj", "lm_head"],
        ["model.layers.1.mlp.down_proj", "re:.*lm_head"],
        ["re:language_model.*layers.1.mlp.down_proj", "re:vision_tower.*", "lm_head"],
    ],
)
def test_ignored_modules_may_have_the_prefixes_of_any_layout(ignored, copy_of):
    def change(config):
        config["quantization_config"] = _fp8(ignored)

    quantization = read_spec(copy_of("mistral3", change)).quantization
    assert quantization.scheme_of("model.layers.0.mlp.down_proj") is not None
    assert quantization.scheme_of("model.layers.1.mlp.down_proj") is None
    assert quantization.scheme_of("model.layers.1.mlp.up_proj") is not None
    assert quantization.scheme_of("lm_head") is None


@pytest.mark.quick_cases(1)
def test_quantized_text_model_computes_the_logits_of_its_dequantized_weights(copy_of):
    scales = {}

    def quantized(tensors):
        found = {}
        for name, values in tensors.items():
            module = name.removesuffix(".weight")
            if not module.endswith("_proj") or "language_model.model." not in module:
                found[name] = values
                continue
            scale = np.abs(values).max(axis=1, keepdims=True) / 127
            found[name] = np.round(values / scale).astype(np.int8)
            found[f"{module}.weight_scale"] = scale.astype(np.float32)
            scales[name] = found[name] * scale
        return found

    def change(config):
        section = _fp8(
            ["re:vision_tower.*", "re:multi_modal_projector.*", "language_model.lm_head"]
        )
        section["format"] = "int-quantized"
        group = section["config_groups"]["group_0"]
        group["weights"]["type"] = "int"
        group["input_activations"] = None
        config["quantization_config"] = section

    got = load(copy_of("mistral3", change, quantized))
    assert any("int8" in name for name in got.model.formats)
    plain = GOLDENS / "mistral3"
    ids = np.random.default_rng(0).integers(3, 150, (1, 20)).tolist()
    (found,) = PagedRun(got, 1).step(ids)
    (want,) = PagedRun(load(plain), 1).step(ids)
    error = np.linalg.norm(found - want) / np.linalg.norm(want)
    assert 1e-4 < error < 0.03


@pytest.mark.quick_cases(1)
def test_adapters_of_the_multimodal_model_load(tmp_path):
    model = load(GOLDENS / "qwen3_vl").model
    shape = LoraShape(rank=4, places=2)
    names = [name for name in projections(GOLDENS / "qwen3_vl") if "language_model" in name]
    folder = write_adapter(tmp_path / "new", GOLDENS / "qwen3_vl", seed=1, modules=names)
    want = read_adapter(folder, model, shape)
    for layout, _ in LAYOUTS:
        tensors = {
            name.replace("model.language_model.", layout, 1): values
            for name, values in load_file(folder / "adapter_model.safetensors").items()
        }
        other = tmp_path / f"in {layout}"
        shutil.copytree(folder, other)
        save_file(tensors, other / "adapter_model.safetensors")
        found = read_adapter(other, model, shape)
        for ours, theirs in zip(found.arrays, want.arrays, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    assert any(array.any() for array in want.arrays)
    vision = "model.visual.blocks.0.mlp.linear_fc1"
    folder = write_adapter(tmp_path / "v", GOLDENS / "qwen3_vl", seed=1, modules=[vision])
    with pytest.raises(UnsupportedModelError, match=f"{vision}.lora_A.weight' is not supported"):
        read_adapter(folder, model, shape)


def test_names_of_modules_have_a_spelling_for_each_layout():
    assert multimodal_names("lm_head") == ("language_model.lm_head", "lm_head")
    assert set(multimodal_names("model.layers.0.mlp.up_proj")) == {
        f"{prefix}layers.0.mlp.up_proj" for prefix, _ in LAYOUTS
    }
    assert text_name("model.visual.blocks.0.norm1.weight") is None
    assert text_name("vision_tower.embeddings.weight") is None


def test_template_of_a_processor_is_the_last_choice(tmp_path):
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "processor"}))
    assert folder_templates(tmp_path) == {"default": "processor"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "tokenizer"}))
    assert folder_templates(tmp_path) == {"default": "tokenizer"}
