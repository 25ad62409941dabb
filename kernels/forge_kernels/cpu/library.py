"""The kernels in this process: loaded and made known to XLA once."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from pathlib import Path

import jax

from forge_kernels.cpu.build import BuildError, best_isa, build, cpu_features
from forge_kernels.private_files import open_private

TARGETS = (
    *("forge_linear", "forge_experts", "forge_embed"),
    *("forge_rotate_write", "forge_attention", "forge_sample", "forge_untouched"),
)

log = logging.getLogger(__name__)


def load(isa: str | None = None, folder: Path | None = None) -> str:
    """Builds the kernels if need be and registers them with XLA; returns the instruction set.

    The first call of a process decides: later ones return the same.

    Args:
      isa: "avx512" or "avx2"; the best that the CPU has by default.
      folder: where built libraries are kept.

    Raises:
      BuildError: they cannot be had on this machine; the message says why.
    """
    loaded = _library()
    if loaded is None:
        path = build(isa or best_isa(cpu_features()), folder)
        try:
            loaded = _load_private(path)
        except OSError as error:  # a file system that nothing may be run from, another libc
            raise BuildError(f"{path} could not be loaded: {error}") from error
        for name in TARGETS:
            handler = jax.ffi.pycapsule(getattr(loaded, name))
            jax.ffi.register_ffi_target(name, handler, platform="cpu")
        loaded.forge_isa.restype = ctypes.c_char_p
        loaded.forge_pack.restype = None
        loaded.forge_read_files.restype = None
        _loaded.append((loaded, path.stem))
    return loaded.forge_isa().decode()


def available() -> bool:
    """Whether the kernels can be used here; says once in the log what is lost if not."""
    return _why_not() is None


@functools.cache
def _why_not() -> str | None:
    try:
        load()
    except BuildError as error:
        log.warning("no CPU kernels, plain XLA is about half as fast: %s", error)
        return str(error)
    return None


def _load_private(path: Path) -> ctypes.CDLL:
    """Load the file that has been checked, whatever has its name by now.

    Its descriptor stays open: the loader returns an earlier library of the same name, and this name
    has the descriptor's number.
    """
    descriptor = open_private(path)
    opened = Path(f"/proc/self/fd/{descriptor}")
    try:
        return ctypes.CDLL(str(opened if opened.exists() else path))
    except OSError:
        os.close(descriptor)
        raise


_loaded: list[tuple[ctypes.CDLL, str]] = []  # and its name, without a suffix


def _library() -> ctypes.CDLL | None:
    return _loaded[0][0] if _loaded else None


def identity() -> str | None:
    """Names what has been loaded: its instruction set, sources, compiler and flags."""
    return _loaded[0][1] if _loaded else None


def library() -> ctypes.CDLL:
    """The loaded library."""
    loaded = _library()
    assert loaded is not None, "the CPU kernels have not been loaded"
    return loaded


def num_threads() -> int:
    """Threads that this process may run at the same time."""
    return len(os.sched_getaffinity(0))
