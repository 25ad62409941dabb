"""Benchmarks, each a module to run, such as `python -m benchmarks.smoke`; see README.md."""
