"""What stops a measurement: one error, whose message is one line for whoever asked for it."""

from forge_jax.errors import ForgeError


class BenchmarkError(ForgeError):
    """It cannot run as asked; the message says what to change."""
