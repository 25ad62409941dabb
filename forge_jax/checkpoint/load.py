"""Reads a checkpoint into a model's leaves: one tensor at a time, all headers checked first."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from forge_jax.checkpoint.safetensors import DTYPES, StoredTensor, open_checkpoint
from forge_jax.checkpoint.weight_map import Tensor, WeightMap
from forge_jax.errors import CheckpointError
from forge_jax.models.decoder import Leaves, Model
from forge_jax.models.registry import find_architecture

FLOATS = tuple(DTYPES[code] for code in ("F64", "F32", "F16", "BF16"))
ALIGNMENT = 64  # bytes; XLA:CPU adopts a host buffer so aligned instead of copying it


@dataclass(frozen=True, eq=False)
class CheckedWeights:
    """A checkpoint whose headers have been found to hold all that a model needs."""

    parts: WeightMap  # leaf name -> stored tensors
    stored: dict[str, StoredTensor]


def check_weights(model: Model, folder: Path) -> CheckedWeights:
    """Checks every name, shape and type from the files' headers; reads no data.

    Raises:
      CheckpointError: a file is missing or broken, or a tensor is missing or has the wrong shape or
        type; all that is wrong is listed.
    """
    parts = find_architecture(model.spec.architecture).weights(model.spec)
    assert set(parts) == set(model.names), f"no map: {set(parts) ^ set(model.names)}"
    stored = open_checkpoint(folder)
    faults = [fault for group in parts.values() for part in group for fault in _check(part, stored)]
    if faults:
        more = f" (and {len(faults) - 5} more)" if len(faults) > 5 else ""
        raise CheckpointError(f"{folder} does not fit its config: " + "; ".join(faults[:5]) + more)
    return CheckedWeights(parts, stored)


def load_weights(
    model: Model, folder: Path, *, device: Any = None, progress: bool = True
) -> Leaves:
    """Reads the weights of `model` from the safetensors files in `folder`.

    Every name, shape and type is checked from the files' headers before the first byte of data is
    read. The host never holds more than the weights and one leaf. Tensors that the model does not
    use are ignored.

    Args:
      model: says which leaves, shapes and types; stored tensors are cast to the leaf's type.
      folder: of `model.safetensors`, or of an index and its shards.
      device: a `jax.Device` or a `Sharding`; JAX's default if None.
      progress: show a progress bar on a terminal.

    Returns:
      One array per leaf, in the order of `model.leaves`.

    Raises:
      CheckpointError: as `check_weights`.
    """
    checked = check_weights(model, folder)
    leaves = []
    bar = tqdm(
        total=model.param_bytes,
        desc="loading weights",
        unit="B",
        unit_scale=True,
        disable=None if progress else True,  # None: only on a terminal
    )
    with bar:
        for name, leaf in zip(model.names, model.leaves, strict=True):
            host = _read_leaf(checked.parts[name], checked.stored, leaf)
            # Waiting for each transfer keeps at most one leaf on the host.
            leaves.append(jax.block_until_ready(jax.device_put(host, device, may_alias=True)))
            bar.update(host.nbytes)
    return tuple(leaves)


def _check(part: Tensor, stored: dict[str, StoredTensor]) -> list[str]:
    found = stored.get(part.name)
    if found is None:
        return [f"tensor {part.name} is missing"]
    faults = []
    if found.shape != part.shape:
        faults.append(f"tensor {part.name} has shape {found.shape}, not {part.shape}")
    if found.dtype not in FLOATS:
        faults.append(f"tensor {part.name} is {found.dtype}, which is not supported")
    return faults


def _read_leaf(
    parts: tuple[Tensor, ...], stored: dict[str, StoredTensor], leaf: jax.ShapeDtypeStruct
) -> np.ndarray:
    host = _aligned_empty(leaf.shape, leaf.dtype)
    row = 0
    for part in parts:
        view = stored[part.name].read()
        view = view.T if part.transpose else view
        np.copyto(host[row : row + view.shape[0]], view, casting="unsafe")
        row += view.shape[0]
    assert row == leaf.shape[0], (row, leaf.shape)
    return host


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)
