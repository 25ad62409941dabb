"""Builds the C++ kernels with the platform's compiler, once, into the user's cache.

The library is keyed by its sources, the headers' jaxlib, the compiler and its flags, so a change of
any of them builds anew, and two versions never meet. Only the user, or root, may write to the
folder and the library, because it is loaded. Processes that start together wait for the one that
builds.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from forge_kernels.private_files import foreign_write_fault, make_private_folder, open_private

SOURCES = Path(__file__).parent / "src"
FLAGS = ("-O2", "-DNDEBUG", "-std=c++17", "-fPIC", "-shared", "-pthread")

# What each instruction set needs of the CPU (names as in /proc/cpuinfo), best first, and its flags.
ISAS: dict[str, tuple[frozenset[str], tuple[str, ...]]] = {
    "avx512": (
        frozenset(
            "avx512f avx512bw avx512vl avx512dq avx512_bf16 avx512_vnni avx2 fma f16c".split()
        ),
        tuple(
            "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512bf16 -mavx512vnni "
            "-mavx2 -mfma -mf16c".split()
        ),
    ),
    "avx2": (frozenset("avx2 fma f16c".split()), ("-mavx2", "-mfma", "-mf16c")),
}

log = logging.getLogger(__name__)


class BuildError(Exception):
    """The kernels cannot be had here; the message says why and what would help."""


def cpu_features() -> frozenset[str]:
    """The CPU's features as Linux names them; empty where /proc/cpuinfo does not tell."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()


def best_isa(features: Iterable[str]) -> str:
    """The best instruction set that `features` allow.

    Raises:
      BuildError: the CPU has none that the kernels are written for.
    """
    features = frozenset(features)
    for isa, (needed, _) in ISAS.items():
        if needed <= features:
            return isa
    raise BuildError("this CPU has neither AVX2 with FMA nor AVX-512 with BF16 and VNNI")


def find_compiler() -> list[str]:
    """The command of a C++ compiler: $CXX, or the first of c++, g++ and clang++.

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


def build(isa: str, folder: Path | None = None) -> Path:
    """Return the shared library for one instruction set: from the cache, or built now.

    A library that another user wrote, or can write to, is built again.

    Raises:
      BuildError: no compiler, or it failed, with its last lines; or others can write to the folder.
    """
    import jax

    folder = default_folder() if folder is None else folder
    compiler = find_compiler()
    flags = (*FLAGS, *ISAS[isa][1])
    try:
        make_private_folder(folder)
        fault = foreign_write_fault(folder)
        if fault is not None:
            raise BuildError(
                f"nothing is loaded from {folder}: {fault} (XDG_CACHE_HOME names its parent)"
            )
        path = folder / f"{isa}-{_key(compiler, flags)}.so"
        if _is_usable(path):
            return path
        with _one_at_a_time(folder), tempfile.TemporaryDirectory(dir=folder) as scratch:
            if _is_usable(path):
                return path
            built = Path(scratch) / path.name
            log.info("building the CPU kernels (%s) with %s", isa, compiler[0])
            start = time.perf_counter()
            headers = f"-isystem{jax.ffi.include_dir()}"
            units = sorted(SOURCES.glob("*.cc"))
            objects = [str(Path(scratch) / f"{unit.stem}.o") for unit in units]
            _run_all(
                [*compiler, *flags, headers, "-c", str(unit), "-o", made]
                for unit, made in zip(units, objects, strict=True)
            )
            _run_all([[*compiler, *flags, *objects, "-o", str(built)]])
            built.chmod(0o700)
            built.replace(path)
    except OSError as error:
        raise BuildError(f"the CPU kernels could not be built: {error}") from error
    log.info("built in %.1f s; the next start finds them in %s", time.perf_counter() - start, path)
    return path


def _run_all(commands: Iterable[list[str]]) -> None:
    """Run compilers at the same time.

    Raises:
      BuildError: one failed; with its last lines.
    """
    running = [
        (
            command[0],
            subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True),
        )
        for command in commands
    ]
    ended = [(compiler, process.communicate()[1], process) for compiler, process in running]
    for compiler, said, process in ended:
        if process.returncode:
            last = "\n".join(said.strip().splitlines()[-5:])
            raise BuildError(f"{compiler} could not build the CPU kernels: {last}")


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
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Until the process that builds here is done, or has ended."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        # Where the file system has no locks each process builds; the last library is as good.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _key(compiler: list[str], flags: Iterable[str]) -> str:
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout
    digest = hashlib.sha256()
    for part in (*compiler, version, *flags, importlib.metadata.version("jaxlib")):
        digest.update(part.encode() + b"\0")
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]
