"""A writer of `torch.save` files, opcode by opcode.

torch is no dependency, and would not write the files that a reader must reject.
"""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np

STORAGES = {
    np.dtype(np.float64): "DoubleStorage",
    np.dtype(np.float32): "FloatStorage",
    np.dtype(np.float16): "HalfStorage",
    np.dtype(ml_dtypes.bfloat16): "BFloat16Storage",
    np.dtype(np.int64): "LongStorage",
    np.dtype(np.int32): "IntStorage",
    np.dtype(np.int16): "ShortStorage",
    np.dtype(np.int8): "CharStorage",
    np.dtype(np.uint8): "ByteStorage",
    np.dtype(np.bool_): "BoolStorage",
}

PROTO, STOP = b"\x80\x02", b"."
MARK, TUPLE, REDUCE, BUILD, PERSISTENT = b"(", b"t", b"R", b"b", b"Q"
ORDERED_DICT = b"ccollections\nOrderedDict\n)R"


def string(text: str) -> bytes:
    data = text.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def integer(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + bytes([value])
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def integers(values) -> bytes:
    return MARK + b"".join(map(integer, values)) + TUPLE


def storage(kind: str, key: str, count: int) -> bytes:
    """Return the persistent id of a storage; `kind` is "FloatStorage" or similar."""
    return (
        MARK + string("storage") + f"ctorch\n{kind}\n".encode() + string(key) + string("cpu")
        + integer(count) + TUPLE + PERSISTENT
    )  # fmt: skip


def tensor(stored: bytes, offset: int, shape, strides, metadata: bytes = b"") -> bytes:
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n" + MARK + stored + integer(offset) + integers(shape)
        + integers(strides) + b"\x89" + ORDERED_DICT + metadata + TUPLE + REDUCE
    )  # fmt: skip


def tensor_v3(key: str, nbytes: int, shape, strides, dtype: str) -> bytes:
    stored = storage("UntypedStorage", key, nbytes).replace(b"ctorch\n", b"ctorch.storage\n")
    return (
        b"ctorch._utils\n_rebuild_tensor_v3\n" + MARK + stored + integer(0) + integers(shape)
        + integers(strides) + b"\x89" + ORDERED_DICT + f"ctorch\n{dtype}\n".encode() + TUPLE
        + REDUCE
    )  # fmt: skip


def parameter(tensor: bytes) -> bytes:
    return (
        b"ctorch._utils\n_rebuild_parameter\n" + MARK + tensor + b"\x88" + ORDERED_DICT + TUPLE
        + REDUCE
    )  # fmt: skip


def program(items: dict[str, bytes], *, ordered: bool = True) -> bytes:
    """Return the pickle of a state dict, with `_metadata` as modules have it."""
    begin = ORDERED_DICT if ordered else b"}"
    pairs = b"".join(string(name) + value for name, value in items.items())
    metadata = b"}" + string("_metadata") + b"}" + b"s" if ordered else b""
    state = metadata + BUILD if ordered else b""
    return PROTO + begin + b"q\x00" + MARK + pairs + b"u" + state + STOP


def strides_of(shape) -> list[int]:
    """Return the strides of a row-major tensor, in elements."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return strides[: len(shape)]


def write_archive(
    path: Path,
    pickle: bytes,
    storages: dict[str, bytes] | None = None,
    *,
    compression: int = zipfile.ZIP_STORED,
    order: bytes | None = b"little",
) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickle)
        if order is not None:
            archive.writestr("archive/byteorder", order)
        for key, data in (storages or {}).items():
            archive.writestr(f"archive/data/{key}", data)
        archive.writestr("archive/version", b"3\n")
    return path


def save(path: Path, tensors: dict[str, np.ndarray]) -> Path:
    """Write like `torch.save(model.state_dict(), path)`, with a parameter among the tensors."""
    items, storages = {}, {}
    for i, (name, array) in enumerate(tensors.items()):
        storages[str(i)] = array.tobytes()
        stored = storage(STORAGES[array.dtype], str(i), array.size)
        items[name] = tensor(stored, 0, array.shape, strides_of(array.shape))
        if i == 0:
            items[name] = parameter(items[name])
    return write_archive(path, program(items), storages)
