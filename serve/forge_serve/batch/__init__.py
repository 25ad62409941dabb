"""Batch files without a server: `forge-jax batch`."""
