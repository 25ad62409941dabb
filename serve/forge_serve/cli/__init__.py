"""The command `forge-jax`."""
