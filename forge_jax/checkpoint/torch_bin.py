"""Reads PyTorch's `.bin` files without torch, and without running the code in them.

Such a file is a zip archive (torch 1.6 and newer) with a pickle, `data.pkl`, that describes the
tensors, and one uncompressed entry per storage. A pickle is a program. This module interprets only
the few opcodes that `torch.save` writes and a fixed list of names. It never resolves or calls a
name; it only records the tensor that the call would have made. Everything else is rejected by name.
The data is mapped.

Formats: `torch/serialization.py` and `torch/_utils.py` for torch's side, the standard library's
`pickletools.py` for the opcodes, PKWARE's APPNOTE 4.3 and 4.5.3 (zip64) for the archive.
"""

from __future__ import annotations

import itertools
import math
import pickletools
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

from forge_jax.errors import CheckpointError
from forge_jax.host.files import MIB, file_size, short_repr
from forge_jax.weights.stored import (
    BFLOAT16,
    FLOAT8_E4M3,
    FLOAT8_E5M2,
    MAX_DIMENSIONS,
    MAX_NAME,
    MAX_TENSORS,
    StoredTensor,
    span_of,
)

MAX_DIRECTORY_BYTES = 32 * MIB
MAX_PICKLE_BYTES = 32 * MIB
MAX_OPCODES = 3_000_000  # about 40 per tensor
MAX_MEMO = 1_000_000
MAX_STACK = 1_000_000
MAX_MARKS = 64  # nesting levels
MAX_STRING = 65_536  # bytes

CONVERT = (
    "if you trust the file, convert it to safetensors: "
    "safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'model.safetensors')"
)

_STORAGES = {
    "DoubleStorage": np.dtype(np.float64),
    "FloatStorage": np.dtype(np.float32),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": BFLOAT16,
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "ShortStorage": np.dtype(np.int16),
    "CharStorage": np.dtype(np.int8),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
}
# Types without a storage class are named next to an untyped storage.
_DTYPES = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": BFLOAT16,
    "float8_e4m3fn": FLOAT8_E4M3,
    "float8_e5m2": FLOAT8_E5M2,
    "int64": np.dtype(np.int64),
    "int32": np.dtype(np.int32),
    "int16": np.dtype(np.int16),
    "int8": np.dtype(np.int8),
    "uint64": np.dtype(np.uint64),
    "uint32": np.dtype(np.uint32),
    "uint16": np.dtype(np.uint16),
    "uint8": np.dtype(np.uint8),
    "bool": np.dtype(np.bool_),
}


@dataclass(frozen=True, slots=True)
class _Global:
    """A name that the pickle may mention; it is never resolved."""

    name: str
    dtype: np.dtype | None = None


_GLOBALS = {
    name: _Global(name)
    for name in (
        "collections.OrderedDict",
        "torch.Size",
        "torch._utils._rebuild_parameter",
        "torch._utils._rebuild_parameter_with_state",
        "torch._utils._rebuild_tensor",
        "torch._utils._rebuild_tensor_v2",
        "torch._utils._rebuild_tensor_v3",
    )
}
_GLOBALS |= {f"torch.{name}": _Global("storage", dtype) for name, dtype in _STORAGES.items()}
_GLOBALS |= {f"torch.{name}": _Global("dtype", dtype) for name, dtype in _DTYPES.items()}
_GLOBALS |= {
    name: _Global("storage", np.dtype(np.uint8))
    for name in ("torch.UntypedStorage", "torch.storage.UntypedStorage")
}


@dataclass(frozen=True, slots=True)
class _Entry:
    """An uncompressed file in the archive."""

    offset: int  # bytes from the start of the file to its data
    size: int


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: np.dtype
    entry: _Entry


@dataclass(frozen=True, slots=True)
class _Tensor:
    dtype: np.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int  # bytes from the start of the file


