"""Tensors in POSIX shared memory, written by another process on this machine.

The segment is read, not mapped. If its owner truncates it meanwhile, the read is short and raises
an error. An access to mapped memory would end the process.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from forge_jax.errors import RequestError

FOLDER = Path("/dev/shm")
DTYPES: dict[str, np.dtype] = {
    name: np.dtype(getattr(ml_dtypes, name, name))
    for name in (
        *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        *("int64", "int32", "int16", "int8", "uint8"),
    )
}
_NAME = re.compile(r"/?([A-Za-z0-9_-][A-Za-z0-9._-]{0,254})", re.ASCII)
_MAX_DIMENSIONS = 8


@dataclass(frozen=True, kw_only=True)
class SharedTensor:
    """A C-contiguous tensor in a segment.

    Attributes:
      name: the tensor's name in a checkpoint.
      dtype: its name in NumPy or ml_dtypes, such as "bfloat16", with or without "torch.".
      shape: its dimensions.
      offset: its first byte's offset in the segment.
    """

    name: str
    dtype: str
    shape: Sequence[int]
    offset: int


def read_shared(segment: str, tensors: Sequence[SharedTensor]) -> dict[str, np.ndarray]:
    """Return copies of tensors in a shared memory segment that this user owns.

    Args:
      segment: its name, as for `shm_open`.
      tensors: their places. They must not overlap.

    Raises:
      RequestError: the segment does not exist or belongs to another user, or a tensor has an
        invalid type, shape or place.
    """
    name = _NAME.fullmatch(segment)
    if name is None:
        raise RequestError(
            "shared_memory must be the name of a segment: letters, digits, '.', '_' and '-'",
            param="shared_memory",
        )
    try:
        # O_NOFOLLOW and O_NONBLOCK: a link or a pipe of this name is no segment.
        file = os.open(FOLDER / name[1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise RequestError(
            "shared_memory: there is no segment of this name that the server can read",
            param="shared_memory",
        ) from error
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise RequestError(
                "shared_memory: the segment belongs to another user: create it as the server's",
                param="shared_memory",
            )
        sizes = _sizes(tensors, status.st_size)
        return {
            each.name: _read(file, each, size) for each, size in zip(tensors, sizes, strict=True)
        }
    finally:
        os.close(file)


def _sizes(tensors: Sequence[SharedTensor], segment_bytes: int) -> list[int]:
    """Return the bytes of each tensor, after checking all of them."""
    sizes = [_size(each) for each in tensors]
    if len({each.name for each in tensors}) < len(tensors):
        raise RequestError("names: a name appears twice", param="names")
    places = sorted((each.offset, size) for each, size in zip(tensors, sizes, strict=True))
    end = 0
    for offset, size in places:
        if offset < end:  # also bounds the memory of the copies by the size of the segment
            raise RequestError("offsets: two tensors overlap, or one is negative", param="offsets")
        end = offset + size
    if end > segment_bytes:
        raise RequestError(
            f"offsets: the tensors end at byte {end}, but the segment has {segment_bytes} bytes",
            param="offsets",
        )
    return sizes


def _size(tensor: SharedTensor) -> int:
    dtype = DTYPES.get(tensor.dtype.removeprefix("torch."))
    if dtype is None:
        raise RequestError(f"dtype_names must be {', '.join(DTYPES)}", param="dtype_names")
    if len(tensor.shape) > _MAX_DIMENSIONS or any(size < 0 for size in tensor.shape):
        raise RequestError(
            f"shapes: a shape has up to {_MAX_DIMENSIONS} dimensions, each at least 0",
            param="shapes",
        )
    return math.prod(tensor.shape) * dtype.itemsize


def _read(file: int, tensor: SharedTensor, size: int) -> np.ndarray:
    array = np.empty(tuple(tensor.shape), DTYPES[tensor.dtype.removeprefix("torch.")])
    buffer, done = memoryview(array.reshape(-1).view(np.uint8)), 0
    while done < size:
        read = os.preadv(file, [buffer[done:]], tensor.offset + done)
        if not read:
            raise RequestError(
                "shared_memory: the segment became shorter while it was read",
                param="shared_memory",
            )
        done += read
    return array
