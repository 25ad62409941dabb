"""Load generation and measurement of engines and servers, for `forge-jax bench`.

The client measures times, and `metrics` computes figures from them. The modules in the repository's
benchmarks/ also use this package.
"""
