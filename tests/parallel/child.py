"""What `test_tensor_parallel.py` asks of a process that has four devices; prints it as JSON.

XLA makes several devices of a CPU only before it starts, so this cannot run in a test's process.
"""

import gc
import json
import re
import sys
import tracemalloc
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from forge_jax import LLM, SamplingParams
from forge_jax.cache.kv import element_dtype, kv_shape
from forge_jax.checkpoint.hub import resolve
from forge_jax.checkpoint.load import load_weights
from forge_jax.models import build_model, read_spec
from forge_jax.models.decoder import WeightForms
from forge_jax.parallel.mesh import TensorMesh
from forge_jax.parallel.rules import shard_spec
from forge_kernels import cpu

FIXTURES = Path(__file__).parent.parent / "fixtures"
GOLDENS = FIXTURES / "goldens"
SHARDS, BLOCK, BLOCKS = 4, 8, 8
QUICKLY = {"xla_backend_optimization_level": 0}  # compiled
FAMILIES = (
    "llama31",  # two query heads of a key/value head on a device, each of those on two devices
    "llama_bias",
    "phi3",  # queries, keys and values are stored as one
    "olmo2",  # norms over all heads
    "gemma2",  # the head is the embedding
    "qwen3_moe",  # one layer with experts, and one without
)


def mesh_of(shards):
    return None if shards == 1 else TensorMesh.of(jax.devices()[:shards])


