"""Error that stops a measurement, with a message of one line."""

from forge_jax.errors import ForgeError


class BenchmarkError(ForgeError):
    """The measurement cannot run. The message has the remedy."""
