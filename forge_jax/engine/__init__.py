"""The engine: its loop, its assembly, and its synchronous and asynchronous front ends."""
