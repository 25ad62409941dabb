"""`forge-jax doctor`: what a bug report needs, and what is wrong with an installation.

Nothing here imports jax but `probe`, which runs in processes of its own, with a time limit: the
very thing that is wrong may be that it does not come back.
"""

from forge_jax.tools.doctor.checks import Report, examine
from forge_jax.tools.doctor.issue import Issue

__all__ = ["Issue", "Report", "examine"]
