"""The kernels in this process: loaded and made known to XLA once."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from pathlib import Path

import jax

from forge_kernels.cpu.build import (
    ISAS,
    BuildError,
    CompilerTooOld,
    build,
    cpu_features,
    runnable_isas,
)
from forge_kernels.cpu.choice import Choice, choose
from forge_kernels.private_files import open_private

TARGETS = (
    *("forge_linear", "forge_experts", "forge_embed"),
    *("forge_rotate_write", "forge_attention", "forge_sample"),
)

log = logging.getLogger(__name__)


def load(isa: str | None = None, folder: Path | None = None) -> str:
    """Builds the kernels if need be and registers them with XLA; returns the instruction set.

    The first call of a process decides: later ones return the same.

    Args:
      isa: a name in `build.ISAS`; by default the fastest that the CPU has.
      folder: where built libraries are kept.

    Raises:
      BuildError: they cannot be had on this machine; the message says why.
    """
    loaded = _library()
    if loaded is None:
        why, path = _fastest(folder) if isa is None else _asked_for(isa, folder)
        try:
            loaded = _load_private(path)
        except OSError as error:  # a file system that nothing may be run from, another libc
            raise BuildError(f"{path} could not be loaded: {error}") from error
        for name in TARGETS:
            handler = jax.ffi.pycapsule(getattr(loaded, name))
            jax.ffi.register_ffi_target(name, handler, platform="cpu")
        loaded.forge_isa.restype = ctypes.c_char_p
        loaded.forge_pack.restype = None
        _loaded.append((loaded, path.stem, why))
        log.info("CPU kernels: %s", why)
    return loaded.forge_isa().decode()


def _fastest(folder: Path | None) -> tuple[Choice, Path]:
    """The fastest instruction set that the compiler has flags for, and its library."""
    features = cpu_features()
    fastest = choose(features, folder)
    isas = runnable_isas(features)
    for isa in isas[isas.index(fastest.isa) :]:
        try:
            return (fastest if isa == fastest.isa else Choice(isa)), build(isa, folder)
        except CompilerTooOld as error:
            log.warning("no %s in the CPU kernels: %s", isa, error)
            if isa == isas[-1]:
                raise
    raise AssertionError("the last instruction set is built or raises")


def _asked_for(isa: str, folder: Path | None) -> tuple[Choice, Path]:
    runnable = runnable_isas(cpu_features())
    if isa not in runnable:
        what = f"this CPU does not run {isa}" if isa in ISAS else f"there is no {isa}"
        raise BuildError(f"{what}: name one of {', '.join(runnable)}")
    return Choice(isa), build(isa, folder)


def available(isa: str | None = None) -> bool:
    """True if the kernels can be used here; says once in the log what is lost if not.

    Raises:
      BuildError: `isa` is named and cannot be used: the CPU, the compiler, or this process, which
        has loaded another, do not allow it.
    """
    if isa is None:
        return _why_not() is None
    loaded = load(isa)
    if loaded != isa:
        raise BuildError(f"this process has loaded {loaded}: use {isa} in a process of its own")
    return True


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


# With its name, without a suffix, and why it was chosen.
_loaded: list[tuple[ctypes.CDLL, str, Choice]] = []


def _library() -> ctypes.CDLL | None:
    return _loaded[0][0] if _loaded else None


def identity() -> str | None:
    """Names what has been loaded: its instruction set, sources, compiler and flags."""
    return _loaded[0][1] if _loaded else None


def chosen() -> Choice | None:
    """The instruction set that has been loaded, and what was measured for it."""
    return _loaded[0][2] if _loaded else None


def library() -> ctypes.CDLL:
    """The loaded library."""
    loaded = _library()
    assert loaded is not None, "the CPU kernels have not been loaded"
    return loaded


def num_threads() -> int:
    """Threads that this process may run at the same time."""
    return len(os.sched_getaffinity(0))
