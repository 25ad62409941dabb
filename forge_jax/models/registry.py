"""From a configuration to the spec of a model, and from a spec to a model without weights."""

from __future__ import annotations

import dataclasses

from forge_jax.config.hf_config import HFConfig
from forge_jax.errors import ModelError, UnsupportedModelError
from forge_jax.host.files import short_repr
from forge_jax.models.decoder import Decoder, Model, WeightForms
from forge_jax.models.families import ARCHITECTURES, Architecture
from forge_jax.models.spec import DTYPES, ModelSpec
from forge_jax.weights.blocks import block_forms
from forge_jax.weights.forms import cut_forms, quantized_forms
from forge_jax.weights.rounding import rounded_forms


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
    spec: ModelSpec, dtype: str = "auto", forms: WeightForms | None = None, shards: int = 1
) -> Model:
    """The model of a spec, without weights; `dtype` is of weights and activations.

    `forms` says how matrices are kept: plain by default; packed ones are for bfloat16. Those
    that the checkpoint has quantised, or in blocks, stay so. With `shards` it is one of so many
    that share it (`forge_jax.weights.partition.check_shards`).

    Raises:
      ModelError: no such dtype.
      UnsupportedModelError: matrices are quantised in a way that is not implemented.
      ConfigError: they are in groups that cannot be cut for so many shards.
    """
    forms = forms or WeightForms()
    if forms.rounded is not None:
        weights = find_architecture(spec.architecture).weights(spec)
        quantized = cut_forms(rounded_forms(weights, forms.rounded), spec, weights, shards)
        forms = dataclasses.replace(forms, quantized=quantized)
    elif spec.quantization is not None:
        weights = find_architecture(spec.architecture).weights(spec)
        kernels = forms.layers is not None
        quantized = quantized_forms(spec, weights, kernels=kernels, shards=shards)
        forms = dataclasses.replace(forms, quantized=quantized)
    elif spec.block_types is not None:
        assert forms.layers in (None, "bf16"), "matrices in blocks that are rounded anew"
        weights = find_architecture(spec.architecture).weights(spec)
        blocks = block_forms(spec, weights, forms.layers, shards, forms.block_rows)
        forms = dataclasses.replace(forms, blocks=blocks)
    return Model.build(Decoder, spec, resolve_dtype(spec, dtype), forms, shards)


def decoded(spec: ModelSpec) -> ModelSpec:
    """The model with the matrices of a GGUF file as floats, in the type of the model."""
    return dataclasses.replace(spec, block_types=None)


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