def logits(folder, shards, *, forms=None, dtype="auto", kv_dtype="auto", layers=None):
    """f32[T, V] of a prompt in two chunks."""
    spec, mesh = read_spec(folder), mesh_of(shards)
    spec = replace(spec, num_hidden_layers=layers or spec.num_hidden_layers)
    model = build_model(spec, dtype, forms, shards)
    leaves = load_weights(model, folder, mesh=mesh, progress=False)
    shape = kv_shape(
        shard_spec(spec, shards),
        num_blocks=BLOCKS,
        block_size=BLOCK,
        dtype=element_dtype(kv_dtype, model.dtype),
        platform="cpu",
    )

    def step(leaves, kv, tokens, start):
        count = len(tokens)
        positions = start + jnp.arange(count)
        lens = (start + count)[None]
        table = jnp.arange(BLOCKS)[None]
        cu = jnp.array([0, count], jnp.int32)
        kv, hidden = model.forward(
            leaves, kv, tokens, positions, positions, table, lens, cu, jnp.int32(1)
        )
        return kv, model.logits(leaves, hidden)

    if mesh is None:
        kv, run = shape.empty(), jax.jit(step, compiler_options=QUICKLY)
    else:
        run = jax.jit(mesh.shard_step(model, step), compiler_options=QUICKLY)
        kv = jax.device_put(mesh.kv_shape(shape).empty(), mesh.kv)
        shards_of_kv = {shard.data.shape[2] for shard in jax.tree.leaves(kv)[0].addressable_shards}
        assert shards_of_kv == {max(1, spec.num_key_value_heads // shards)}
    tokens = np.random.default_rng(0).integers(3, spec.vocab_size, 24).astype(np.int32)
    rows = []
    for start, end in ((0, 12), (12, 24)):
        kv, scores = run(leaves, kv, tokens[start:end], jnp.int32(start))
        rows.append(np.asarray(scores))
    return np.concatenate(rows)


def difference(folder, **options):
    one, several = (logits(folder, shards, **options) for shards in (1, SHARDS))
    return {
        "difference": float(np.abs(one - several).max()),
        "scale": float(np.abs(one).max()),
        "same_choice": float((one.argmax(axis=1) == several.argmax(axis=1)).mean()),
    }


def families():
    return {name: difference(GOLDENS / name, layers=2) for name in FAMILIES}


def narrower():
    """Another number of devices, and a cache in 8 bits."""
    folder = GOLDENS / "llama31"
    two = np.abs(logits(folder, 1, layers=2) - logits(folder, 2, layers=2)).max()
    return {"two": float(two), "int8_kv": difference(folder, kv_dtype="int8", layers=2)}


def packed():
    """bfloat16 and less, by the C++ kernels."""
    if not cpu.available():
        return None
    cpu.load()
    forms = {
        "bf16": WeightForms(layers="bf16", head="bf16"),
        "int8": WeightForms(layers="int8", head="int8", embedding="int8"),
        "int4": WeightForms(layers="int4", head="int8", embedding="int8"),
    }
    run = partial(difference, dtype="bfloat16", layers=2)
    found = {name: run(resolve("forge-tiny"), forms=form) for name, form in forms.items()}
    experts = WeightForms(layers="bf16", head="bf16")
    return found | {"experts": run(GOLDENS / "qwen3_moe", forms=experts)}


PROMPTS = ["Once upon a time", "The dog", "Lily and Tom went to the park, and there they"]


def collectives(executable):
    """How often each collective is in the optimised program."""
    kinds = (
        "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|collective-broadcast"
    )
    found = re.findall(rf" ({kinds})(?:-start)?\(", executable.as_text())
    return dict(Counter(found))


def engine():
    """Greedy and drawn tokens, and the collectives of every executable."""
    found = {}
    for shards in (1, SHARDS):
        options = {"speculation": "ngram"} if shards > 1 else {}
        llm = LLM(
            str(FIXTURES / "stories260k-hf"),
            tensor_parallel=shards,
            max_model_len=128,
            max_num_seqs=8,
            max_num_batched_tokens=64,
            deterministic=True,
            **options,
        )
        runner = llm._core._device
        outputs = {}
        for temperature in (0.0, 1.0):
            params = SamplingParams(temperature=temperature, seed=1, max_tokens=24)
            texts = llm.generate(PROMPTS, params)
            again = llm.generate(PROMPTS[1:2], params)
            assert again[0].outputs[0].token_ids == texts[1].outputs[0].token_ids, "the company changes a text"
            outputs[str(temperature)] = [output.outputs[0].token_ids for output in texts]
        steps = {n: e for n, e in runner._compiled.items() if "[" in n}
        found[shards] = {
            "tokens": outputs,
            "collectives": {name: collectives(step) for name, step in steps.items()},
            "layers": runner._model.spec.num_hidden_layers,
            "settings": runner.settings.get("shards"),
        }
        vectors = llm.embed(PROMPTS[:2], pooling="mean")
        found[shards]["pooled"] = vectors.tolist()
        llm.close()
    return found


def peak():
    """Bytes of host memory at the most while weights are read, over those of the weights."""
    folder, mesh = resolve("forge-tiny"), mesh_of(SHARDS)
    model = build_model(read_spec(folder), "float32", shards=SHARDS)
    total = sum(
        leaf.size * leaf.dtype.itemsize for leaf in mesh.leaves(model)
    )  # CPU devices take the host's own buffers
    whole = build_model(read_spec(folder), "float32")
    largest = max(leaf.size * leaf.dtype.itemsize for leaf in whole.leaves)
    gc.collect()
    tracemalloc.start()
    leaves = load_weights(model, folder, mesh=mesh, progress=False)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    on_each = {
        device.id: sum(
            shard.data.nbytes
            for leaf in leaves
            for shard in leaf.addressable_shards
            if shard.device == device
        )
        for device in mesh.devices
    }
    return {
        "peak": peak,
        "total": total,
        "largest": largest,
        "of_a_device": sorted(set(on_each.values())),
        "param_bytes": model.param_bytes,
    }


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    assert len(jax.devices()) == SHARDS
    parts = {"families": families, "narrower": narrower, "packed": packed, "engine": engine}
    parts["peak"] = peak
    print(json.dumps({name: parts[name]() for name in sys.argv[1:] or parts}))
