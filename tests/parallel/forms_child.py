"""Compares quantized and converted models, and drafts verified by rejection.

`test_parallel_forms.py` runs it, like `child.py`.
"""

import dataclasses
import gc
import json
import os
import sys
import tempfile
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import quant_writer as writer
import test_quantized as quantized
import test_quantized_experts as quantized_experts
from child import (
    GOLDENS,
    PROMPTS,
    REQUESTS,
    SHARDS,
    collectives,
    compare,
    mesh_of,
    run,
    run_on_one,
    short_stories,
    spec_of,
)
from flax import nnx
from gguf_zoo import LAYERS, write_zoo
from paged import rows_alone

from forge_jax import LLM
from forge_jax.checkpoint.hub import resolve
from forge_jax.checkpoint.load import load_weights
from forge_jax.checkpoint.model_spec import read_spec
from forge_jax.config import EngineConfig
from forge_jax.engine.builder import choose_device, choose_kernels, read_converted
from forge_jax.errors import ForgeError
from forge_jax.models import build_model
from forge_jax.step.mesh import leaf_spec
from forge_jax.testing import core_of, drafts_always_pay
from forge_jax.tools.convert import convert
from forge_jax.weights.formats import WeightFormats
from forge_kernels import cpu
from forge_kernels.linear import QuantizedWeight

CASES = quantized.CASES | {
    # Blocks of rows that align with no cut, and of columns that align with each.
    "fp8_small_blocks": quantized.Case(
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [24, 16]},
        lambda w, rng: writer.fp8(w, rows=24, columns=16, name="weight_scale_inv"),
    ),
}
WHOLE = jax.sharding.PartitionSpec()
FAULT = "int8_rows with a fault"
EXPERTS = (  # one of each kind: rows by their largest values, static ones, groups, zeros, orders
    *("fp8_matrix_dynamic", "fp8_matrix_static", "int8_rows", "w4a16_zeros", "gptq_ordered"),
    *("gptq_v2_rows", "fp8_small_blocks", "fp8_blocks"),
)


def write(name, *, experts=False):
    folder = Path(tempfile.mkdtemp()) / name
    folder.mkdir()
    writing = quantized_experts.write_experts if experts else quantized.write
    writing(CASES[name], folder)
    return folder


def without_the_others(decoder):
    """Plant the fault that devices do not exchange the scale of a row."""
    for _, node in nnx.iter_graph(decoder):
        weight = node.get_value() if isinstance(node, nnx.Param) else None
        if isinstance(weight, QuantizedWeight):
            alone = dataclasses.replace(weight.quantization, axis=None)
            node.set_value(dataclasses.replace(weight, quantization=alone))


def mlps(shards, sources, dtype="float32", *, expert_parallel=False):
    """Return (f32[T, d] of the first MLP of each, the collectives of each, the rejections).

    `sources`: By name, the folder and the formats of the matrices.
    """
    mesh, models, weights, refused = mesh_of(shards), {}, {}, {}
    for name, (folder, formats) in sources.items():
        try:
            spec = spec_of(folder, shards, expert_parallel=expert_parallel)
            models[name] = model = build_model(spec, dtype, formats, shards)
        except ForgeError as error:
            refused[name] = str(error)
        else:
            weights[name] = load_weights(model, folder, mesh=mesh, progress=False)

    def all_of(weights, x):
        ys = []
        for number, (name, model) in enumerate(models.items()):
            decoder = model.decoder(weights[name])
            if name == FAULT:
                without_the_others(decoder)
            with jax.named_scope(f"model_{number}"):
                ys.append(decoder.layers[0].mlp(x, rows_alone(axis=decoder.axis)))
            # One after the other; otherwise XLA would merge all sums into one.
            x, ys[-1] = jax.lax.optimization_barrier((x, ys[-1]))
        return ys

    if mesh is not None:
        specs = {n: tuple(leaf_spec(m, leaf) for leaf in m.names) for n, m in models.items()}
        all_of = jax.shard_map(
            all_of, mesh=mesh.mesh, in_specs=(specs, WHOLE), out_specs=WHOLE, check_vma=False
        )
    x = jnp.asarray(np.random.default_rng(0).standard_normal((6, 64)), dtype)
    compiled = jax.jit(all_of).lower(weights, x).compile()
    ys = [np.asarray(y, np.float32) for y in compiled(weights, x)]
    found = {name: [] for name in models}
    for each in collectives(compiled):
        kind, scope = each.split(" ")
        number, scope = scope.split("/", 1)
        found[list(models)[int(number.removeprefix("model_"))]].append(f"{kind} {scope}")
    return dict(zip(models, ys, strict=True)), found, refused


