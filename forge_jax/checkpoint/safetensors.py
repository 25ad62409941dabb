"""Reads safetensors files: checks the header and maps the data.

This parser replaces the library's numpy reader, which has no 8-bit floats and is half as fast. The
library also reads bfloat16 only if ml_dtypes happens to be imported. A file has 8 bytes of header
length (little endian), a JSON header, then the data; https://huggingface.co/docs/safetensors.

The header is parsed entry by entry. A hostile one fails at its first wrong entry and never becomes
more objects than the tensors it really describes.
"""

from __future__ import annotations

import json
import math
import mmap
import re
from pathlib import Path
from typing import Any

import numpy as np

from forge_jax.errors import CheckpointError
from forge_jax.host.files import file_size, short_repr
from forge_jax.weights.stored import (
    BFLOAT16,
    FLOAT8_E4M3,
    FLOAT8_E5M2,
    MAX_DIMENSIONS,
    MAX_NAME,
    MAX_TENSORS,
    StoredTensor,
)

MAX_HEADER_BYTES = 100_000_000  # the library's limit
MAX_METADATA_BYTES = 16 * 2**20
MAX_METADATA_PAIRS = 10_000

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": BFLOAT16,
    "F8_E4M3": FLOAT8_E4M3,
    "F8_E5M2": FLOAT8_E5M2,
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

