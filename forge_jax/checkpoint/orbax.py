"""A model's leaves as a checkpoint of orbax: written by orbax, read array by array by tensorstore.

Orbax keeps a flat tree as zarr arrays, named like its keys, in one key-value store (OCDBT).
Reading needs no more than tensorstore, which orbax itself reads with: importing orbax would take
longer than reading a small model, and it reads into memory of its own, to be copied, where XLA:CPU
can adopt ours. Arrays are stored as they are: what is compressed could unpack to anything.
"""

from __future__ import annotations

import math
import os
import stat
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from forge_jax.errors import CheckpointError
from forge_kernels.linear.packed import aligned_empty

IN_FLIGHT_BYTES = 256 * 2**20  # that are read ahead; a larger array is read alone
MAX_FILES = 100_000
MAX_OTHER_BYTES = 64 * 2**20  # of files, besides the arrays
MIN_CHUNK_BYTES = 2**20  # of an array that is larger


def write_arrays(folder: Path, arrays: Mapping[str, jax.Array]) -> None:
    """Makes `folder`, which must not exist, and writes `arrays` there under their names."""
    import orbax.checkpoint as ocp

    with ocp.PyTreeCheckpointer(use_ocdbt=True, use_zarr3=False, use_compression=False) as writer:
        writer.save(folder.absolute(), dict(arrays))


def open_arrays(folder: Path, expected: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
    """A `TensorStore` for each name in `expected`, of its shape and type; reads no data.

    Raises:
      CheckpointError: a file is missing or broken, or an array is missing, has another shape or
        type, or is stored in a way that `write_arrays` does not; all that is wrong is listed.
    """
    import tensorstore as ts

    _check_files(folder, sum(_num_bytes(leaf) for leaf in expected.values()))
    context = ts.Context({"cache_pool#ocdbt": {"total_bytes_limit": 100 * 2**20}})
    opening = {
        name: ts.open(_spec(folder, name), context=context, open=True, read=True)
        for name in expected
    }
    stores, faults = {}, []
    for name, future in opening.items():
        try:
            stores[name] = future.result()
        except Exception as error:  # tensorstore raises whatever of Python's comes closest
            faults.append(f"array {name} cannot be opened: {_first_line(error)}")
        else:
            faults += _faults(name, stores[name], expected[name])
    if faults:
        more = f" (and {len(faults) - 5} more)" if len(faults) > 5 else ""
        raise CheckpointError(f"{folder} cannot be read: " + "; ".join(faults[:5]) + more)
    return stores


def read_arrays(stores: Mapping[str, Any], device: Any) -> Iterator[tuple[str, jax.Array]]:
    """Each array on `device` (a `jax.Device` or a `Sharding`), as soon as it is there.

    At most `IN_FLIGHT_BYTES`, or one array, are read ahead.

    Raises:
      CheckpointError: an array cannot be read.
    """
    import tensorstore as ts

    waiting: deque[tuple[str, Any, Any]] = deque()
    in_flight = 0
    for name, store in stores.items():
        size = math.prod(store.shape) * store.dtype.numpy_dtype.itemsize
        while waiting and in_flight + size > IN_FLIGHT_BYTES:
            in_flight -= waiting[0][1].nbytes
            yield _put(*waiting.popleft(), device)
        host = aligned_empty(store.shape, store.dtype.numpy_dtype)
        waiting.append((name, host, ts.array(host).write(store)))
        in_flight += size
    while waiting:
        yield _put(*waiting.popleft(), device)


def _put(name: str, host: Any, reading: Any, device: Any) -> tuple[str, jax.Array]:
    try:
        reading.result()
    except Exception as error:  # as above
        raise CheckpointError(f"array {name} cannot be read: {_first_line(error)}") from error
    return name, jax.block_until_ready(jax.device_put(host, device, may_alias=True))


def _spec(folder: Path, name: str) -> dict[str, Any]:
    return {
        "driver": "zarr",
        "kvstore": {
            "driver": "ocdbt",
            "base": {"driver": "file", "path": f"{folder.resolve()}/"},
            "path": name,
            "cache_pool": "cache_pool#ocdbt",
        },
        "metadata": {"compressor": None},
        "recheck_cached_data": False,
        "recheck_cached_metadata": False,
        "fill_missing_data_reads": False,  # else what is missing would be zeros
    }


def _faults(name: str, store: Any, leaf: jax.ShapeDtypeStruct) -> list[str]:
    shape, dtype = tuple(store.shape), store.dtype.numpy_dtype
    if shape != leaf.shape:
        return [f"array {name} has shape {shape}, not {leaf.shape}"]
    if dtype != leaf.dtype:
        return [f"array {name} is {dtype}, not {leaf.dtype}"]
    chunk = tuple(store.chunk_layout.read_chunk.shape or ())
    fits = len(chunk) == len(shape) and all(
        part <= max(size, 1) for part, size in zip(chunk, shape, strict=True)
    )
    if not fits or math.prod(chunk) * dtype.itemsize < min(_num_bytes(leaf), MIN_CHUNK_BYTES):
        return [f"array {name} is stored in pieces of {chunk}"]
    return []


def _check_files(folder: Path, array_bytes: int) -> None:
    """Nothing but ordinary files, of no more bytes than the arrays need.

    Opening a pipe may never end, and tensorstore takes memory by what the files say of themselves:
    it can read no more than they have.
    """
    if not (folder / "manifest.ocdbt").exists():
        raise CheckpointError(f"{folder} is no checkpoint of orbax: it has no manifest.ocdbt")
    count = total = 0
    for parent, folders, files in os.walk(folder, onerror=_cannot_be_listed):
        for file in (Path(parent) / name for name in [*folders, *files]):
            found = file.lstat()
            if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
                raise CheckpointError(f"{file} is not an ordinary file")
            count += 1
            total += found.st_size
            if count > MAX_FILES:
                raise CheckpointError(f"{folder} has more than {MAX_FILES} files")
    if total > array_bytes + MAX_OTHER_BYTES:
        raise CheckpointError(
            f"{folder} has {total} bytes of files, for arrays of {array_bytes}: not what was "
            "written there"
        )


def _cannot_be_listed(error: OSError) -> None:
    raise CheckpointError(f"{error.filename} cannot be read: {error.strerror}") from error


def _num_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0][:300] if lines else type(error).__name__
