"""Helpers of the host process: supervised threads and tasks, exits, Rust panics, limited files."""
