"""From a configuration to the spec of a model, and from a spec to a model without weights."""

from __future__ import annotations

import dataclasses

from forge_jax.config.hf_config import HFConfig
from forge_jax.errors import ModelError, UnsupportedModelError
from forge_jax.host.files import short_repr
from forge_jax.models.decoder import Model
from forge_jax.models.families import ARCHITECTURES, Architecture
from forge_jax.models.spec import DTYPES, ModelSpec
from forge_jax.models.weight_map import WeightMap
from forge_jax.weights.formats import PLAIN, WeightFormat, WeightFormats
from forge_jax.weights.ggml_formats import ggml_formats
from forge_jax.weights.quantized import cut_formats, expert_leaves, quantized_formats
from forge_jax.weights.rounding import rounded_formats


def find_architecture(name: str) -> Architecture:
    """The architecture that `config.json` calls `name`; UnsupportedModelError lists the known."""
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"architecture {short_repr(name)} is not supported; supported: "
            f"{', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


def spec_of(config: HFConfig, generation: HFConfig) -> ModelSpec:
    """The spec that `config.json` and `generation_config.json` describe.

    Raises:
      UnsupportedModelError: an architecture or option that is not implemented, by name.
      ModelError: a field is missing or wrong.
    """
    names = config.values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise config.error("architectures", "a list of one name")
    return find_architecture(names[0]).read(config, generation)


def build_model(
    spec: ModelSpec, dtype: str = "auto", formats: WeightFormats | None = None, shards: int = 1
) -> Model:
    """The model of a spec, without weights; `dtype` is of weights and activations.

    `formats` says how matrices are stored: plain by default; packed ones are for bfloat16. Those
    that the checkpoint has quantised, or in ggml blocks, stay so. With `shards` it is one of so
    many that share it (`forge_jax.weights.partition.check_shards`).

    Raises:
      ModelError: no such dtype.
      UnsupportedModelError: matrices are quantised in a way that is not implemented.
      ConfigError: they are in groups that cannot be cut for so many shards.
    """
    architecture, formats = find_architecture(spec.architecture), formats or WeightFormats()
    leaves = _leaf_formats(spec, architecture.weights(spec), formats, shards)
    for both in expert_leaves(spec):  # packed are both or none
        if not leaves.keys().isdisjoint(both):
            leaves = dict.fromkeys(both, PLAIN) | leaves
    formats = dataclasses.replace(formats, leaves=leaves)
    return Model.build(architecture.decoder, spec, resolve_dtype(spec, dtype), formats, shards)


def _leaf_formats(
    spec: ModelSpec, weights: WeightMap, formats: WeightFormats, shards: int
) -> dict[str, WeightFormat]:
    """The formats of the matrices that are not stored as floats."""
    if formats.rounded is not None:
        rounded = rounded_formats(weights, formats.rounded)
        return {**cut_formats(rounded, spec, weights, shards)}
    if spec.quantization is not None:
        kernels = formats.layers is not None
        return {**quantized_formats(spec, weights, kernels=kernels, shards=shards)}
    if spec.ggml_types is not None:
        assert formats.layers in (None, "bf16"), "matrices in blocks that are rounded again"
        return ggml_formats(spec, weights, formats.layers, shards, formats.ggml_activations)
    return {}


def decoded(spec: ModelSpec) -> ModelSpec:
    """The model with the matrices of a GGUF file as floats, in the type of the model."""
    return dataclasses.replace(spec, ggml_types=None)


def resolve_dtype(spec: ModelSpec, dtype: str) -> str:
    """The name of the type that `dtype` means for this model: "auto" is the checkpoint's own.

    Raises:
      ModelError: no such dtype.
    """
    if dtype == "auto":
        dtype = spec.dtype
    if dtype not in DTYPES:
        raise ModelError(f"dtype must be auto, {', '.join(DTYPES)}, not {dtype!r}")
    return dtype
