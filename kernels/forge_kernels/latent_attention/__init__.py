"""Multi-head latent attention over a paged cache of one latent vector per token."""

from forge_kernels.latent_attention.api import (
    latent_attention,
    write_latent_attention,
    write_latents,
)

__all__ = ["latent_attention", "write_latent_attention", "write_latents"]