def products():
    sources = {name: (write(name), WeightFormats()) for name in CASES}
    for values in ("int8", "fp8", "int4"):
        sources[f"rounded {values}"] = GOLDENS / "llama31", WeightFormats(rounded=values)
    sources[FAULT] = sources["int8_rows"]
    return compared(sources, (2, SHARDS))


def experts():
    sources = {name: (write(name, experts=True), WeightFormats()) for name in EXPERTS}
    sources["rounded fp8"] = GOLDENS / "mixtral", WeightFormats(rounded="fp8")
    sources[FAULT] = sources["int8_rows"]
    found = compared(sources, (SHARDS,))[SHARDS]
    file = write_zoo(Path(tempfile.mkdtemp()) / "zoo.gguf", LAYERS[:1], experts=3)
    return found | {"blocks": compare(file, SHARDS, dtype="float32")}


def compared(sources, counts, **options):
    """Return the results of `mlps` on these device counts, compared with one device."""
    one = mlps(1, sources, **options)[0]
    result = {}
    for shards in counts:
        several, found, refused = mlps(shards, sources, **options)
        result[shards] = {
            "refused": refused,
            "forms": {
                name: {
                    "difference": float(np.abs(ys - one[name]).max()),
                    "scale": float(np.abs(one[name]).max()),
                    "collectives": found[name],
                }
                for name, ys in several.items()
            },
        }
    return result


def kernels():
    """Measure the error of 4 bits packed for the CPU kernels, relative to plain float32."""
    if not cpu.available():
        return None
    cpu.load()
    folder = write("w4a16")
    sources = {"packed": (folder, WeightFormats(layers="bf16", head="bf16"))}
    model = build_model(read_spec(folder), "bfloat16", sources["packed"][1], 2)
    assert model.packings["layers.0.mlp.down.weight"].format == "int4"
    exact = mlps(1, {"packed": (folder, WeightFormats())})[0]["packed"]
    far = [mlps(n, sources, "bfloat16")[0]["packed"] - exact for n in (1, 2)]
    return [float(np.sqrt((each**2).mean())) for each in (*far, exact)]


def models():
    """Compare whole models, one of them with another cache."""
    return {
        "int8_rows": compare(write("int8_rows"), 2),
        "gptq_ordered": compare(write("gptq_ordered"), SHARDS, kv_dtype="fp8"),
    }


def blocks():
    """Compare packed GGUF matrices of all types, in float32 and by the C++ kernels.

    Includes cuts within blocks, and matrices of several types.
    """
    file = write_zoo(Path(tempfile.mkdtemp()) / "zoo.gguf", (*LAYERS[:2], LAYERS[3]))
    options = {"layers": 3, "dtype": "float32"}
    found = {f"float32 on {n}": compare(file, n, **options) for n in (2, SHARDS)}
    whole, cut = (build_model(read_spec(file), shards=n) for n in (1, SHARDS))
    found["bytes"] = [whole.param_bytes, cut.param_bytes]
    if cpu.available():
        cpu.load()
        formats = WeightFormats(layers="bf16", head="bf16")
        packings = build_model(read_spec(file), formats=formats).packings.values()
        assert {each.format for each in packings} >= {"int4 blocks", "int8 blocks"}
        exact = run_on_one(file, **options)
        options |= {"formats": formats, "dtype": "bfloat16"}
        far = [run(file, n, **options)[0] - exact for n in (1, 2, SHARDS)]
        found["packed"] = [float(np.sqrt((each**2).mean())) for each in (*far, exact)]
    return found


def as_served(folder, shards, **options):
    """Return (model, leaves) as an engine has them."""
    config = EngineConfig.from_options(model=str(folder), tensor_parallel=shards, **options)
    spec = spec_of(folder, shards, expert_parallel=config.parallel.expert_parallel)
    chosen = choose_kernels(config, spec, choose_device(config), read_converted(config, folder))
    model = build_model(spec, config.model.dtype, chosen.formats, shards)
    return model, load_weights(model, folder, mesh=mesh_of(shards), progress=False)


def bits(array):
    return np.asarray(array).view(np.uint8)


