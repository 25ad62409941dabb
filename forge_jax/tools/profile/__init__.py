"""Profiles: traces that TensorBoard opens, and comparisons of two traces.

`workload` runs an engine while a trace is taken. `trace` reads a trace, `hlo` reads its
executables, `compare` compares two traces, and `report` writes the result.
"""
