"""Reads safetensors files: the header checked, the data memory-mapped one tensor at a time.

A parser of our own because the library's numpy form knows no 8-bit floats, reads bfloat16 only if
ml_dtypes happens to be imported, and is half as fast. Format: 8 bytes of header length (little
endian), a JSON header, then the data; https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from forge_jax.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # the library's own limit

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies; `read` maps it."""

    name: str
    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int  # bytes, from the start of the file

    def read(self) -> np.ndarray:
        """A read-only view of the file. The mapping lives as long as the view."""
        if math.prod(self.shape) == 0:
            return np.empty(self.shape, self.dtype)
        return np.memmap(self.file, self.dtype, mode="r", offset=self.offset, shape=self.shape)


def open_checkpoint(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a model folder: `model.safetensors`, or the shards that its index names.

    Only headers are read.

    Raises:
      CheckpointError: no such files, or a broken one: it names the file and the tensor.
    """
    if (folder / INDEX).exists():
        return _open_shards(folder)
    if (folder / SINGLE).exists():
        return read_header(folder / SINGLE)
    raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}")


def _open_shards(folder: Path) -> dict[str, StoredTensor]:
    index = folder / INDEX
    try:
        shard_of = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if not all(isinstance(shard, str) for shard in shard_of.values()):
            raise ValueError("a file name in weight_map is not a string")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} cannot be read: {error!r}") from error
    shards: dict[str, dict[str, StoredTensor]] = {}
    tensors = {}
    for name, shard in shard_of.items():
        if shard not in shards:
            if Path(shard).name != shard:
                raise CheckpointError(f"{index} names a file outside the folder: {shard!r}")
            shards[shard] = read_header(folder / shard)
        if name not in shards[shard]:
            raise CheckpointError(f"{index} says that {shard} holds {name}, but it does not")
        tensors[name] = shards[shard][name]
    return tensors


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one file, every offset and size checked against the file's.

    Raises:
      CheckpointError: it names the file, and the tensor if one is wrong.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise CheckpointError(
                    f"{file} is truncated or not a safetensors file: {size} bytes, "
                    f"header of {length}"
                )
            header = json.loads(stream.read(length), object_pairs_hook=_unique)
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} has a broken header: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file} has a broken header: not a JSON object")
    header.pop("__metadata__", None)
    start = 8 + length
    return {
        name: _stored_tensor(name, file, entry, start, size - start)
        for name, entry in header.items()
    }


def _stored_tensor(name: str, file: Path, entry: Any, start: int, data_bytes: int) -> StoredTensor:
    where = f"tensor {name!r} of {file}"
    try:
        code, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape, begin, end]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: broken header entry ({error!r})") from error
    if any(type(number) is not int or number < 0 for number in numbers):
        raise CheckpointError(f"{where}: shape {shape} and offsets [{begin}, {end}] must be sizes")
    if not isinstance(code, str) or code not in DTYPES:
        raise CheckpointError(f"{where}: unknown dtype {code!r}")
    if end > data_bytes:
        raise CheckpointError(
            f"{where}: ends at byte {end} of {data_bytes}: the file is truncated; download it again"
        )
    dtype = DTYPES[code]
    if math.prod(shape) * dtype.itemsize != end - begin:
        raise CheckpointError(f"{where}: {code} {shape} does not fill {end - begin} bytes")
    return StoredTensor(name, file, dtype, tuple(shape), start + begin)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name appears twice")
    return result
