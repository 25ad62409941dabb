"""Helpers of the host process: supervised threads and tasks, Rust panics, size-limited files."""
