"""Published `config.json` files resolve to the sizes that transformers reads, or to a named error.

`tests/fixtures/published_configs/README.md` lists their sources.
"""

import json
import math
import shutil
import tomllib
from pathlib import Path

import pytest

from forge_jax.checkpoint.model_spec import read_spec
from forge_jax.errors import ModelError, UnsupportedModelError
from forge_jax.models.families import ARCHITECTURES
from forge_jax.models.registry import build_model, find_architecture

PUBLISHED = Path(__file__).parent.parent / "fixtures" / "published_configs"
INDEX = tomllib.loads((PUBLISHED / "index.toml").read_text())
EXPECTED = json.loads((PUBLISHED / "expected.json").read_text())
CONFIGS = {name: json.loads((PUBLISHED / f"{name}.json").read_text()) for name in INDEX}


def is_supported(name: str) -> bool:
    return CONFIGS[name].get("architectures", [""])[0] in ARCHITECTURES


@pytest.fixture
def folder(tmp_path):
    """Return a function that makes a model folder with the configuration of that name."""

    def make(name: str) -> Path:
        shutil.copy(PUBLISHED / f"{name}.json", tmp_path / "config.json")
        return tmp_path

    return make


def test_index_lists_every_configuration():
    files = {file.stem for file in PUBLISHED.glob("*.json")} - {"expected"}
    assert files == INDEX.keys()
    assert {name for name in INDEX if "refused" not in INDEX[name]} == EXPECTED.keys()


@pytest.mark.parametrize(
    "name", [n for n in INDEX if INDEX[n].keys().isdisjoint(["refused", "either"])]
)
def test_published_configuration_has_the_sizes_of_transformers(name, folder):
    spec = read_spec(folder(name))
    build_model(spec)
    weights = find_architecture(spec.architecture).weights(spec)
    shapes = {part.name: part.shape for parts in weights.values() for part in parts}
    found = {field: getattr(spec, field, None) for field in EXPECTED[name]} | {
        "parameters": sum(map(math.prod, shapes.values())),
        "rope_theta": spec.rope.theta,
        "layers_with_window": sum(window is not None for window in spec.windows),
    }
    assert found == EXPECTED[name]
    assert (spec.quantization is not None) == ("quantization_config" in CONFIGS[name])


@pytest.mark.parametrize("name", [name for name in INDEX if "refused" in INDEX[name]])
def test_published_configuration_is_refused_by_name(name, folder):
    with pytest.raises(ModelError) as caught:
        read_spec(folder(name))
    assert INDEX[name]["refused"] in str(caught.value)


@pytest.mark.parametrize("name", [name for name in INDEX if "either" in INDEX[name]])
def test_other_published_configuration_is_refused_or_has_the_right_sizes(name, folder):
    if is_supported(name):
        spec = read_spec(folder(name))
        assert {field: getattr(spec, field) for field in EXPECTED[name]} == EXPECTED[name]
    else:
        with pytest.raises(UnsupportedModelError, match=r"^architecture .* is not supported"):
            read_spec(folder(name))


def test_changed_configuration_has_other_sizes(folder):
    """The comparison above detects an ignored field."""
    file = folder("gemma_2_2b_it") / "config.json"
    config = json.loads(file.read_text())
    for changes in ({"intermediate_size": 9208}, {"head_dim": 128}, {"vocab_size": 256001}):
        file.write_text(json.dumps(config | changes))
        spec = read_spec(file.parent)
        weights = find_architecture(spec.architecture).weights(spec)
        shapes = {part.name: part.shape for parts in weights.values() for part in parts}
        assert sum(map(math.prod, shapes.values())) != EXPECTED["gemma_2_2b_it"]["parameters"]


@pytest.mark.parametrize("algorithm", ["FP8", "NVFP4"])
def test_model_optimizer_file_is_refused_by_name(folder, algorithm):
    """NVIDIA's Model Optimizer describes the quantization outside of config.json."""
    file = folder("llama_3_3_70b_instruct") / "hf_quant_config.json"
    file.write_text(json.dumps({"quantization": {"quant_algo": None}}))
    assert read_spec(file.parent).quantization is None
    section = {"quant_algo": algorithm, "exclude_modules": ["lm_head"]}
    file.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": section}))
    with pytest.raises(
        UnsupportedModelError, match=f"hf_quant_config.json: quant_algo '{algorithm}'"
    ):
        read_spec(file.parent)
