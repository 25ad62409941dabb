"""Metrics, the request log, tracing and the live view of the engine."""