_SPACE = rb"[ \t\n\r]*+"
_STRING = rb'"(?:[^"\\\x00-\x1f]|\\.)*+"'
# An entry of a tensor is flat and short: no nested objects, only a few numbers.
_NAME = re.compile(_SPACE + rb'("(?:[^"\\\x00-\x1f]|\\.){0,%d}+")' % MAX_NAME + _SPACE + rb":")
_ENTRY = re.compile(_SPACE + rb"(\{[^{}]{0,4096}+\})" + _SPACE)
_METADATA_PAIR = re.compile(
    _SPACE + rb"(" + _STRING + rb")" + _SPACE + rb":" + _SPACE + _STRING + _SPACE
)
_OPEN = re.compile(_SPACE + rb"\{" + _SPACE)
_CLOSE = re.compile(_SPACE + rb"\}")
_OPEN_STRING = re.compile(_SPACE + rb'"')
_BLANK = re.compile(_SPACE)


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one file, with every offset and size checked against the file's size.

    Raises:
      CheckpointError: the file is missing or broken; the message names it and the tensor.
    """
    try:
        size = file_size(file)
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or not 1 <= length <= min(size - 8, MAX_HEADER_BYTES):
                raise CheckpointError(
                    f"{file} is truncated or not a safetensors file: it has {size} bytes and a "
                    f"header of {length}"
                )
            with mmap.mmap(stream.fileno(), 8 + length, access=mmap.ACCESS_READ) as mapped:
                tensors = _Header(file, mapped, 8 + length, size - 8 - length).tensors()
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} has a broken header: {error}") from error
    _check_coverage(file, tensors, 8 + length, size)
    return tensors


class _Header:
    """A cursor over the JSON text of a header; raises ValueError for anything malformed."""

    def __init__(self, file: Path, text: mmap.mmap, end: int, data_bytes: int):
        self.file, self.text, self.at, self.end = file, text, 8, end
        self.data_bytes = data_bytes

    def tensors(self) -> dict[str, StoredTensor]:
        if self.text[8:9] != b"{":
            raise ValueError("not a JSON object")
        self.at = 9
        found: dict[str, StoredTensor] = {}
        named_metadata = False
        while self._more(first=not found and not named_metadata):
            name = self._name()
            if name in found or (name == "__metadata__" and named_metadata):
                raise ValueError(f"a name appears twice: {short_repr(name)}")
            if name == "__metadata__":
                named_metadata = True
                self._skip_metadata()
                continue
            if len(found) == MAX_TENSORS:
                raise ValueError(f"more than {MAX_TENSORS} tensors")
            found[name] = self._tensor(name)
        self._skip_blank()
        if self.at != self.end:
            raise ValueError("text after the JSON object")
        return found

    def _more(self, *, first: bool) -> bool:
        """Consume the comma before the next name, or the brace after the last entry."""
        if first:
            empty = _CLOSE.match(self.text, self.at, self.end)
            self.at = self.at if empty is None else empty.end()
            return empty is None
        char = self.text[self.at : self.at + 1]
        if char not in (b",", b"}") or self.at >= self.end:
            raise ValueError(f"',' or '}}' expected at byte {self.at}")
        self.at += 1
        return char == b","

    def _name(self) -> str:
        match = _NAME.match(self.text, self.at, self.end)
        if match is None:
            raise ValueError(f"a name of at most {MAX_NAME} bytes expected at byte {self.at}")
        self.at = match.end()
        return json.loads(match[1].decode("utf-8"))

    def _tensor(self, name: str) -> StoredTensor:
        match = _ENTRY.match(self.text, self.at, self.end)
        if match is None:
            raise CheckpointError(f"tensor {name!r} of {self.file}: broken header entry")
        self.at = match.end()
        where = f"tensor {name!r} of {self.file}"
        try:
            entry = json.loads(match[1].decode("utf-8"), object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{where}: broken header entry ({error})") from error
        return _stored_tensor(name, self.file, entry, self.end, self.data_bytes)

    def _skip_metadata(self) -> None:
        """Skip the metadata, which must be a flat object of strings."""
        begin = self.at
        opening = _OPEN.match(self.text, self.at, self.end)
        if opening is None:
            raise ValueError("__metadata__ is not an object")
        self.at = opening.end()
        keys: set[bytes] = set()
        while self.text[self.at : self.at + 1] != b"}":
            pair = _METADATA_PAIR.match(self.text, self.at, self.end)
            if pair is None:
                raise ValueError("__metadata__ must hold only strings")
            if pair.end() - begin > MAX_METADATA_BYTES:
                raise ValueError(f"__metadata__ has more than {MAX_METADATA_BYTES} bytes")
            pair[0].decode("utf-8")
            if pair[1] in keys:
                raise ValueError(f"a name appears twice: {short_repr(pair[1])} in __metadata__")
            keys.add(pair[1])
            if len(keys) > MAX_METADATA_PAIRS:
                raise ValueError(f"__metadata__ has more than {MAX_METADATA_PAIRS} names")
            self.at = pair.end()
            if self.text[self.at : self.at + 1] == b",":
                self.at += 1
                if _OPEN_STRING.match(self.text, self.at, self.end) is None:
                    raise ValueError("__metadata__ must hold only strings")
            elif self.text[self.at : self.at + 1] != b"}":
                raise ValueError("__metadata__ must hold only strings")
        self.at += 1
        self._skip_blank()

    def _skip_blank(self) -> None:
        blank = _BLANK.match(self.text, self.at, self.end)
        assert blank is not None
        self.at = blank.end()


def _stored_tensor(name: str, file: Path, entry: Any, start: int, data_bytes: int) -> StoredTensor:
    where = f"tensor {name!r} of {file}"
    try:
        code, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape, begin, end]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: broken header entry ({error!r})") from error
    if type(shape) is not list or len(entry) != 3 or len(shape) > MAX_DIMENSIONS:
        raise CheckpointError(f"{where}: broken header entry")
    if any(type(number) is not int or not 0 <= number < 2**63 for number in numbers):
        raise CheckpointError(
            f"{where}: the shape {short_repr(shape)} and the offsets must be integers of at least 0"
        )
    if not isinstance(code, str) or code not in DTYPES:
        raise CheckpointError(f"{where}: unknown dtype {short_repr(code)}")
    if end < begin:
        raise CheckpointError(f"{where}: ends at byte {end} before it begins at {begin}")
    if end > data_bytes:
        raise CheckpointError(
            f"{where}: ends at byte {end} of {data_bytes}: the file is truncated; download it again"
        )
    dtype = DTYPES[code]
    if math.prod(shape) * dtype.itemsize != end - begin:  # Python integers do not overflow
        raise CheckpointError(
            f"{where}: {code} {short_repr(shape)} does not fill {end - begin} bytes"
        )
    return StoredTensor(name, file, dtype, tuple(shape), start + begin)


def _check_coverage(file: Path, tensors: dict[str, StoredTensor], start: int, end: int) -> None:
    """Check that the tensors fill the data without overlaps, gaps or trailing bytes."""
    at, before = start, None
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, _nbytes(t))):
        if tensor.offset < at:
            raise CheckpointError(f"tensor {tensor.name!r} of {file}: overlaps tensor {before!r}")
        if tensor.offset > at:
            raise CheckpointError(
                f"tensor {tensor.name!r} of {file}: {tensor.offset - at} bytes before it belong to "
                "no tensor"
            )
        at, before = at + _nbytes(tensor), tensor.name
    if at != end:
        raise CheckpointError(f"{file}: {end - at} bytes after tensor {before!r} belong to none")


def _nbytes(tensor: StoredTensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name appears twice")
    return result