def read_bin(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one file, with every offset, size and stride checked.

    Values other than tensors are ignored.

    Raises:
      CheckpointError: the file is missing or broken; the message names the file, and the tensor,
        entry, opcode or global.
    """
    try:
        size = file_size(file)
        with file.open("rb") as stream:
            entries = _Archive(file, stream, size).entries()
            pickle_name = _pickle_name(file, entries)
            root = pickle_name.removesuffix("data.pkl")
            order = entries.get(f"{root}byteorder")
            if order is not None and _read(stream, order, 16) != b"little":
                raise CheckpointError(f"{file} is not little-endian: {CONVERT}")
            entry = entries[pickle_name]
            if entry.size > MAX_PICKLE_BYTES:
                raise CheckpointError(
                    f"{pickle_name} in {file} has {entry.size} bytes; the limit is "
                    f"{MAX_PICKLE_BYTES}"
                )
            program = _read(stream, entry, entry.size)
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    result = _Interpreter(f"{pickle_name} in {file}", program, entries, f"{root}data/").run()
    if type(result) is not dict:
        raise CheckpointError(f"{file} is not a dictionary of tensors")
    found = {name: value for name, value in result.items() if type(value) is _Tensor}
    if len(found) > MAX_TENSORS:
        raise CheckpointError(f"{file} has {len(found)} tensors; the limit is {MAX_TENSORS}")
    return {
        name: StoredTensor(name, file, t.dtype, t.shape, t.offset, t.strides)
        for name, t in found.items()
    }


def _pickle_name(file: Path, entries: dict[str, _Entry]) -> str:
    names = [name for name in entries if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(names) != 1:
        raise CheckpointError(
            f"{file} is a zip archive, but torch.save did not write it: it has {len(names)} "
            "entries named */data.pkl instead of one"
        )
    return names[0]


def _read(stream: BinaryIO, entry: _Entry, limit: int) -> bytes:
    stream.seek(entry.offset)
    return stream.read(min(entry.size, limit))


class _Archive:
    """The directory of a zip file, with every entry checked against its local header."""

    def __init__(self, file: Path, stream: BinaryIO, size: int):
        self.file, self.stream, self.size = file, stream, size

    def entries(self) -> dict[str, _Entry]:
        """Return the entries by name; all must be stored without compression or encryption."""
        self._check_magic()
        count, directory_size, directory_at = self._directory()
        text = self._at(directory_at, directory_size)
        found: dict[str, _Entry] = {}
        spans = []
        at = 0
        for _ in range(count):
            name, header_at, entry_size, at = self._central(text, at)
            if name in found:
                self._fail(f"the entry {short_repr(name)} appears twice")
            data_at = self._local(name, header_at)
            if data_at + entry_size > directory_at:
                self._fail(
                    f"the entry {short_repr(name)} ends after the archive's data: the file is "
                    "truncated or broken; download it again"
                )
            spans.append((header_at, data_at + entry_size, name))
            found[name] = _Entry(data_at, entry_size)
        if at != len(text):
            self._fail("its directory is larger than its entries")
        spans.sort()
        for (_, end, name), (begin, _, other) in itertools.pairwise(spans):
            if begin < end:
                self._fail(f"the entries {short_repr(name)} and {short_repr(other)} overlap")
        return found

    def _check_magic(self) -> None:
        begin = self._at(0, min(self.size, 4))
        if begin[:4] == b"PK\x03\x04":
            return
        if begin[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04"):
            self._fail(f"it has the format of torch before 1.6, which is not supported; {CONVERT}")
        self._fail(f"it is not a zip archive, which torch.save writes since 1.6; {CONVERT}")

    def _directory(self) -> tuple[int, int, int]:
        """Return the number of entries, the size and the position of the central directory."""
        tail_size = min(self.size, 22 + 65_535)
        tail_at = self.size - tail_size
        tail = self._at(tail_at, tail_size)
        found = tail.rfind(b"PK\x05\x06")
        if found < 0 or found + 22 > len(tail):
            self._fail("it has no zip directory: it is truncated; download it again")
        disk, start_disk, here, count, size, at, comment = struct.unpack_from(
            "<4H2IH", tail, found + 4
        )
        end_at = tail_at + found
        if found + 22 + comment != len(tail):
            self._fail("its zip directory does not end with the file")
        # torch writes the 64-bit record into every file, even a small one.
        if self._at(end_at - 20, 4) == b"PK\x06\x07":
            narrow = (disk, start_disk, here, count, size, at)
            end_at, *wide = self._directory64(end_at)
            for n, w, most in zip(narrow, wide, (0xFFFF,) * 4 + (0xFFFFFFFF,) * 2, strict=True):
                if n not in (w, most):
                    self._fail("its two directories contradict each other")
            disk, start_disk, here, count, size, at = wide
        if disk or start_disk or here != count:
            self._fail("it is one part of a split archive")
        if size > MAX_DIRECTORY_BYTES or count > size // 46:
            self._fail(f"its directory has {size} bytes for {count} entries")
        if at + size != end_at:
            self._fail("its directory is not at the position that it declares")
        return count, size, at

    def _directory64(self, end_at: int) -> tuple[int, ...]:
        locator = self._at(end_at - 20, 20)
        signature, disk, at, disks = struct.unpack("<4sIQI", locator)
        if signature != b"PK\x06\x07" or disk or disks > 1 or at + 56 != end_at - 20:
            self._fail("it has a broken zip64 directory")
        fields = struct.unpack("<4sQ2H2I4Q", self._at(at, 56))
        if fields[0] != b"PK\x06\x06":
            self._fail("it has a broken zip64 directory")
        return at, *fields[4:]

    def _central(self, text: bytes, at: int) -> tuple[str, int, int, int]:
        """Return name, position of the local header, size, and the next entry's place in `text`."""
        if text[at : at + 4] != b"PK\x01\x02" or at + 46 > len(text):
            self._fail("its directory is broken")
        flags, method = struct.unpack_from("<2H", text, at + 8)
        stored, size, name_length, extra_length, comment_length = struct.unpack_from(
            "<2I3H", text, at + 20
        )
        (header_at,) = struct.unpack_from("<I", text, at + 42)
        name_end = at + 46 + name_length
        end = name_end + extra_length + comment_length
        if end > len(text) or name_length > MAX_NAME:
            self._fail("its directory is broken")
        try:
            name = text[at + 46 : name_end].decode("utf-8")
        except UnicodeDecodeError:
            self._fail("the name of an entry is not UTF-8")
        if flags & 0x2041:
            self._fail(f"the entry {short_repr(name)} is encrypted")
        if method != 0:
            self._fail(
                f"the entry {short_repr(name)} is compressed (method {method}), which "
                f"torch.save does not do; {CONVERT}"
            )
        size, stored, header_at = self._wide(
            name, text[name_end : name_end + extra_length], size, stored, header_at
        )
        if size != stored:
            self._fail(f"the entry {short_repr(name)} has different stored and original sizes")
        return name, header_at, size, end

    def _wide(
        self, name: str, extra: bytes, size: int, stored: int, header_at: int
    ) -> tuple[int, int, int]:
        """Return the three numbers, with 64-bit ones taken from the extra field."""
        narrow = [size, stored, header_at]
        if 0xFFFFFFFF not in narrow:
            return size, stored, header_at
        at = 0
        while at + 4 <= len(extra):
            kind, length = struct.unpack_from("<2H", extra, at)
            if kind == 1:
                values = iter(struct.iter_unpack("<Q", extra[at + 4 : at + 4 + length // 8 * 8]))
                try:
                    wide = [next(values)[0] if n == 0xFFFFFFFF else n for n in narrow]
                except StopIteration:
                    break
                return wide[0], wide[1], wide[2]
            at += 4 + length
        self._fail(f"the entry {short_repr(name)} lacks its zip64 sizes")

    def _local(self, name: str, at: int) -> int:
        """Return where the entry's data begins; its local header must match the directory."""
        header = self._at(at, 30)
        if header[:4] != b"PK\x03\x04":
            self._fail(f"the entry {short_repr(name)} has no header at its declared position")
        (method,) = struct.unpack_from("<H", header, 8)
        name_length, extra_length = struct.unpack_from("<2H", header, 26)
        if method != 0 or self._at(at + 30, name_length) != name.encode():
            self._fail(f"the header of the entry {short_repr(name)} differs from the directory")
        return at + 30 + name_length + extra_length

    def _at(self, at: int, size: int) -> bytes:
        if at < 0 or at + size > self.size:
            self._fail("it is truncated or broken; download it again")
        self.stream.seek(at)
        return self.stream.read(size)

    def _fail(self, what: str) -> NoReturn:
        raise CheckpointError(f"{self.file} cannot be read: {what}")


class _Interpreter:
    """An interpreter of `torch.save`'s opcodes (pickle protocol 2) that calls nothing.

    The stack holds None, bool, int, float, str, tuple, list, dict with keys of str or int, and the
    four classes above. A dict also represents an OrderedDict.
    """

    def __init__(self, where: str, program: bytes, entries: dict[str, _Entry], data: str):
        self.where, self.program, self.at = where, program, 0
        self.entries, self.data = entries, data
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        try:
            return self._run()
        except (IndexError, struct.error, UnicodeDecodeError) as error:
            self._fail(f"it is broken at byte {self.at} ({error}); download it again")

    def _run(self) -> Any:
        program, actions = self.program, _ACTIONS
        for _ in range(MAX_OPCODES):
            code = program[self.at]
            self.at += 1
            if code == 0x2E:  # STOP
                return self._pop()
            action = actions.get(code)
            if action is None:
                self._refuse_opcode(code)
            action(self)
            if len(self.stack) > MAX_STACK:
                self._fail(f"it holds more than {MAX_STACK} values at once")
        self._fail(f"it has more than {MAX_OPCODES} opcodes")

    def _refuse_opcode(self, code: int) -> NoReturn:
        name = _OPCODE_NAMES.get(code, "unknown")
        called = ""
        if name == "STACK_GLOBAL" and [type(part) for part in self.stack[-2:]] == [str, str]:
            called = f", for {short_repr('.'.join(self.stack[-2:]))}"
        elif name == "INST":
            called = f", for {short_repr(f'{self._line()}.{self._line()}')}"
        self._fail(
            f"torch.save does not write opcode 0x{code:02x} ({name}{called}); it was not run"
        )

    def _fail(self, what: str) -> NoReturn:
        raise CheckpointError(f"{self.where} was rejected: {what}")

    # Values and marks

    def _pop(self) -> Any:
        if not self.stack or (self.marks and len(self.stack) <= self.marks[-1]):
            raise IndexError("the stack is empty")
        return self.stack.pop()

    def _top(self) -> Any:
        value = self._pop()
        self.stack.append(value)
        return value

    def _pop_mark(self) -> list[Any]:
        """Pop the values above the last mark."""
        begin = self.marks.pop()
        values = self.stack[begin:]
        del self.stack[begin:]
        return values

    def _mark(self) -> None:
        if len(self.marks) == MAX_MARKS:
            self._fail(f"it is nested deeper than {MAX_MARKS} levels")
        self.marks.append(len(self.stack))

    def _number(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self.program, self.at)
        self.at += struct.calcsize(form)
        return value

    def _bytes(self, size: int) -> bytes:
        if self.at + size > len(self.program):
            raise IndexError(f"a value of {size} bytes is truncated")
        self.at += size
        return self.program[self.at - size : self.at]

    def _line(self) -> str:
        end = self.program.find(b"\n", self.at, self.at + MAX_NAME)
        if end < 0:
            raise IndexError("a name is truncated")
        line = self.program[self.at : end].decode("utf-8")
        self.at = end + 1
        return line

    def _protocol(self) -> None:
        version = self._number("<B")
        if version != 2:
            self._fail(f"its pickle protocol must be 2, got {version}; {CONVERT}")

    def _unicode(self) -> None:
        size = self._number("<I")
        if size > MAX_STRING:
            self._fail(f"it holds a string of {size} bytes")
        self.stack.append(self._bytes(size).decode("utf-8"))

    def _long(self) -> None:
        self.stack.append(int.from_bytes(self._bytes(self._number("<B")), "little", signed=True))

    # The memo

    def _put(self, key: int) -> None:
        if len(self.memo) == MAX_MEMO and key not in self.memo:
            self._fail(f"it memoizes more than {MAX_MEMO} values")
        self.memo[key] = self._top()

    def _get(self, key: int) -> None:
        if key not in self.memo:
            raise IndexError(f"value {key} is not in the memo")
        self.stack.append(self.memo[key])

    # Containers

    def _tuple_of(self, count: int) -> None:
        self.stack.append(tuple([self._pop() for _ in range(count)][::-1]))

    def _append(self, values: list[Any]) -> None:
        target = self._top()
        if type(target) is not list:
            self._fail("it appends to a value that is not a list")
        target.extend(values)

    def _set_items(self, values: list[Any]) -> None:
        target = self._top()
        if type(target) is not dict or len(values) % 2:
            self._fail("it sets items of a value that is not a dictionary")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if type(key) not in (str, int):  # only these are cheap and safe to hash
                self._fail(f"the key of a dictionary is a {type(key).__name__}")
            if key in target:
                self._fail(f"{short_repr(key)} appears twice")
            target[key] = value

    # Names and calls

    def _global(self) -> None:
        name = f"{self._line()}.{self._line()}"
        known = _GLOBALS.get(name)
        if known is None:
            self._fail(
                f"it refers to {short_repr(name)}, which does not describe a tensor; it was not run"
            )
        self.stack.append(known)

    def _persistent(self) -> None:
        """Push the storage of ('storage', type, key, device, number of elements)."""
        match self._pop():
            case ("storage", _Global("storage", dtype), str(key), str(), int(count)) if (
                dtype is not None and type(count) is int and count >= 0
            ):
                pass
            case _:
                self._fail("a persistent id does not name a storage")
        entry = self.entries.get(self.data + key)
        if entry is None:
            self._fail(f"the storage {short_repr(key)} is not in the file")
        if count * dtype.itemsize != entry.size:
            self._fail(
                f"the storage {short_repr(key)} has {entry.size} bytes, not {count} elements "
                f"of {dtype}"
            )
        self.stack.append(_Storage(dtype, entry))

    def _reduce(self) -> None:
        arguments, callee = self._pop(), self._pop()
        if type(callee) is not _Global or type(arguments) is not tuple:
            self._fail(f"it calls a {type(callee).__name__}; it was not run")
        match callee.name, arguments:
            case "collections.OrderedDict", ():
                made = {}
            case "torch.Size", (tuple() | list() as sizes,):
                made = tuple(sizes)
            case "torch._utils._rebuild_parameter", (_Tensor() as tensor, _, _):
                made = tensor
            case "torch._utils._rebuild_parameter_with_state", (_Tensor() as tensor, _, _, _):
                made = tensor
            case "torch._utils._rebuild_tensor", (_, _, _, _):
                made = self._tensor(*arguments)
            case "torch._utils._rebuild_tensor_v2", (_, _, _, _, _, _, *rest) if len(rest) < 2:
                self._check_metadata(rest)
                made = self._tensor(*arguments[:4])
            case (
                "torch._utils._rebuild_tensor_v3",
                (_, _, _, _, _, _, _Global("dtype", dtype), *rest),
            ) if dtype is not None and len(rest) < 2:
                self._check_metadata(rest)
                made = self._tensor(*arguments[:4], dtype=dtype)
            case name, _:
                self._fail(f"{name} has arguments that do not describe a tensor")
        self.stack.append(made)

    def _check_metadata(self, rest: list[Any]) -> None:
        """Reject conjugated or negated views, because the flags would be ignored."""
        if rest and rest[0] not in (None, {}):
            self._fail("a tensor has metadata, which is not supported")

    def _tensor(
        self, storage: Any, offset: Any, shape: Any, strides: Any, dtype: np.dtype | None = None
    ) -> _Tensor:
        what = f"tensor {self._latest_string()}"
        if type(storage) is not _Storage or type(shape) is not tuple or type(strides) is not tuple:
            self._fail(f"{what} must have a storage, a shape and strides")
        numbers = (offset, *shape, *strides)
        if any(type(n) is not int or not 0 <= n < 2**63 for n in numbers):
            self._fail(f"{what} of shape {short_repr(shape)} has an invalid size, offset or stride")
        if len(shape) != len(strides) or len(shape) > MAX_DIMENSIONS:
            self._fail(f"{what} of shape {short_repr(shape)} has {len(strides)} strides")
        dtype = dtype or storage.dtype
        count = storage.entry.size // dtype.itemsize
        size = math.prod(shape)  # Python integers do not overflow
        if any(n > 1 and stride == 0 for n, stride in zip(shape, strides, strict=True)):
            self._fail(
                f"{what} of shape {short_repr(shape)} repeats its elements (an expanded view)"
            )
        if size > count or (size and offset + span_of(shape, strides) > count):
            self._fail(
                f"{what} of shape {short_repr(shape)}, strides {short_repr(strides)} and "
                f"offset {offset} extends beyond its storage of {count} elements"
            )
        return _Tensor(dtype, shape, strides, storage.entry.offset + offset * dtype.itemsize)

    def _latest_string(self) -> str:
        """Return the key of the tensor being read, for messages."""
        strings = (value for value in self.stack[-1:-9:-1] if type(value) is str)
        return short_repr(next(strings, "without a name"))

    def _build(self) -> None:
        """Ignore an OrderedDict's attributes, such as `_metadata` (module versions)."""
        state, target = self._pop(), self._top()
        if type(target) is not dict or type(state) is not dict:
            self._fail("it sets the state of a value that is not a dictionary; it was not run")


_Action = Callable[[_Interpreter], None]


def _push(value: Any) -> _Action:
    return lambda i: i.stack.append(value)


def _push_number(form: str) -> _Action:
    return lambda i: i.stack.append(i._number(form))


_ACTIONS: dict[int, _Action] = {
    ord("("): _Interpreter._mark,
    ord(")"): _push(()),
    ord("]"): lambda i: i.stack.append([]),
    ord("}"): lambda i: i.stack.append({}),
    ord("a"): lambda i: i._append([i._pop()]),
    ord("e"): lambda i: i._append(i._pop_mark()),
    ord("s"): lambda i: i._set_items([i._pop(), i._pop()][::-1]),
    ord("u"): lambda i: i._set_items(i._pop_mark()),
    ord("t"): lambda i: i.stack.append(tuple(i._pop_mark())),
    0x85: lambda i: i._tuple_of(1),
    0x86: lambda i: i._tuple_of(2),
    0x87: lambda i: i._tuple_of(3),
    ord("N"): _push(None),
    0x88: _push(True),
    0x89: _push(False),
    ord("J"): _push_number("<i"),
    ord("K"): _push_number("<B"),
    ord("M"): _push_number("<H"),
    ord("G"): _push_number(">d"),
    0x8A: _Interpreter._long,
    ord("X"): _Interpreter._unicode,
    ord("q"): lambda i: i._put(i._number("<B")),
    ord("r"): lambda i: i._put(i._number("<I")),
    ord("h"): lambda i: i._get(i._number("<B")),
    ord("j"): lambda i: i._get(i._number("<I")),
    ord("c"): _Interpreter._global,
    ord("Q"): _Interpreter._persistent,
    ord("R"): _Interpreter._reduce,
    ord("b"): _Interpreter._build,
    0x80: _Interpreter._protocol,
}

_OPCODE_NAMES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}  # for messages