def converted():
    """Check that folders for one device and for four give the model's bits on four devices.

    The result includes the errors of folders for four devices on another number.
    """
    sources = {
        "plain": (GOLDENS / "llama31", {}),
        "experts": (GOLDENS / "qwen3_moe", {}),
        "mxfp4 experts": (GOLDENS / "gpt_oss_mxfp4", {}),
        "rounded experts": (GOLDENS / "qwen3_moe", {"quantization": "fp8"}),
        "gptq_ordered experts": (write("gptq_ordered", experts=True), {}),
        "rounded": (GOLDENS / "llama31", {"quantization": "fp8"}),
        "gptq_ordered": (write("gptq_ordered"), {}),
        "w4a16": (write("w4a16"), {}),
        "blocks": (write_zoo(Path(tempfile.mkdtemp()) / "zoo.gguf", LAYERS[:1]), {}),
    }
    if cpu.available():
        packed = {"dtype": "bfloat16", "quantization": "int8"}
        sources["packed"] = GOLDENS / "qwen2", packed
    found = {}
    for name, (source, options) in sources.items():
        model, leaves = as_served(source, SHARDS, **options)
        out = Path(tempfile.mkdtemp())
        for shards in (1, SHARDS):
            config = EngineConfig.from_options(model=str(source), tensor_parallel=shards, **options)
            folder = convert(config, out / str(shards), progress=False).folder
            try:
                again, ours = as_served(folder, SHARDS)
            except ForgeError as error:
                found[f"{name} of {shards}"] = str(error).replace(str(folder), "OUT")
                continue
            found[f"{name} of {shards}"] = again.names == model.names and all(
                a.sharding == b.sharding and np.array_equal(bits(a), bits(b))
                for a, b in zip(ours, leaves, strict=True)
            )
        if name == "plain":
            for other in (1, 2):
                try:
                    as_served(folder, other)
                except ForgeError as error:
                    found[f"on {other}"] = str(error).replace(str(folder), "OUT")
    return found


def peaks():
    """Measure the peak of host memory while weights are read, their bytes, and the largest.

    The bytes read of a folder converted for the same device count are included.
    """
    options = {"dtype": "float32", "kernels": "xla"}
    source, out = resolve("forge-tiny"), Path(tempfile.mkdtemp()) / "out"
    config = EngineConfig.from_options(model=str(source), tensor_parallel=SHARDS, **options)
    folder = convert(config, out, progress=False).folder
    as_served(folder, SHARDS, **options)  # so that imports are not counted
    preadv, num_read = os.preadv, 0

    def count(*args):
        nonlocal num_read
        done = preadv(*args)
        num_read += done
        return done

    os.preadv = count
    found = {}
    for name, where, more in (
        ("rounded", source, {"quantization": "int8"}),
        ("converted", folder, {}),
    ):
        num_read = 0
        gc.collect()
        tracemalloc.start()
        model, _ = as_served(where, SHARDS, **options, **more)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        whole = build_model(model.spec, "float32").leaves
        found[name] = {
            "peak": peak,
            "total": sum(leaf.size * leaf.dtype.itemsize for leaf in mesh_of(4).leaves(model)),
            "largest": max(leaf.size * leaf.dtype.itemsize for leaf in whole),
            "read": num_read,
        }
    arrays = (file for file in (folder / "weights").rglob("*") if not file.name.startswith("."))
    found["stored"] = sum(f.stat().st_size for f in arrays if set(f.name) <= set("0."))
    return found


def rejection():
    """Return the outputs of engines that verify drafts by rejection, and one without drafts."""
    drafted = {
        "speculation": "draft",
        "draft_model": "self",
        "draft_layers": 3,
        "max_draft_tokens": 2,
        "draft_verification": "rejection",
    }
    found = {}
    for shards, options in ((1, {}), (SHARDS, drafted)):
        llm = LLM(
            str(short_stories()),
            tensor_parallel=shards,
            max_model_len=64,
            max_num_seqs=2,
            max_num_batched_tokens=8,
            **options,
        )
        if options:
            drafts_always_pay(core_of(llm).speculator.policy)
        each = found[shards] = {}
        for name in ("greedy", "drawn"):
            outputs = llm.generate(PROMPTS[:2], REQUESTS[name], progress=False)
            each[name] = [output.outputs[0].token_ids for output in outputs]
            each[f"{name}, drafts"] = sum(o.outputs[0].num_accepted_tokens for o in outputs)
        llm.close()
    return found


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    assert len(jax.devices()) == SHARDS
    parts = {
        p.__name__: p
        for p in (products, experts, kernels, models, blocks, converted, peaks, rejection)
    }
    print(json.dumps({name: parts[name]() for name in sys.argv[1:]}))
