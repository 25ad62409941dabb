"""Adapters to other projects. Each module imports its project, which forge-jax does not require."""
