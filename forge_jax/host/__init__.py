"""Helpers of the host process: supervised threads and tasks, Rust panics, files of limited size."""
