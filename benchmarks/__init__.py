"""Benchmarks: each is a module to run, `python -m benchmarks.smoke`. See README.md here."""
