"""Products with weight matrices that lie as they do in checkpoints, [N_out, K_in]."""

from forge_kernels.linear.api import linear

__all__ = ["linear"]
