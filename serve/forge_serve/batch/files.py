"""Input file, read as a stream, and output file, written by whole lines.

Each line that is not in progress takes nine bytes of memory: a hash of its text and a flag that it
is done. A hash of its id takes eight more while ids are compared.
"""

from __future__ import annotations

import codecs
import fcntl
import os
import stat
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from forge_serve.batch.errors import BatchFileError, LineError
from forge_serve.batch.formats import Line, LineFormat, OpenAIFormat, format_of

_CHUNK = 1024 * 1024


class Input:
    """Batch file. The constructor scans it once for the number of lines and their format.

    Args:
      path: the file.
      max_line_bytes: maximum length of a line. The contents of longer lines are skipped.

    Raises:
      BatchFileError: the file cannot be read, or two of its lines have the same id.
    """

    def __init__(self, path: Path, max_line_bytes: int):
        self.path = path
        self.num_requests = 0  # non-empty lines
        self._max_line_bytes = max_line_bytes
        # Hashes of each line and its id. 0 is an empty line, or a line without an id.
        self._digests, ids = array("Q"), array("Q")
        line_format: LineFormat | None = None
        for line in self._lines():
            if line_format is None and line.digest:
                line_format = format_of(line)
            name = None if line_format is None else _id(line_format, line)
            self._digests.append(line.digest)
            ids.append(0 if name is None else _digest(msgspec.json.encode(name)))
            self.num_requests += bool(line.digest)
        self.line_format: LineFormat = line_format or OpenAIFormat()
        self._check_ids(ids)
        self._done = bytearray(len(self._digests))

    def mark_done(self, number: int, digest: int) -> bool:
        """Mark a line as done. Return False if the file has no such line."""
        if not 1 <= number <= len(self._digests) or self._digests[number - 1] != digest:
            return False
        self._done[number - 1] = 1
        return True

    def open_lines(self) -> Iterator[Line]:
        """Yield the lines that are not done.

        Raises:
          BatchFileError: the file changed since it was scanned.
        """
        for i, line in enumerate(self._lines()):
            if i >= len(self._digests) or line.digest != self._digests[i]:
                raise BatchFileError(f"{self.path} changed while it was being read")
            if line.digest and not self._done[i]:
                yield line

    def _lines(self) -> Iterator[Line]:
        with _readable(self.path) as file:
            number = 0
            while data := file.readline(self._max_line_bytes + 1):
                number += 1
                if number == 1:
                    data = data.removeprefix(codecs.BOM_UTF8)
                if len(data) <= self._max_line_bytes or data.endswith(b"\n"):
                    text = data.strip()
                    yield Line(number, _digest(text) if text else 0, text)
                    continue
                hasher = blake2b(data, digest_size=8)
                while (more := file.readline(_CHUNK)) and not more.endswith(b"\n"):
                    hasher.update(more)
                hasher.update(more.rstrip())
                yield Line(number, int.from_bytes(hasher.digest()) or 1, None)

    def _check_ids(self, ids: array[int]) -> None:
        """Reject duplicate ids, because responses could not be matched to requests."""
        hashes = np.sort(np.frombuffer(ids, np.uint64)) if ids else np.zeros(0, np.uint64)
        twice = set(hashes[1:][(hashes[1:] == hashes[:-1]) & (hashes[1:] != 0)].tolist())
        if not twice:
            return
        first = dict[str | int, int]()
        for line, value in zip(self._lines(), ids, strict=True):
            name = _id(self.line_format, line) if value in twice else None
            if name is None:
                continue
            if name in first:
                raise BatchFileError(
                    f"{self.path}, line {line.number}: duplicate {self.line_format.id_name} "
                    f"{name!r}, first used in line {first[name]}: make it unique"
                )
            first[name] = line.number


class Output:
    """Output file, opened for appending. Only one process can open it at a time.

    Responses of earlier runs are kept, and their requests are marked as done in the input. An
    incomplete last line is removed.

    Args:
      path: the file.
      lines: the input.

    Raises:
      BatchFileError: the file cannot be written, or has lines that do not belong to this input.
    """

    def __init__(self, path: Path, lines: Input):
        self.path = path
        self.num_found = 0  # responses of earlier runs
        try:
            if path.exists() and path.samefile(lines.path):
                raise BatchFileError(f"{path} is the input: use another file for the output")
            self._file = path.open("a+b")
        except OSError as error:
            raise _failed("write", path, error) from error
        try:
            self._lock()
            self._find_answers(lines)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            with self._file:
                self._file.flush()
                os.fsync(self._file.fileno())
        except OSError as error:
            raise _failed("write", self.path, error) from error

    def write(self, line: bytes) -> None:
        """Write a line and flush it, so that it survives the end of this process."""
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            raise _failed("write", self.path, error) from error

    def _lock(self) -> None:
        mode = os.fstat(self._file.fileno()).st_mode
        if not stat.S_ISREG(mode):
            raise BatchFileError(
                f"{self.path} is not a regular file, so the run could not be resumed"
            )
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BatchFileError(f"{self.path}: another process is writing to it") from error

    def _find_answers(self, lines: Input) -> None:
        line_format, end = lines.line_format, 0
        self._file.seek(0)
        for number, data in enumerate(self._file, start=1):
            whole = data.endswith(b"\n")
            if not whole:
                ours = data.startswith(line_format.beginning) or line_format.beginning.startswith(
                    data
                )
                answered = None
            else:
                answered = line_format.answered(data)
                ours = answered is not None
            if not ours:
                raise BatchFileError(
                    f"{self.path}, line {number}: not a response to a line of {lines.path}: "
                    "use another file for the output"
                )
            if answered is None:
                break
            if not lines.mark_done(*answered):
                raise BatchFileError(
                    f"{self.path}, line {number}: this response belongs to a line {answered[0]} "
                    f"that is not in {lines.path}: use another file for the output"
                )
            self.num_found += 1
            end += len(data)
        self._file.truncate(end)
        self._file.seek(0, os.SEEK_END)


def _id(line_format: LineFormat, line: Line) -> str | int | None:
    try:
        return line_format.id_of(line) if line.digest else None
    except LineError:
        return None


@contextmanager
def _readable(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise BatchFileError(f"{path} must be a regular file, because it is read twice")
            yield file
    except OSError as error:
        raise _failed("read", path, error) from error


def _digest(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest()) or 1


def _failed(verb: str, path: Path, error: OSError) -> BatchFileError:
    return BatchFileError(f"cannot {verb} {path}: {error.strerror or type(error).__name__}")
