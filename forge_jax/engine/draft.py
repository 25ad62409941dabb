"""The configured draft model and its weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forge_jax.checkpoint.load import load_weights
from forge_kernels.attention import Implementation

if TYPE_CHECKING:
    import jax

    from forge_jax.models.decoder import Leaves, Model


@dataclass(frozen=True, kw_only=True)
class Draft:
    """The configured draft model.

    If it consists of the target's first layers, several devices share it in the same way as the
    target. Any other draft model is replicated on each device: it is small, and communication would
    take longer than its computation.
    """

    model: Model
    folder: Path | None  # None: the target's first layers
    implementation: Implementation

    @property
    def param_bytes(self) -> int:
        """Bytes of weights that it does not share with the target."""
        return 0 if self.folder is None else self.model.param_bytes

    def load(
        self, target: Model, leaves: Leaves, device: jax.Device | jax.sharding.Sharding
    ) -> Leaves:
        if self.folder is not None:
            return load_weights(self.model, self.folder, device=device)
        named = dict(zip(target.names, leaves, strict=True))
        return tuple(named[name] for name in self.model.names)
