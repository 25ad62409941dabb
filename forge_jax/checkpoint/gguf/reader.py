"""The header of a GGUF file: its metadata, and the position of each tensor.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 1 to 3. Files are untrusted:
every count is checked against the remaining bytes before anything of that size is allocated.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from forge_jax.checkpoint.gguf.metadata import Metadata
from forge_jax.errors import CheckpointError, UnsupportedModelError
from forge_jax.host.files import GGUF_SUFFIX, file_size, short_repr
from forge_jax.weights.ggml import FORMATS, UNSUPPORTED, BlockFormat
from forge_jax.weights.stored import MAX_NAME, MAX_TENSORS

MAX_DIMENSIONS = 4
MAX_ENTRIES = 65_536  # entries of the metadata
MAX_ELEMENTS = 2**24  # per array of numbers
MAX_STRINGS = 2**22  # per array of strings
MAX_METADATA = 2**29  # bytes, including the table of tensors
ALIGNMENT = 32  # the default, if the file has none
_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS = {
    **{0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", _BOOL: "u1"},
    **{10: "<u8", 11: "<i8", 12: "<f8"},
}
_DTYPES = {kind: np.dtype(code) for kind, code in _NUMBERS.items()}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor's position and block format; `read` maps it and returns floats."""

    name: str
    file: Path
    format: BlockFormat
    shape: tuple[int, ...]  # row-major; blocks are along the last dimension
    offset: int  # bytes from the start of the file

    @property
    def dtype(self) -> np.dtype:
        """The type that `read` returns."""
        return self.format.dtype

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements // self.format.block_size * self.format.block_bytes

    def blocks(self) -> np.ndarray:
        """Return u8[..., blocks per row, bytes per block], a read-only view of the file."""
        *outer, last = self.shape
        shape = (*outer, last // self.format.block_size, self.format.block_bytes)
        return np.memmap(self.file, np.uint8, mode="r", offset=self.offset, shape=shape)

    def part(self, index: int) -> GGUFTensor:
        """Return the tensor at `index` on the first axis."""
        count, *shape = self.shape
        assert 0 <= index < count and shape, (self.name, index)
        rows = math.prod(shape[:-1])
        row_bytes = shape[-1] // self.format.block_size * self.format.block_bytes
        return replace(self, shape=tuple(shape), offset=self.offset + index * rows * row_bytes)

    def read(self) -> np.ndarray:
        """Return the values: a view of the file for floats, else dequantized to float32."""
        return self.format.values(self.blocks()).reshape(self.shape)


@dataclass(frozen=True, eq=False)
class GGUFFile:
    """The header of a file.

    Attributes:
      metadata: values by key; arrays of numbers are numpy's, arrays of strings are lists.
      tensors: tensors by name.
    """

    file: Path
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    @property
    def view(self) -> Metadata:
        """The metadata with checked getters."""
        return Metadata(self.metadata, self.file)


def is_gguf(model: Path) -> bool:
    """Return True if the path of a model is a GGUF file, not a folder."""
    return model.suffix == GGUF_SUFFIX and not model.is_dir()


def read_file(file: Path) -> GGUFFile:
    """Read the header of one file; tensor data is mapped when it is read.

    Raises:
      CheckpointError: the file is not GGUF, is truncated, or has contradictory values.
    """
    try:
        size = file_size(
            file, Path("/")
        )  # the user named this file, so its links may lead anywhere
        with file.open("rb") as stream:
            if size < 24:
                raise CheckpointError(f"{file} is not a GGUF file: it has only {size} bytes")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(file, data, size).read()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error


class _Reader:
    def __init__(self, file: Path, data: mmap.mmap, size: int):
        self.file, self.data = file, data
        self.size = size
        self.end = min(size, MAX_METADATA)  # upper bound of the header's end
        self.at = 0
        self.count_code = "<Q"

    def fail(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.file} cannot be read as GGUF: {what}")

    def read(self) -> GGUFFile:
        if self.take(4) != b"GGUF":
            raise CheckpointError(f"{self.file} is not a GGUF file: it does not begin with GGUF")
        version = self.number("<I")
        if version > 0xFFFF:
            raise self.fail("it is big-endian, which is not supported: convert it to little-endian")
        if not 1 <= version <= 3:
            raise self.fail(f"its version must be from 1 to 3, got {version}")
        if version == 1:
            self.count_code = "<I"
        num_tensors, num_entries = self.count(), self.count()
        if num_tensors > MAX_TENSORS or num_entries > MAX_ENTRIES:
            raise self.fail(f"it declares {num_tensors} tensors and {num_entries} entries")
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self.string("a key", MAX_NAME)
            if key in metadata:
                raise self.fail(f"the key {short_repr(key)} appears twice")
            metadata[key] = self.value(key)
        tensors = self.tensors(num_tensors, self.alignment(metadata))
        return GGUFFile(self.file, version, metadata, tensors)

    def alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self.fail(f"general.alignment must be a power of 2, got {short_repr(alignment)}")
        return alignment

    def tensors(self, count: int, alignment: int) -> dict[str, GGUFTensor]:
        table: dict[str, tuple[BlockFormat, tuple[int, ...], int]] = {}
        for _ in range(count):
            name = self.string("a tensor's name", MAX_NAME)
            if name in table:
                raise self.fail(f"the tensor {short_repr(name)} appears twice")
            table[name] = self.tensor(name, alignment)
        start = -(-self.at // alignment) * alignment
        found: dict[str, GGUFTensor] = {}
        begin = 0  # the end of the tensors so far
        for name, (format, shape, offset) in sorted(table.items(), key=lambda entry: entry[1][2]):
            tensor = GGUFTensor(name, self.file, format, shape, start + offset)
            if offset < begin:
                raise self.fail(f"the tensor {short_repr(name)} overlaps another")
            begin = offset + tensor.num_bytes
            if start + begin > self.size:
                raise self.fail(f"the tensor {short_repr(name)} ends after the end of the file")
            found[name] = tensor
        return {name: found[name] for name in table}

    def tensor(self, name: str, alignment: int) -> tuple[BlockFormat, tuple[int, ...], int]:
        num_dims = self.number("<I")
        if not 1 <= num_dims <= MAX_DIMENSIONS:
            raise self.fail(f"the tensor {short_repr(name)} has {num_dims} dimensions")
        shape = tuple(self.count() for _ in range(num_dims))[::-1]  # stored innermost first
        kind, offset = self.number("<I"), self.number("<Q")
        format = FORMATS.get(kind)
        if format is None:
            known = ", ".join(format.name for format in FORMATS.values())
            raise UnsupportedModelError(
                f"{self.file}: the tensor {short_repr(name)} is of type "
                f"{UNSUPPORTED.get(kind, kind)}, which is not supported; supported: {known}"
            )
        if min(shape) < 1 or math.prod(shape) > 2**62:
            raise self.fail(
                f"the tensor {short_repr(name)} has the shape {short_repr(list(shape))}"
            )
        if shape[-1] % format.block_size:
            raise self.fail(
                f"the tensor {short_repr(name)} has rows of {shape[-1]} elements, but "
                f"{format.name} needs a multiple of {format.block_size}"
            )
        if offset % alignment:
            raise self.fail(f"the tensor {short_repr(name)} is not aligned to {alignment} bytes")
        return format, shape, offset

    # ---- values ----------------------------------------------------------------------------------

    def take(self, count: int) -> bytes:
        if count > self.end - self.at:
            if self.end < self.size:
                raise self.fail(f"its metadata is larger than {MAX_METADATA >> 20} MiB")
            raise self.fail("it is truncated: download it again")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, code: str) -> Any:
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def count(self) -> int:
        return self.number(self.count_code)

    def string(self, what: str, most: int = MAX_METADATA) -> str:
        length = self.count()
        if length > most:
            raise self.fail(f"{what} declares {length} bytes")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not UTF-8") from None

    def strings(self, what: str, count: int) -> list[str]:
        """Return strings as `string` does, but fast: this is most of the time of a header."""
        length_of = struct.Struct(self.count_code)
        found = []
        at = self.at
        try:
            for _ in range(count):
                begin = at + length_of.size
                end = begin + length_of.unpack_from(self.data, at)[0]
                if end > self.end:
                    break
                found.append(self.data[begin:end].decode())
                at = end
        except (struct.error, UnicodeDecodeError):
            pass
        self.at = at
        while len(found) < count:  # `string` reports the error
            found.append(self.string(what))
        return found

    def value(self, key: str) -> Any:
        kind = self.number("<I")
        if kind == _STRING:
            return self.string(f"the value of {short_repr(key)}")
        if kind == _ARRAY:
            return self.array(key)
        return self.scalar(key, kind)

    def scalar(self, key: str, kind: int) -> Any:
        dtype = _DTYPES.get(kind)
        if dtype is None:
            raise self.fail(f"the value of {short_repr(key)} is of the unknown type {kind}")
        value = np.frombuffer(self.take(dtype.itemsize), dtype)[0].item()
        return self.truth(key, value) if kind == _BOOL else value

    def truth(self, key: str, value: int) -> bool:
        if value > 1:
            raise self.fail(f"the value of {short_repr(key)} must be 0 or 1, got {value}")
        return bool(value)

    def array(self, key: str) -> Any:
        kind, count = self.number("<I"), self.count()
        if count > (MAX_STRINGS if kind == _STRING else MAX_ELEMENTS):
            raise self.fail(f"the array {short_repr(key)} declares {count} elements")
        if kind == _STRING:
            return self.strings(f"an element of {short_repr(key)}", count)
        dtype = _DTYPES.get(kind)
        if dtype is None:
            raise self.fail(f"the array {short_repr(key)} is of the unknown or nested type {kind}")
        values = np.frombuffer(self.take(count * dtype.itemsize), dtype)
        if kind == _BOOL:
            if (values > 1).any():
                raise self.fail(f"the array {short_repr(key)} has values other than 0 and 1")
            return values.astype(bool)
        return values
