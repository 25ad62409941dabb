"""Commands of `forge-jax`. Each file adds its parser, and delays heavy imports until it runs."""
