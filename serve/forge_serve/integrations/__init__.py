"""Adapters to other projects. Each imports its project, which forge-jax does not require."""
