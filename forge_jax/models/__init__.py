"""Models: their description (`spec`), their families (`registry`) and their math (`decoder`)."""

from forge_jax.models.decoder import KV, Leaves, Model
from forge_jax.models.registry import build_model
from forge_jax.models.spec import ModelSpec, RopeSpec

__all__ = ["KV", "Leaves", "Model", "ModelSpec", "RopeSpec", "build_model"]
