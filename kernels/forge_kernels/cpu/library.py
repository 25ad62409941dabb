"""The kernels' library in this process, loaded and registered with XLA once."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import logging
import os
from pathlib import Path

import jax

from forge_kernels.cpu.build import (
    ISAS,
    BuildError,
    CompilerTooOld,
    NewBar,
    build,
    cpu_features,
    runnable_isas,
)
from forge_kernels.cpu.choice import ALL_TILES, Choice, Tiles, choose, choose_tiles
from forge_kernels.private_files import open_private

TARGETS = (
    *("forge_linear", "forge_experts", "forge_lora", "forge_embed"),
    *("forge_rotate_write", "forge_attention", "forge_sample", "forge_untouched"),
)

log = logging.getLogger(__name__)


def load(isa: str | None = None, folder: Path | None = None, new_bar: NewBar | None = None) -> str:
    """Build the kernels if needed, register them with XLA, and return the instruction set.

    The first call in a process decides; later calls return the same.

    Args:
      isa: a name in `build.ISAS`, without AMX; or "amx", the fastest of these with AMX wherever it
        can be used. The default is the fastest by measurement.
      folder: the folder of built libraries.
      new_bar: makes a progress bar for a build.

    Raises:
      BuildError: they are not available on this machine; the message has the cause.
    """
    loaded = _library()
    if loaded is None:
        named = None if isa == "amx" else isa
        why, path = (
            _fastest(folder, new_bar) if named is None else _asked_for(named, folder, new_bar)
        )
        try:
            loaded = _load_private(path)
        except OSError as error:  # such as a file system mounted noexec, or another libc
            raise BuildError(f"{path} could not be loaded: {error}") from error
        tiles = _tiles(loaded, path, isa, folder) if named is None else None
        why = dataclasses.replace(why, tiles=tiles)
        for name in TARGETS:
            handler = jax.ffi.pycapsule(getattr(loaded, name))
            jax.ffi.register_ffi_target(name, handler, platform="cpu")
        loaded.forge_isa.restype = ctypes.c_char_p
        loaded.forge_pack.restype = None
        loaded.forge_read_files.restype = None
        identity = path.stem if tiles is None else f"{path.stem}-amx-{tiles.bf16}-{tiles.int8}"
        _loaded.append((loaded, identity, why))
        log.info("CPU kernels: %s", why)
    return loaded.forge_isa().decode()


def _fastest(folder: Path | None, new_bar: NewBar | None = None) -> tuple[Choice, Path]:
    """Return the fastest instruction set that the compiler supports, and its library."""
    features = cpu_features()
    fastest = choose(features, folder)
    isas = runnable_isas(features)
    for isa in isas[isas.index(fastest.isa) :]:
        try:
            return (fastest if isa == fastest.isa else Choice(isa)), build(isa, folder, new_bar)
        except CompilerTooOld as error:
            log.warning("the CPU kernels do without %s: %s", isa, error)
            if isa == isas[-1]:
                raise
    raise AssertionError("the last instruction set is either built or raises")


def _tiles(loaded: ctypes.CDLL, path: Path, isa: str | None, folder: Path | None) -> Tiles | None:
    """Let the library use AMX if the CPU has it and the system allows it."""
    if not loaded.forge_request_tiles():
        if isa == "amx":
            raise BuildError(
                "this CPU has no AMX with bfloat16 and int8, or the system does not allow it"
            )
        return None
    tiles = ALL_TILES if isa == "amx" else choose_tiles(loaded, path.stem, folder)
    rows = (-1 if rows is None else rows for rows in dataclasses.astuple(tiles))
    loaded.forge_use_tiles(*(ctypes.c_int64(each) for each in rows))
    return tiles


def _asked_for(isa: str, folder: Path | None, new_bar: NewBar | None = None) -> tuple[Choice, Path]:
    runnable = runnable_isas(cpu_features())
    if isa not in runnable:
        what = f"this CPU does not run {isa}" if isa in ISAS else f"{isa} does not exist"
        raise BuildError(f"{what}: choose one of {', '.join(runnable)}")
    return Choice(isa), build(isa, folder, new_bar)


def available(isa: str | None = None, new_bar: NewBar | None = None) -> bool:
    """Return True if the kernels can be used; otherwise log a warning once.

    Args:
      isa, new_bar: as in `load`.

    Raises:
      BuildError: `isa` is given but cannot be used, because of the CPU, the compiler, or another
        instruction set that this process has loaded.
    """
    if isa is None:
        return _why_not(new_bar) is None
    load(isa, new_bar=new_bar)
    found = chosen()
    assert found is not None
    fits = found.tiles == ALL_TILES if isa == "amx" else found.isa == isa and found.tiles is None
    if not fits:
        raise BuildError(f"this process has loaded {found.isa}: use {isa} in another process")
    return True


@functools.cache
def _why_not(new_bar: NewBar | None) -> str | None:
    try:
        load(new_bar=new_bar)
    except BuildError as error:
        log.warning("no CPU kernels, so bfloat16 models run about half as fast: %s", error)
        return str(error)
    return None


def _load_private(path: Path) -> ctypes.CDLL:
    """Load the file that was checked, even if its name has been replaced.

    The descriptor stays open, because the loader returns an earlier library of the same name, and
    this name contains the descriptor's number.
    """
    descriptor = open_private(path)
    opened = Path(f"/proc/self/fd/{descriptor}")
    try:
        return ctypes.CDLL(str(opened if opened.exists() else path))
    except OSError:
        os.close(descriptor)
        raise


# The library, its name (with the rows from which AMX is used), and why it was chosen.
_loaded: list[tuple[ctypes.CDLL, str, Choice]] = []


def _library() -> ctypes.CDLL | None:
    return _loaded[0][0] if _loaded else None


def identity() -> str | None:
    """Return a name of the loaded library: instruction set, hash and use of AMX; or None."""
    return _loaded[0][1] if _loaded else None


def chosen() -> Choice | None:
    """Return the loaded instruction set and its measurements, or None."""
    return _loaded[0][2] if _loaded else None


def library() -> ctypes.CDLL:
    """Return the loaded library."""
    loaded = _library()
    assert loaded is not None, "the CPU kernels have not been loaded"
    return loaded


def num_threads() -> int:
    """Return the number of threads that this process may run at the same time."""
    return len(os.sched_getaffinity(0))
