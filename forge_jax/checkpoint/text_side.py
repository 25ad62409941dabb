"""The tensors of a multimodal checkpoint's text model, under the names of a text checkpoint."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path

from forge_jax.errors import CheckpointError
from forge_jax.host.files import short_repr
from forge_jax.weights.names import text_name
from forge_jax.weights.stored import TensorSource

log = logging.getLogger(__name__)


def text_tensors(stored: Mapping[str, TensorSource], folder: Path) -> dict[str, TensorSource]:
    """Return the tensors of the text model by their names in a text checkpoint.

    The other tensors are counted in the log.

    Raises:
      CheckpointError: two tensors have the same name without their prefixes.
    """
    found: dict[str, TensorSource] = {}
    skipped, skipped_bytes = 0, 0
    for name, tensor in stored.items():
        ours = text_name(name)
        if ours is None:
            skipped += 1
            skipped_bytes += math.prod(tensor.shape) * tensor.dtype.itemsize
        elif ours in found:
            raise CheckpointError(
                f"{folder}: {short_repr(name)} and another tensor are both {short_repr(ours)} of "
                "the text model: remove one of them"
            )
        else:
            found[ours] = tensor
    if skipped:
        log.info(
            "%s: %d tensors (%.1f MB) outside the text model are not loaded: images, video and "
            "audio are not supported",
            folder,
            skipped,
            skipped_bytes / 1e6,
        )
    return found
