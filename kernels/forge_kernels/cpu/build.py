"""Builds the C++ kernels with the platform's compiler, once, into the user's cache.

The library's file name has a hash of its sources, jaxlib's version (for its headers), the compiler
and the flags. A change of any of these builds a new library, and two versions never mix. The
library is loaded into the process, so only this user or root may write to it and its folder.
Processes that start together wait for the one that builds.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Protocol

from forge_kernels.private_files import foreign_write_fault, make_private_folder, open_private

SOURCES = Path(__file__).parent / "src"
# Only the FMAs in the sources, so that a result's bits depend neither on the compiler nor on -O.
FLAGS = ("-O2", "-ffp-contract=off", "-DNDEBUG", "-std=c++17", "-fPIC", "-shared", "-pthread")

UNITS = ("kernels.cc", "rounded.cc", "amx.cc")

_AVX2 = "avx2 fma f16c"
_AVX512 = f"avx512f avx512bw avx512vl avx512dq {_AVX2}"
# The features that each instruction set needs, as named in /proc/cpuinfo, best first. `flags_of`
# derives the compiler's flags from them.
ISAS: dict[str, frozenset[str]] = {
    "avx512_bf16": frozenset(f"{_AVX512} avx512_vnni avx512_bf16".split()),
    "avx512_vnni": frozenset(f"{_AVX512} avx512_vnni".split()),
    "avx512": frozenset(_AVX512.split()),
    "avx2_vnni": frozenset(f"{_AVX2} avx_vnni".split()),
    "avx2": frozenset(_AVX2.split()),
}

# The messages of GCC and Clang.
UNKNOWN_FLAG = re.compile(r"unrecognized command[- ]line option|unknown argument", re.IGNORECASE)

REFRESH_S = 0.5  # interval in which a progress bar shows the elapsed time

log = logging.getLogger(__name__)


class Bar(Protocol):
    """A progress bar, such as tqdm's."""

    def update(self, n: float) -> object: ...

    def refresh(self) -> object: ...


NewBar = Callable[[int], contextlib.AbstractContextManager[Bar]]


class BuildError(Exception):
    """The kernels are not available on this machine; the message has the cause and a remedy."""


class CompilerTooOld(BuildError):
    """The compiler has no flag for an instruction set."""


def cpu_features() -> frozenset[str]:
    """Return the CPU's features as Linux names them; empty if /proc/cpuinfo has none."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()


def cpu_identity() -> str:
    """Return the CPU's model and features from /proc/cpuinfo, for which measurements are valid."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    found = {line.partition(":")[0].strip(): line.partition(":")[2] for line in reversed(lines)}
    return found.get("model name", "") + " ".join(sorted(found.get("flags", "").split()))


def runnable_isas(features: Iterable[str]) -> list[str]:
    """Return the instruction sets that a CPU with `features` can run, best first.

    Raises:
      BuildError: the kernels support none of them.
    """
    features = frozenset(features)
    found = [isa for isa, needed in ISAS.items() if needed <= features]
    if not found:
        raise BuildError("the CPU kernels need a CPU with AVX2, FMA and F16C")
    return found


def flags_of(isa: str) -> tuple[str, ...]:
    """Return the compiler's flags for an instruction set."""
    return (*FLAGS, *(f"-m{name.replace('_', '')}" for name in sorted(ISAS[isa])))


def find_compiler() -> list[str]:
    """Return the command of a C++ compiler: $CXX, or the first of c++, g++ and clang++.

    Raises:
      BuildError: there is none.
    """
    given = shlex.split(os.environ.get("CXX", ""))
    for command in [given] if given else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    raise BuildError(
        f"no C++ compiler ({given[0] if given else 'c++, g++ or clang++'}): install g++"
    )


def default_folder() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "forge-jax" / "kernels"


