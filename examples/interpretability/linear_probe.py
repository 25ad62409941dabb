"""Fit a linear probe per layer that predicts the previous token from the residual stream."""

import jax
import jax.numpy as jnp

import forge_jax

WORDS = jnp.array([305, 415])

model = forge_jax.load("forge-tiny", dtype="float32")
bits = jax.random.bernoulli(jax.random.key(0), shape=(64, 32)).astype(jnp.int32)
_, taps = model(WORDS[bits], taps=["embed", "layers.*.resid"])
wanted = 2.0 * bits[:, :-1].reshape(-1) - 1  # the previous token of each token but the first
half = wanted.size // 2
accuracy: dict[str, float] = {}
for point, resid in taps.items():
    x = resid[:, 1:].reshape(wanted.size, -1)
    weights = jnp.linalg.lstsq(x[:half], wanted[:half])[0]
    accuracy[point] = float(((x[half:] @ weights > 0) == (wanted[half:] > 0)).mean())
    print(f"{point:16} {accuracy[point]:.0%}")
