"""Profiles: traces that TensorBoard opens, and what changed from one to another.

`recorder` takes a trace of an engine, `workload` gives it something to do; `trace` reads one back,
`compare` sets two side by side, and `report` writes what it found.
"""
