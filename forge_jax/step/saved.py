"""Executables that starts save, and that later starts of the same engine load.

Each engine has a folder in the compile cache. Its name is a hash of everything that determines the
executables. An executable's file begins with its entry, a line of JSON, as in a bundle's manifest
(`forge_jax.step.bundle`). Loading neither traces nor unpickles.

Files are complete, because they get their names after they are written. Several processes may save
the same executables.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import threading
from pathlib import Path
from typing import Any

import jax
import msgspec

from forge_jax.step.bundle import (
    BundleError,
    Entry,
    Stored,
    file_name,
    read_private,
    serialize,
    tree_of,
    write_private,
)
from forge_kernels.private_files import make_private_folder, open_private

MOST_ENGINES = 16  # folders; the least recently used ones are removed
LONGEST_ENTRY = 1 << 20  # bytes of JSON

log = logging.getLogger(__name__)


class SavedExecutables:
    """The executables in an engine's folder, which need not exist.

    Args:
      folder: only this user may write to the folder around it.
      device: the device that loads them.
    """

    def __init__(self, folder: Path, device: jax.Device):
        self.folder = folder
        self._device = device
        self._lock = threading.Lock()
        self._warned = False
        with contextlib.suppress(OSError):  # there is none at the first start
            os.utime(folder)  # it is in use

    def find(self, name: str, args: tuple[Any, ...]) -> Stored | None:
        """Return an executable for the shapes `args`; None if none was saved."""
        file = self.folder / file_name(name)
        try:
            arguments = tree_of(args)
            with open(open_private(file), "rb") as stream:
                entry = msgspec.json.decode(stream.readline(LONGEST_ENTRY), type=Entry)
        except (FileNotFoundError, BundleError):
            return None
        except OSError as error:
            self._remove(file, error.strerror or str(error))
            return None
        except msgspec.MsgspecError as error:
            self._remove(file, str(error))
            return None
        if entry.arguments != arguments:
            self._remove(file, "its arguments have other shapes")
            return None
        return Stored(self, entry, args, self._device)

    def save(self, name: str, compiled: jax.stages.Compiled) -> None:
        """Save an executable, unless its arguments do not determine it. Log failures."""
        partial = self.folder / f".{secrets.token_hex(8)}.partial"
        try:
            data, entry = serialize(name, compiled)
            self._make_folder()
            write_private(partial, msgspec.json.encode(entry) + b"\n" + data)
            partial.replace(self.folder / entry.file)
        except BundleError as error:
            log.debug("not saved: %s", error)
        except OSError as error:
            self._warn(f"{name} was not saved: {error.strerror or error}")
            with contextlib.suppress(OSError):
                partial.unlink()

    def read(self, entry: Entry) -> bytes:
        return read_private(self.folder / entry.file).partition(b"\n")[2]

    def failed(self, entry: Entry, reason: str) -> None:
        self._remove(self.folder / entry.file, reason)

    def _remove(self, file: Path, reason: str) -> None:
        """Remove a file that cannot be loaded. Otherwise every start would warn."""
        self._warn(f"{file.name} is compiled again, because it cannot be loaded: {reason}")
        with contextlib.suppress(OSError):  # it may belong to root
            file.unlink()

    def _warn(self, reason: str) -> None:
        """Log why something is compiled, or is not saved. Only the first reason is logged."""
        with self._lock:
            if not self._warned:
                log.warning("saved executables %s: %s", self.folder, reason)
            self._warned = True

    def _make_folder(self) -> None:
        with self._lock:
            if self.folder.is_dir():
                return
            make_private_folder(self.folder)
            _remove_oldest(self.folder.parent)


def _remove_oldest(folder: Path) -> None:
    """Remove the least recently used engines, until `MOST_ENGINES` are left."""

    def used(engine: Path) -> float:
        try:
            return engine.stat().st_mtime
        except FileNotFoundError:  # another process has removed it
            return 0.0

    engines = sorted((each for each in folder.iterdir() if each.is_dir()), key=used)
    for engine in engines[:-MOST_ENGINES]:
        shutil.rmtree(engine, ignore_errors=True)
