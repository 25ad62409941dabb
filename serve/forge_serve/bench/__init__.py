"""Measuring how fast an engine or a server answers: what `forge-jax bench` is made of.

Times are taken by the client, `metrics` makes figures of them. The modules in benchmarks/ of the
repository use it, too.
"""
