"""Where compiled executables are kept, and what a folder for them must be."""

from __future__ import annotations

import os
from pathlib import Path


def default_cache_folder() -> Path:
    """Of the compilation cache, unless a flag or JAX's own setting names another."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "forge-jax" / "xla"


def private_folder_fault(folder: Path) -> str | None:
    """Makes the folder if there is none; what is wrong with it, and what to do."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        return error.strerror or str(error)
    if status.st_uid != os.getuid():
        return "belongs to another user: name a folder of your own"
    if status.st_mode & 0o022:
        return "others can write to it: chmod 700 it, or name another"
    if not os.access(folder, os.W_OK | os.X_OK):
        return "it cannot be written to: chmod 700 it, or name another"
    return None
