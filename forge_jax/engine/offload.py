"""The device memory of a sleeping engine: weights on the host or dropped, and no KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import numpy as np

if TYPE_CHECKING:
    from forge_jax.engine.draft import Draft
    from forge_jax.engine.weights import EngineWeights
    from forge_jax.models import Leaves
    from forge_jax.speculate.draft_model import DraftModel
    from forge_jax.step.runner import Runner


class Offload:
    """Moves the arrays of one engine off the device and back. Call it while no step is in flight.

    LoRA adapters stay on the device. The weights of a separate draft model are always copied to the
    host, because updates do not replace them.
    """

    def __init__(
        self,
        runner: Runner,
        weights: EngineWeights,
        draft: Draft | None,
        draft_model: DraftModel | None,
    ):
        self._runner = runner
        self._weights = weights
        self._draft_model = draft_model
        self._own_draft = draft is not None and draft.folder is not None
        self._leaves: list[np.ndarray] | None = None  # the weights, on the host
        self._draft_leaves: list[np.ndarray] | None = None

    @property
    def has_copy(self) -> bool:
        """True if the host has the weights, so that `restore_weights` is possible."""
        return self._leaves is not None

    def release(self, *, keep: bool) -> None:
        """Free the weights and the KV cache on the device. If it raises, nothing has changed.

        Args:
          keep: copy the weights to the host first.
        """
        leaves, draft_model = self._runner.leaves, self._draft_model
        host = _on_host(leaves) if keep else None
        if draft_model is not None and self._own_draft:
            self._draft_leaves = _on_host(draft_model.leaves)
            _delete(draft_model.leaves)
        self._leaves = host
        _delete(leaves)
        self._runner.release()
        if draft_model is not None:
            draft_model.release()

    def drop_copy(self) -> None:
        """Drop the weights on the host, because newer ones are installed or will be."""
        self._leaves = None

    def restore_weights(self) -> None:
        """Put the weights of the host back on the device."""
        assert self._leaves is not None
        self._weights.install(_on_device(self._leaves, self._runner.leaves))
        self._leaves = None
        self.restore_draft()

    def restore_draft(self) -> None:
        """Put the weights of a separate draft model back on the device."""
        if self._draft_leaves is None:
            return
        assert self._draft_model is not None
        self._draft_model.replace_weights(_on_device(self._draft_leaves, self._draft_model.leaves))
        self._draft_leaves = None

    def restore_kv(self) -> None:
        """Allocate an empty KV cache, and new slots."""
        self._runner.reset()


def _on_host(leaves: Leaves) -> list[np.ndarray]:
    return [np.array(leaf) for leaf in leaves]  # a copy, also on a CPU


def _on_device(host: list[np.ndarray], like: Leaves) -> Leaves:
    """Return copies in the placement of `like`, which may be deleted arrays."""
    return tuple(
        jax.block_until_ready(jax.device_put(array, leaf.sharding, may_alias=False))
        for array, leaf in zip(host, like, strict=True)
    )


def _delete(leaves: Leaves) -> None:
    for leaf in leaves:
        leaf.delete()
