"""Measurements of a running engine: phases, compilations, memory, traces and the log format."""
