"""What stops a benchmark: one error, whose message is one line for the person who ran it."""


class BenchmarkError(Exception):
    """The benchmark cannot run as asked; the message says what to change."""
