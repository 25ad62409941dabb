"""A model's leaves as an Orbax checkpoint, written by Orbax and read as plain files.

Orbax stores a flat tree as zarr arrays (format 2), each in a folder named like its key. If
compression and chunking are off, a folder holds a description (`.zarray`) and one file with the
array's bytes and nothing else. This file is read straight into the memory that XLA:CPU adopts.
Orbax itself reads into its own memory, which costs a copy. The default form, one key-value store
(OCDBT), costs another. Importing Orbax takes longer than reading a small model.

https://zarr-specs.readthedocs.io/en/latest/v2/v2.0.html
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from forge_jax.errors import CheckpointError
from forge_jax.host.files import file_size, read_json, short_repr
from forge_jax.weights.stored import BFLOAT16, StoredTensor

DESCRIPTION = ".zarray"


def write_arrays(folder: Path, arrays: Mapping[str, jax.Array]) -> None:
    """Create `folder`, which must not exist, and write `arrays` there under their names."""
    import orbax.checkpoint as ocp

    log = logging.getLogger("absl")
    level = log.level
    log.setLevel(logging.ERROR)  # Orbax warns that OCDBT is off
    options = {"use_ocdbt": False, "use_zarr3": False, "use_compression": False}
    try:
        with ocp.PyTreeCheckpointer(**options) as writer:
            writer.save(folder.absolute(), dict(arrays))
    finally:
        log.setLevel(level)


def open_arrays(
    folder: Path, expected: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, StoredTensor]:
    """Return where each array in `expected` is stored, without reading data.

    Raises:
      CheckpointError: an array is missing or broken, has another shape or type, or is stored in a
        way that `write_arrays` does not use. The message lists the first five faults.
    """
    stored, faults = {}, []
    root = folder.parent  # the model's folder
    for name, leaf in expected.items():
        found = _open_array(folder / name, leaf, root)
        if isinstance(found, str):
            faults.append(f"array {name} {found}")
        else:
            stored[name] = found
    if faults:
        more = f" (and {len(faults) - 5} more)" if len(faults) > 5 else ""
        raise CheckpointError(f"{folder} cannot be read: " + "; ".join(faults[:5]) + more)
    return stored


def _open_array(folder: Path, leaf: jax.ShapeDtypeStruct, root: Path) -> StoredTensor | str:
    """Return the array, or a description of its fault."""
    try:
        found = read_json(folder / DESCRIPTION, max_depth=3, root=root)
    except (FileNotFoundError, NotADirectoryError):
        return "is missing"
    except CheckpointError as error:
        return f"cannot be opened: {error}"
    for key, wanted in _description(leaf).items():
        value = found.get(key)
        if type(value) is not type(wanted) or value != wanted:
            return f"has {key} {short_repr(value)}, not {wanted}"
    file = folder / (".".join("0" * len(leaf.shape)) or "0")
    try:
        if file.is_symlink():
            return f"is in {file}, which is a link and not an ordinary file"
        size = file_size(file, root)
    except FileNotFoundError:
        return f"has no file {file.name}"
    except (OSError, CheckpointError) as error:
        return f"cannot be opened: {error}"
    num_bytes = leaf.size * leaf.dtype.itemsize
    if size != num_bytes:
        return f"has {size} bytes, not {num_bytes}"
    return StoredTensor(folder.name, file, leaf.dtype, leaf.shape, 0)


def _description(leaf: jax.ShapeDtypeStruct) -> dict[str, Any]:
    """Return the expected `.zarray` of an array: one row-major chunk, uncompressed."""
    dtype = np.dtype(leaf.dtype)
    return {
        "zarr_format": 2,
        "shape": list(leaf.shape),
        "dtype": "bfloat16" if dtype == BFLOAT16 else dtype.newbyteorder("<").str,
        "chunks": list(leaf.shape),
        "order": "C",
        "compressor": None,
        "filters": None,
        "dimension_separator": ".",
    }
