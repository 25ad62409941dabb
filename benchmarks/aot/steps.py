"""Steps of Llama 3 models, compiled with the engine's own function; import `deviceless` first."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.aot.deviceless import Compiler, Program
from forge_jax.config.hf_config import HFConfig
from forge_jax.grammar.masks import mask_width
from forge_jax.models import build_model
from forge_jax.models.kv import element_dtype
from forge_jax.models.spec import ModelSpec, RopeSpec
from forge_jax.models.stages import Stage
from forge_jax.step.inputs import StepShape
from forge_jax.step.kv_cache import KVShape, kv_shape
from forge_jax.step.links import STAGE, sender
from forge_jax.step.mesh import TensorMesh, cache_layouts
from forge_jax.step.options import CompilerOptions
from forge_jax.step.placement import Placement
from forge_jax.step.slots import slots_shape
from forge_jax.step.step import make_step
from forge_jax.weights.formats import WeightFormats
from forge_jax.weights.ggml_types import TYPES, GGMLTypes
from forge_jax.weights.methods import read_quantization
from forge_jax.weights.partition import shard_spec
from forge_kernels.attention.shapes import (
    LLAMA_3_1_8B,
    LLAMA_3_1_70B,
    LLAMA_3_2_1B,
    AttentionShape,
)

BLOCKS, BLOCK_SIZE, MAX_BLOCKS, SEQS = 2048, 64, 128, 64
QUANTIZED: dict[str, dict[str, Any]] = {
    "fp8 in blocks": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "fp8": {"quant_method": "fp8"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128},
}
Q4_K_M = "Q4_K_M"
GPU_FORMATS = WeightFormats(fused=frozenset(("int8", "int4", "fp8")))


@dataclass(frozen=True)
class Llama:
    """The sizes of a Llama 3 model."""

    hidden: int
    intermediate: int
    attention: AttentionShape
    tied: bool = False


LLAMAS = {
    "llama-3.2-1b": Llama(2048, 8192, LLAMA_3_2_1B, tied=True),
    "llama-3.1-8b": Llama(4096, 14336, LLAMA_3_1_8B),
    "llama-3.1-70b": Llama(8192, 28672, LLAMA_3_1_70B),
}


@dataclass(frozen=True, kw_only=True)
class Cache:
    """The cache and the slots of a compiled step.

    Attributes:
      dtype: as in `--kv-dtype`.
      max_blocks: the most blocks of one sequence.
    """

    dtype: str = "auto"
    blocks: int = BLOCKS
    max_blocks: int = MAX_BLOCKS
    seqs: int = SEQS

    def shape(self, spec: ModelSpec) -> KVShape:
        return kv_shape(
            spec,
            num_blocks=self.blocks,
            block_size=BLOCK_SIZE,
            dtype=element_dtype(self.dtype, spec.dtype),
            platform="gpu",
        )

    def layer_bytes(self, spec: ModelSpec) -> int:
        return self.shape(spec).total_bytes // spec.num_hidden_layers


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """The choices of a compiled step, with the engine's defaults.

    Attributes:
      compiler: XLA's options.
      donated: arguments whose memory is reused: the cache and the slots.
      formats: formats of the weights; `fused` must be that of the GPU.
      uniform: as in `--deterministic`.
    """

    compiler: CompilerOptions = field(default_factory=dict)
    donated: tuple[int, ...] = (1, 2)
    cache: Cache = Cache()
    formats: WeightFormats = GPU_FORMATS
    uniform: bool = False


def llama(
    layers: int | None = None, quantized: str | None = None, name: str = "llama-3.1-8b"
) -> ModelSpec:
    """Return one of LLAMAS.

    Args:
      layers: default: all.
      quantized: one of QUANTIZED, Q4_K_M, or one of TYPES for every matrix.
      name: one of LLAMAS.
    """
    model = LLAMAS[name]
    attention, layers = model.attention, layers or model.attention.layers
    types = quantized if quantized in (Q4_K_M, *TYPES) else None
    return ModelSpec(
        architecture="LlamaForCausalLM",
        vocab_size=128256,
        hidden_size=model.hidden,
        intermediate_size=model.intermediate,
        num_hidden_layers=layers,
        num_attention_heads=attention.heads,
        num_key_value_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        max_position_embeddings=8192,
        norm_eps=1e-5,
        rope=RopeSpec(theta=500000.0),
        tie_word_embeddings=model.tied,
        dtype="bfloat16",
        bos_token_id=128000,
        eos_token_ids=(128001,),
        quantization=read_quantization(
            HFConfig({"quantization_config": QUANTIZED.get(quantized or "")})
        ),
        ggml_types=None if types is None else gguf_types(types, layers, tied=model.tied),
    )


def gguf_types(kind: str, layers: int, *, tied: bool = False) -> GGMLTypes:
    """Return the types of llama.cpp's Q4_K_M, or `kind` for every matrix.

    Every second layer of Q4_K_M has values and down projections in Q6_K. llama.cpp gives as many
    layers these types, at other positions.
    """
    most, finer = ("Q4_K", "Q6_K") if kind == Q4_K_M else (kind, kind)
    named: dict[str, str] = {}
    for layer in range(layers):
        of_layer = dict.fromkeys(("self_attn.q", "self_attn.k", "self_attn.o"), most)
        of_layer |= dict.fromkeys(("mlp.gate", "mlp.up"), most)
        of_layer |= dict.fromkeys(("self_attn.v", "mlp.down"), most if layer % 2 else finer)
        named |= {f"model.layers.{layer}.{name}_proj.weight": t for name, t in of_layer.items()}
    named["model.embed_tokens.weight"] = finer if tied else most
    if not tied:
        named["lm_head.weight"] = finer
    return GGMLTypes(tuple(named.items()))


def compile_step(
    compiler: Compiler, shape: StepShape, spec: ModelSpec, options: StepOptions
) -> Program:
    """Compile a step for one device."""
    model = build_model(spec, formats=options.formats)
    step = make_step(model, shape, BLOCK_SIZE, implementation="mosaic", uniform=options.uniform)
    kv = options.cache.shape(spec).layers
    return _compile(compiler, step, (model.leaves, kv), shape, spec, options)


def compile_shared_step(
    compiler: Compiler, shape: StepShape, spec: ModelSpec, options: StepOptions
) -> Program:
    """Compile a step that all devices of `compiler`, whose axis is `AXIS`, share."""
    mesh = TensorMesh.of(compiler.devices)
    model = build_model(spec, formats=options.formats, shards=mesh.shards)
    step = make_step(model, shape, BLOCK_SIZE, implementation="mosaic", uniform=options.uniform)
    shard = options.cache.shape(shard_spec(spec, mesh.shards))
    kv = Placement(mesh.devices[0], mesh).kv(model, shard)
    arrays = (mesh.leaves(model), kv)
    return _compile(compiler, mesh.shard_step(model, step), arrays, shape, spec, options)


def compile_stage(
    compiler: Compiler, shape: StepShape, spec: ModelSpec, options: StepOptions, stage: Stage
) -> Program:
    """Compile the step of a stage that all devices of `compiler` share."""
    mesh = TensorMesh.of(compiler.devices)
    whole = build_model(spec, formats=options.formats, shards=mesh.shards)
    model = whole.of_stage(stage)
    step = make_step(model, shape, BLOCK_SIZE, implementation="mosaic", uniform=options.uniform)
    shard = replace(
        options.cache.shape(shard_spec(spec, mesh.shards)), layouts=cache_layouts(model)
    )
    place = Placement(mesh.devices[0], mesh)
    arrays = (mesh.leaves(model), place.kv(model, shard))
    stream = jax.ShapeDtypeStruct((shape.num_tokens, spec.hidden_size), model.dtype)
    more = () if stage.is_first else (None, None, place.put(stream))
    return _compile(compiler, mesh.shard_step(model, step), arrays, shape, spec, options, *more)


def compile_link(compiler: Compiler, shape: StepShape, spec: ModelSpec) -> Program:
    """Compile the transfer of a residual stream between two devices, whose axis is `STAGE`."""
    mesh = Mesh(np.array(compiler.devices), (STAGE,))
    ends = jax.ShapeDtypeStruct(
        (2 * shape.num_tokens, spec.hidden_size),
        jnp.dtype(spec.dtype),
        sharding=NamedSharding(mesh, PartitionSpec(STAGE)),
    )
    return compiler(lambda stream: sender(mesh)(stream), ends)  # made while `jax` is replaced


def _compile(
    compiler: Compiler,
    step: Any,
    arrays: tuple[Any, Any],
    shape: StepShape,
    spec: ModelSpec,
    options: StepOptions,
    *more: Any,
) -> Program:
    cache = options.cache
    return compiler(
        step,
        *arrays,
        slots_shape(cache.seqs, cache.max_blocks, spec.vocab_size),
        jax.ShapeDtypeStruct((shape.width,), jnp.int32),
        jax.ShapeDtypeStruct((shape.num_rows, mask_width(spec.vocab_size)), jnp.int32),
        *more,
        donate_argnums=options.donated,
        options=options.compiler,
    )
