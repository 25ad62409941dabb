"""`forge-jax doctor`: facts for bug reports, and problems of an installation.

Only `probe` imports jax. It runs in separate processes with a time limit, because a broken
installation may hang.
"""

from forge_jax.tools.doctor.checks import Report, examine
from forge_jax.tools.doctor.issue import Issue

__all__ = ["Issue", "Report", "examine"]
