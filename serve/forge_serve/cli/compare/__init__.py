"""Reports of `forge-jax compare`: on a terminal, and as a self-contained page."""
