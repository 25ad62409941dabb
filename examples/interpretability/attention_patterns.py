"""Score the heads by how much they attend to the token after an earlier copy (induction heads)."""

import jax
import jax.numpy as jnp

import forge_jax

LENGTH = 24

model = forge_jax.load("forge-tiny")
ids = jax.random.randint(jax.random.key(0), (8, LENGTH), 5, model.spec.vocab_size)
twice = jnp.tile(ids, (1, 2))
_, taps = model(twice, taps="layers.*.attn.pattern")  # f32[B, H, T, T] per layer
scores: list[jax.Array] = []
for point, pattern in taps.items():
    after_copy = jnp.diagonal(pattern, 1 - LENGTH, -2, -1)[..., 1:]  # f32[B, H, LENGTH]
    scores.append(after_copy.mean(axis=(0, 2)))
    print(point, *(f"{score:.2f}" for score in scores[-1]))
