"""The folder of compiled executables, and the checks that it must pass."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import sys
import zlib
from pathlib import Path

from forge_kernels.private_files import file_fault, foreign_write_fault

ENTRIES = "*-cache"  # JAX's file names of executables
LOOKED = ".looked"  # its mtime is the start of the last scan
ZSTD = b"\x28\xb5\x2f\xfd"

log = logging.getLogger(__name__)


def default_cache_folder() -> Path:
    """Return the compilation cache's folder, unless a flag or JAX's own setting names another."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "forge-jax" / "xla"


def is_url(place: str | None) -> bool:
    """Return True for a bucket (`gs://...`), which JAX accepts as a cache and which has no mode."""
    return place is not None and "://" in place


def foreign_entries_fault(folder: Path) -> str | None:
    """Remove files that other users wrote, or can write to.

    They may have been put there before the folder became private, and JAX executes cache entries.

    Returns:
      A description of an entry that cannot be removed, or None.
    """
    for base, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(base, name)
            try:
                status = path.lstat()
                if stat.S_ISDIR(status.st_mode):
                    fault = foreign_write_fault(path)
                    if fault is not None:
                        return f"{path} in it: {fault}"
                    continue
                fault = file_fault(status)
                if fault is not None:
                    path.unlink()
                    log.warning("removed from the compilation cache: %s: %s", path.name, fault)
            except FileNotFoundError:  # another process has removed it
                pass
            except OSError as error:
                return f"{path} in it cannot be removed: {error.strerror}"
    return None


def drop_broken_entries(folder: Path) -> None:
    """Remove cache entries that a process was writing when it was killed.

    JAX writes entries in place and never replaces them. Every start would fail to read such an
    entry, warn and compile again. Only entries written since the last scan are checked. An entry
    that another process is writing may also be removed, which costs at most one compilation.
    """
    mark, begun = folder / LOOKED, folder / f"{LOOKED}-new"
    with contextlib.suppress(FileNotFoundError):  # another process has also scanned
        begun.touch()
        since = mark.stat().st_mtime_ns if mark.exists() else 0
        for file in folder.glob(ENTRIES):
            _drop_if_broken(file, since)
        begun.replace(mark)  # only at the end, so that an interrupted scan is repeated


def _drop_if_broken(file: Path, since: int) -> None:
    try:
        if file.stat().st_mtime_ns >= since and not _is_whole(file.read_bytes()):
            file.unlink()
            log.warning("removed an incomplete compiled executable: %s", file.name)
    except FileNotFoundError:  # another process has removed it
        pass
    except OSError as error:
        log.warning("cannot read a compiled executable: %s: %s", file.name, error.strerror)


def _is_whole(data: bytes) -> bool:
    if data[:1] == b"\x78":
        decompressor, broken = zlib.decompressobj(), zlib.error
    elif sys.version_info >= (3, 14) and data.startswith(ZSTD):
        from compression import zstd

        decompressor, broken = zstd.ZstdDecompressor(), zstd.ZstdError
    else:  # unknown compression, which cannot be checked
        return bool(data)
    try:
        decompressor.decompress(data)
    except broken:
        return False
    return decompressor.eof
