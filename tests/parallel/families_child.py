"""Compares families on several devices with transformers.

`test_parallel_families.py` runs it, like `child.py`.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from child import GOLDENS, SHARDS, collectives, mesh_of

from forge_jax.checkpoint.load import load_weights
from forge_jax.checkpoint.model_spec import read_spec
from forge_jax.checkpoint.safetensors import read_header
from forge_jax.models import build_model
from forge_jax.step.kv_cache import kv_shape
from forge_jax.weights.partition import possible_shards, shard_spec

BLOCK, BLOCKS, CHUNK = 16, 4, 30


def measure(name):
    """Return how the logits of a prompt in two chunks differ from those of transformers."""
    folder = GOLDENS / name
    spec = read_spec(folder)
    shards = max({2, SHARDS} & set(possible_shards(spec)))
    mesh, model = mesh_of(shards), build_model(spec, "float32", shards=shards)
    leaves = load_weights(model, folder, mesh=mesh, progress=False)
    shape = kv_shape(
        shard_spec(spec, shards),
        num_blocks=BLOCKS,
        block_size=BLOCK,
        dtype="float32",
        platform="cpu",
    )

    def step(leaves, kv, tokens, start):
        positions, lens = start + jnp.arange(CHUNK), (start + CHUNK)[None]
        table, cu = jnp.arange(BLOCKS)[None], jnp.array([0, CHUNK], jnp.int32)
        kv, hidden = model.forward(
            leaves, kv, tokens, positions, positions, table, lens, cu, jnp.int32(1)
        )
        return kv, model.logits(leaves, hidden)

    kv = jax.device_put(mesh.kv_shape(shape).empty(), mesh.kv(model))
    stored = read_header(folder / "golden.safetensors")
    tokens, want = (np.array(stored[key].read())[0] for key in ("input_ids", "logits"))
    tokens = tokens.astype(np.int32)
    sharded = jax.jit(mesh.shard_step(model, step))
    compiled = sharded.lower(leaves, kv, tokens[:CHUNK], jnp.int32(0)).compile()
    found = []
    for start in (0, CHUNK):
        kv, logits = compiled(leaves, kv, tokens[start : start + CHUNK], jnp.int32(start))
        found.append(np.asarray(logits))
    return {
        "difference": float(np.abs(np.concatenate(found) - want[: 2 * CHUNK]).max()),
        "collectives": len(collectives(compiled)),
        "layers": spec.num_hidden_layers,
        "shards": shards,
    }


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    print(json.dumps({name: measure(name) for name in sys.argv[1:]}))
