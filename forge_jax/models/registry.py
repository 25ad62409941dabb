"""Models by name: from a configuration to a spec, and from a spec to a model without weights."""

from __future__ import annotations

import dataclasses

from forge_jax.config.hf_config import HFConfig
from forge_jax.errors import ConfigError, ModelError
from forge_jax.models.decoder import Model
from forge_jax.models.plugins import find_architecture
from forge_jax.models.spec import DTYPES, ModelSpec
from forge_jax.models.weight_map import WeightMap
from forge_jax.weights.formats import PLAIN, WeightFormat, WeightFormats
from forge_jax.weights.ggml_formats import fused_format, ggml_formats, unpacked_experts
from forge_jax.weights.quantized import (
    cut_formats,
    expert_leaves,
    quantized_formats,
)
from forge_jax.weights.rounding import rounded_formats


def spec_of(config: HFConfig, generation: HFConfig) -> ModelSpec:
    """Return the spec that `config.json` and `generation_config.json` describe.

    Raises:
      UnsupportedModelError: an architecture or option is not implemented; the message names it.
      ModelError: a field is missing or wrong.
    """
    names = config.values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise config.error("architectures", "a list of one name")
    return find_architecture(names[0]).read(config, generation)


def build_model(
    spec: ModelSpec, dtype: str = "auto", formats: WeightFormats | None = None, shards: int = 1
) -> Model:
    """Return the model of a spec, without weights.

    Args:
      spec: the model.
      dtype: type of weights and activations; "auto" is the checkpoint's.
      formats: how matrices are stored; plain by default, and packed only for bfloat16. Matrices
        that the checkpoint quantizes or has in GGML blocks keep their format.
      shards: if above 1, the result is one shard (`forge_jax.weights.partition.check_shards`).

    Raises:
      ModelError: the dtype does not exist.
      UnsupportedModelError: the quantization is not implemented.
      ConfigError: the quantization groups cannot be split into so many shards, or the architecture
        supports no shards or adapters.
    """
    architecture, formats = find_architecture(spec.architecture), formats or WeightFormats()
    if shards > 1 and not architecture.tensor_parallel:
        raise ConfigError(
            f"--tensor-parallel is not supported for {spec.architecture}: use one device"
        )
    if formats.lora and not architecture.lora:
        raise ConfigError(
            f"LoRA adapters are not supported for {spec.architecture}: remove --lora and "
            "--max-loras, and serve a model that the adapter is merged into"
        )
    weights = architecture.layouts(spec)[0](spec)
    leaves = _leaf_formats(spec, weights, formats, shards)
    if not architecture.plain_swiglu:
        leaves = _other_experts(spec, weights, formats) | unpacked_experts(spec, leaves)
    for both in expert_leaves(spec):  # either both are packed or neither
        if not leaves.keys().isdisjoint(both):
            leaves = dict.fromkeys(both, PLAIN) | leaves
    if formats.fused:
        leaves = {leaf: fused_format(format, formats.fused) for leaf, format in leaves.items()}
    formats = dataclasses.replace(formats, leaves=leaves)
    return Model.build(architecture.decoder, spec, resolve_dtype(spec, dtype), formats, shards)


def _leaf_formats(
    spec: ModelSpec, weights: WeightMap, formats: WeightFormats, shards: int
) -> dict[str, WeightFormat]:
    """Return the formats of the matrices that are not stored as floats."""
    if formats.rounded is not None:
        rounded = rounded_formats(weights, formats.rounded)
        return {**cut_formats(rounded, spec, weights, shards)}
    found: dict[str, WeightFormat] = {}
    if spec.quantization is not None:
        kernels = formats.layers is not None
        found |= quantized_formats(spec, weights, kernels=kernels, shards=shards)
    if spec.ggml_types is not None:
        assert formats.layers in (None, "bf16"), "matrices in blocks cannot be rounded again"
        found |= ggml_formats(spec, weights, formats.layers, shards, formats.ggml_activations)
    return found


def _other_experts(
    spec: ModelSpec, weights: WeightMap, formats: WeightFormats
) -> dict[str, WeightFormat]:
    """Return the formats of experts that plain XLA computes although the rest is packed."""
    leaves = [leaf for both in expert_leaves(spec) for leaf in both]
    if formats.layers in ("int8", "int4"):
        return {**rounded_formats({leaf: weights[leaf] for leaf in leaves}, formats.layers)}
    return dict.fromkeys(leaves, PLAIN)


def decoded(spec: ModelSpec) -> ModelSpec:
    """Return the spec with a GGUF file's matrices decoded to floats in the model's type."""
    return dataclasses.replace(spec, ggml_types=None)


def resolve_dtype(spec: ModelSpec, dtype: str) -> str:
    """Return the type that `dtype` selects for this model; "auto" is the checkpoint's own.

    Raises:
      ModelError: the dtype does not exist.
    """
    if dtype == "auto":
        dtype = spec.dtype
    if dtype not in DTYPES:
        raise ModelError(f"dtype must be auto, {', '.join(DTYPES)}, got {dtype!r}")
    return dtype
