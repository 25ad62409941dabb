"""Compare the gradient through the serving forward pass with that of one without a KV cache.

    python examples/gradients.py [MODEL]

The loss has the bits of the same compiled forward pass without a gradient, with the attention that
"auto" selects for the device. The gradient of a key weight passes through the write into the paged
cache and the read from it.
"""

import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import forge_jax
from forge_jax.models.decoder import rope_frequencies
from forge_jax.research import LoadedModel
from forge_kernels.norm import rms_norm
from forge_kernels.rope import apply_rope, rope_tables

BLOCK_SIZE = 16


def next_token_loss(scores: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return the mean next-token cross-entropy. scores: f32[T, V], tokens: i32[T]."""
    log_probs = jax.nn.log_softmax(scores[:-1])
    return -jnp.mean(jnp.take_along_axis(log_probs, tokens[1:, None], axis=1))


def paged_loss(model: LoadedModel, leaves: tuple[jax.Array, ...], tokens: jax.Array) -> jax.Array:
    """Return the loss of the serving forward pass with its paged cache."""
    T = tokens.shape[0]
    num_blocks = -(-T // BLOCK_SIZE)
    positions = jnp.arange(T, dtype=jnp.int32)
    _, hidden = forge_jax.forward(
        model,
        leaves,
        forge_jax.new_kv(model, num_blocks, BLOCK_SIZE),
        tokens,
        positions,
        positions,
        jnp.arange(num_blocks, dtype=jnp.int32)[None],
        jnp.asarray([T], jnp.int32),
        jnp.asarray([0, T], jnp.int32),
        jnp.int32(1),
    )
    return next_token_loss(forge_jax.logits(model, leaves, hidden), tokens)


def dense_loss(model: LoadedModel, leaves: tuple[jax.Array, ...], tokens: jax.Array) -> jax.Array:
    """Compute the same loss with a plain Llama, without modules and without a cache."""
    spec, weights = model.spec, dict(zip(model.model.names, leaves, strict=True))
    H, K, D = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim
    T = tokens.shape[0]
    cos, sin = rope_tables(jnp.arange(T), rope_frequencies(spec.rope, D))
    causal = jnp.tril(jnp.ones((T, T), bool))
    head = weights["head.weight"]
    x = weights.get("embedding.weight", head)[tokens]
    for index in range(spec.num_hidden_layers):
        layer = {
            name.removeprefix(f"layers.{index}."): weight
            for name, weight in weights.items()
            if name.startswith(f"layers.{index}.")
        }
        normed = rms_norm(x, layer["attention.norm.weight"], spec.norm_eps)
        qkv = (normed @ layer["attention.qkv.weight"].T).reshape(T, H + 2 * K, D)
        q = apply_rope(qkv[:, :H], cos, sin)
        k = jnp.repeat(apply_rope(qkv[:, H : H + K], cos, sin), H // K, axis=1)
        v = jnp.repeat(qkv[:, H + K :], H // K, axis=1)
        scores = jnp.einsum("qhd,khd->hqk", q, k) * spec.sm_scale
        weights_of_keys = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
        attended = jnp.einsum("hqk,khd->qhd", weights_of_keys, v).reshape(T, H * D)
        x = x + attended @ layer["attention.out.weight"].T
        normed = rms_norm(x, layer["mlp.norm.weight"], spec.norm_eps)
        gate, up = jnp.split(normed @ layer["mlp.gate_up.weight"].T, 2, axis=-1)
        x = x + (jax.nn.silu(gate) * up) @ layer["mlp.down.weight"].T
    x = rms_norm(x, weights["norm.weight"], spec.norm_eps)
    return next_token_loss(x @ head.T, tokens)


def loss_and_gradient(
    loss: Callable[..., jax.Array], model: LoadedModel, tokens: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Return the loss and its gradient for every leaf, in the order of `model.model.names`."""
    of_leaves = jax.jit(jax.value_and_grad(lambda leaves: loss(model, leaves, tokens)))
    return of_leaves(model.leaves)


def main(name: str = "forge-tiny") -> dict[str, float]:
    """Print the gradient norms of key and value weights, and return the relative differences."""
    model = forge_jax.load(name, dtype="float32")
    spec = model.spec
    tokens = jax.random.randint(jax.random.key(0), (24,), 0, spec.vocab_size, jnp.int32)
    paged, by_cache = loss_and_gradient(paged_loss, model, tokens)
    dense, without = loss_and_gradient(dense_loss, model, tokens)
    print(f"loss {paged:.6f} through the cache, {dense:.6f} without")

    q_rows, kv_rows = (
        n * spec.head_dim for n in (spec.num_attention_heads, spec.num_key_value_heads)
    )
    parts = {"wk": slice(q_rows, q_rows + kv_rows), "wv": slice(q_rows + kv_rows, None)}
    errors = {}
    for index in range(spec.num_hidden_layers):
        leaf = model.model.names.index(f"layers.{index}.attention.qkv.weight")
        for part, rows in parts.items():
            ours, theirs = np.asarray(by_cache[leaf][rows]), np.asarray(without[leaf][rows])
            errors[f"layer {index} {part}"] = float(
                np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
            )
            print(f"layer {index} {part}: |gradient| {np.linalg.norm(theirs):.3e}, ", end="")
            print(f"relative difference {errors[f'layer {index} {part}']:.1e}")
    return errors


if __name__ == "__main__":
    main(*sys.argv[1:])
