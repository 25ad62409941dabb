"""The model as pure functions, for research: load, call, step, differentiate and inspect it.

    model = forge_jax.load("forge-tiny")
    logits = model([1, 80, 90])
    logits, taps = model([1, 80, 90], taps=["layers.*.resid"])

The weights are a pytree. You can jit over them, differentiate with respect to them, or replace
them. The functions below run single steps over a paged KV cache, as the server does:

    kv = forge_jax.new_kv(model, num_blocks=64, block_size=16)
    kv, hidden = forge_jax.forward(model, model.leaves, kv, tokens, positions, slot_mapping, ...)
    scores = forge_jax.logits(model, model.leaves, hidden)
"""

from forge_jax.research.loaded import LoadedModel, load
from forge_jax.research.steps import decode_step, forward, logits, new_kv

__all__ = ["LoadedModel", "decode_step", "forward", "load", "logits", "new_kv"]