def build(isa: str, folder: Path | None = None, new_bar: NewBar | None = None) -> Path:
    """Return the shared library for one instruction set, from the cache or built now.

    A library that another user owns or can write to is built again.

    Args:
      new_bar: makes a progress bar of this many compiler runs, if the library is built.

    Raises:
      BuildError: there is no compiler, it failed (with its last lines), or others can write to the
        folder.
    """
    import jax

    folder = default_folder() if folder is None else folder
    compiler = find_compiler()
    flags = flags_of(isa)
    try:
        make_cache(folder)
        path = folder / f"{isa}-{_key(compiler, flags)}.so"
        if _is_usable(path):
            return path
        with one_at_a_time(folder), tempfile.TemporaryDirectory(dir=folder) as scratch:
            if _is_usable(path):
                return path
            built = Path(scratch) / path.name
            log.info("building the CPU kernels (%s) with %s", isa, compiler[0])
            start = time.perf_counter()
            headers = f"-isystem{jax.ffi.include_dir()}"
            objects = [str(Path(scratch) / f"{unit}.o") for unit in UNITS]
            with new_bar(len(UNITS) + 1) if new_bar else contextlib.nullcontext() as bar:
                run_compilers(
                    (
                        [*compiler, *flags, headers, "-c", str(SOURCES / unit), "-o", made]
                        for unit, made in zip(UNITS, objects, strict=True)
                    ),
                    bar,
                )
                run_compilers([[*compiler, *flags, *objects, "-o", str(built)]], bar)
            built.chmod(0o700)
            built.replace(path)
    except OSError as error:
        raise BuildError(f"the CPU kernels could not be built: {error}") from error
    log.info("built in %.1f s; the next start loads %s", time.perf_counter() - start, path)
    return path


def make_cache(folder: Path) -> None:
    """Create the folder of built libraries if it is missing.

    Raises:
      BuildError: others can write to it.
      OSError: it cannot be created.
    """
    make_private_folder(folder)
    fault = foreign_write_fault(folder)
    if fault is not None:
        raise BuildError(
            f"nothing is loaded from {folder}: {fault} (set XDG_CACHE_HOME to move it)"
        )


def run_compilers(commands: Iterable[list[str]], bar: Bar | None = None) -> None:
    """Run compilers in parallel, and count each that ends in a progress bar.

    Raises:
      CompilerTooOld: a compiler does not have a flag.
      BuildError: a compiler failed; the message has its last lines.
    """
    running = [
        (
            command[0],
            subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True),
        )
        for command in commands
    ]
    with ThreadPoolExecutor(len(running)) as pool:
        outputs = [pool.submit(process.communicate) for _, process in running]
        pending = set(outputs)
        while pending:
            done, pending = wait(pending, REFRESH_S, FIRST_COMPLETED)
            if bar is not None:
                bar.update(len(done))
                bar.refresh()  # the elapsed time
    for (compiler, process), output in zip(running, outputs, strict=True):
        said = output.result()[1]
        if process.returncode:
            last = "\n".join(said.strip().splitlines()[-5:])
            kind = CompilerTooOld if UNKNOWN_FLAG.search(said) else BuildError
            raise kind(f"{compiler} could not build the CPU kernels: {last}")


def _is_usable(library: Path) -> bool:
    try:
        os.close(open_private(library))
    except FileNotFoundError:
        return False
    except OSError as error:
        log.warning("the CPU kernels are built again: %s", error)
        return False
    return True


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Hold a lock on the folder, so that one process builds at a time."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        # On file systems without locks, each process builds, and any of the libraries is good.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _key(compiler: list[str], flags: Iterable[str]) -> str:
    sources = sorted(source.name for source in SOURCES.iterdir())
    return hash_of(compiler, (*flags, importlib.metadata.version("jaxlib")), sources)


def hash_of(compiler: list[str], parts: Iterable[str], sources: Iterable[str]) -> str:
    """Return a short hash of a compiler and its version, other parts, and files in `SOURCES`."""
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout
    digest = hashlib.sha256()
    for part in (*compiler, version, *parts):
        digest.update(part.encode() + b"\0")
    for name in sources:
        digest.update(name.encode() + b"\0" + (SOURCES / name).read_bytes())
    return digest.hexdigest()[:16]
