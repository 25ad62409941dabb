"""Where compiled executables are kept, and what a folder for them must be."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import sys
import zlib
from pathlib import Path

from forge_kernels.private_files import file_fault, foreign_write_fault

ENTRIES = "*-cache"  # JAX's names of executables
LOOKED = ".looked"  # its time: when the last look at the entries began
ZSTD = b"\x28\xb5\x2f\xfd"

log = logging.getLogger(__name__)


def default_cache_folder() -> Path:
    """Of the compilation cache, unless a flag or JAX's own setting names another."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "forge-jax" / "xla"


def is_url(place: str | None) -> bool:
    """True of a bucket (`gs://...`), which JAX takes for a cache and which has no mode."""
    return place is not None and "://" in place


def foreign_entries_fault(folder: Path) -> str | None:
    """Remove files that others wrote, or can write to. Return what cannot be removed, or None.

    They may have been put there before the folder became private, and JAX runs what it finds.
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
    """Removes entries of the compilation cache that a process was killed in the middle of writing.

    JAX writes them in place, and never again what is there: every start would fail to read it, warn
    and compile anew. Looked at is what has been written since the last look. One that another
    process is writing just now may go, too, which costs no more than a compilation.
    """
    mark, begun = folder / LOOKED, folder / f"{LOOKED}-new"
    with contextlib.suppress(FileNotFoundError):  # another process has looked, too
        begun.touch()
        since = mark.stat().st_mtime_ns if mark.exists() else 0
        for file in folder.glob(ENTRIES):
            _drop_if_broken(file, since)
        begun.replace(mark)  # not before the end: who is killed while he looks has not looked


def _drop_if_broken(file: Path, since: int) -> None:
    try:
        if file.stat().st_mtime_ns >= since and not _is_whole(file.read_bytes()):
            file.unlink()
            log.warning("removed half of a compiled executable: %s", file.name)
    except FileNotFoundError:  # another process has removed it
        pass
    except OSError as error:
        log.warning("cannot look at a compiled executable: %s: %s", file.name, error.strerror)


def _is_whole(data: bytes) -> bool:
    if data[:1] == b"\x78":
        decompressor, broken = zlib.decompressobj(), zlib.error
    elif sys.version_info >= (3, 14) and data.startswith(ZSTD):
        from compression import zstd

        decompressor, broken = zstd.ZstdDecompressor(), zstd.ZstdError
    else:  # in another form, which cannot be looked into here
        return bool(data)
    try:
        decompressor.decompress(data)
    except broken:
        return False
    return decompressor.eof
