"""The instruction set of the kernels on this CPU: measured once and stored next to the libraries.

The choice determines the bits of bfloat16 products, so it must not change from one start to the
next. It is measured if there is no record, and is valid for one CPU, compiler and version of the
inner loop. A measured difference below `MARGIN` is ignored.

On CPUs with AMX, the number of rows from which AMX is used is measured in the same way. For
bfloat16, the kernels compare this number with the rows of an executable's shape, so an executable
always multiplies in one way.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from forge_kernels.cpu import build
from forge_kernels.cpu.build import BuildError, CompilerTooOld
from forge_kernels.private_files import open_private

PROBE = ("probe.cc", "pairs.h", "simd.h")
TILE_ROWS = (1, 2, 4, 8, 16, 32)
# The formats of products in tiles: their number in the kernels, and weights in `TILE_SHAPE`.
TILE_FORMATS: dict[str, tuple[int, Callable[[int], np.ndarray]]] = {
    "bf16": (0, lambda size: np.full(size, 0x3F81, np.uint16)),
    "int8": (1, lambda size: np.full(size, 129, np.uint8)),
    "groups": (9, lambda size: np.full(size // 32 * 18, 0x11, np.uint8)),  # as in Q4_0
}
TILE_ROUNDS = 5
TILE_SHAPE = (4096, 4096)  # outputs and inputs; exceeds the caches of a core
SLOWER = 1.05
ROUNDS, PRODUCTS = 25, 100  # 5 ms each at 230 GFLOP/s per core
MARGIN = 1.1

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tiles:
    """The number of rows of activations from which AMX multiplies, per format; None: never.

    Attributes:
      groups: for formats with scales by group: int4, and GGUF blocks with rounded activations.
    """

    bf16: int | None
    int8: int | None
    groups: int | None

    def __str__(self) -> str:
        names = {
            "bfloat16": self.bf16,
            "int8": self.int8,
            "int4 and rounded GGUF blocks": self.groups,
        }
        parts = [f"{name} from {rows} rows on" for name, rows in names.items() if rows is not None]
        return ", ".join(parts) or "nothing"


ALL_TILES = Tiles(1, 1, 1)


@dataclass(frozen=True)
class Choice:
    """An instruction set, and the measurements that led to it.

    Attributes:
      isa: the instruction set.
      gflops: bfloat16 GFLOP/s per core by instruction set; empty if not measured.
      tiles: the use of AMX; None if it is not available or not wanted.
    """

    isa: str
    gflops: dict[str, float] = field(default_factory=dict)
    tiles: Tiles | None = None

    def __str__(self) -> str:
        text = self.isa
        if self.gflops:
            measured = ", ".join(f"{isa} {value:.0f}" for isa, value in self.gflops.items())
            text += f" (bfloat16 products, GFLOP/s of a core: {measured})"
        return text if self.tiles is None else f"{text}; AMX multiplies {self.tiles}"


def choose(features: Iterable[str], folder: Path | None = None) -> Choice:
    """Return the fastest instruction set of a CPU with `features`.

    The dot products of AVX-512 BF16 are faster than FMAs on some CPUs and slower on others, so both
    are timed. In all other cases, more instructions are faster.

    Raises:
      BuildError: there is no instruction set or compiler, or the folder cannot be used.
    """
    isas = build.runnable_isas(features)
    if isas[0] != "avx512_bf16":
        return Choice(isas[0])
    folder = build.default_folder() if folder is None else folder
    compiler = build.find_compiler()
    key = build.hash_of(compiler, (build.cpu_identity(),), PROBE)
    try:
        build.make_cache(folder)
        gflops = record(
            folder / f"choice-{key}.json",
            lambda: measure(isas[:2], folder, compiler),
            lambda found: _is_measurement(found, isas[:2]),
        )
    except OSError as error:
        raise BuildError(f"the CPU kernels could not be chosen: {error}") from error
    except CompilerTooOld:  # it lacks BF16
        return Choice(isas[1])
    return Choice(fastest(gflops), gflops)


def fastest(gflops: dict[str, float]) -> str:
    """Return the first instruction set, unless another is faster by more than `MARGIN`."""
    first = next(iter(gflops))
    best = max(gflops, key=lambda isa: gflops[isa])
    return best if gflops[best] > MARGIN * gflops[first] else first


def measure(isas: list[str], folder: Path, compiler: list[str]) -> dict[str, float]:
    """Return bfloat16 GFLOP/s per core by instruction set: medians of interleaved rounds."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        paths = {isa: str(Path(scratch) / f"{isa}.so") for isa in isas}
        source = str(build.SOURCES / PROBE[0])
        build.run_compilers(
            [*compiler, *build.flags_of(isa), source, "-o", path] for isa, path in paths.items()
        )
        probes = {isa: ctypes.CDLL(path).forge_probe for isa, path in paths.items()}
        for probe in probes.values():
            probe.restype, probe.argtypes = ctypes.c_double, [ctypes.c_long]
        rounds = [{isa: probe(PRODUCTS) for isa, probe in probes.items()} for _ in range(ROUNDS)]
    return {isa: round(statistics.median(each[isa] for each in rounds), 1) for isa in isas}


def _is_measurement(found: Any, isas: list[str]) -> bool:
    return (
        isinstance(found, dict)
        and list(found) == isas
        and all(_is_positive(x) for x in found.values())
    )


def record(path: Path, make: Callable[[], Any], is_valid: Callable[[Any], bool]) -> Any:
    """Return the JSON in the file at `path`; make and write it if there is no valid one.

    Processes that start together all return what the first one wrote.

    Raises:
      OSError: the file cannot be written.
    """
    found = _read(path, is_valid)
    if found is not None:
        return found
    with build.one_at_a_time(path.parent):
        found = _read(path, is_valid)
        if found is not None:
            return found
        made = make()
        descriptor, temporary = tempfile.mkstemp(dir=path.parent)  # accessible to this user only
        with os.fdopen(descriptor, "w") as file:
            json.dump(made, file)
        os.replace(temporary, path)
    return made


def _read(path: Path, is_valid: Callable[[Any], bool]) -> Any:
    try:
        with os.fdopen(open_private(path)) as file:
            found = json.load(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("the CPU kernels are measured again: %s: %s", path, error)
        return None
    if not is_valid(found):
        log.warning("the CPU kernels are measured again: %s is not a measurement", path)
        return None
    return found


def choose_tiles(library: ctypes.CDLL, name: str, folder: Path | None = None) -> Tiles:
    """Return from how many rows on AMX is faster, for a library that may use it.

    Args:
      library: the loaded library.
      name: the library's name, for which the measurement is valid.
      folder: the folder of the measurement.

    Raises:
      BuildError: the folder cannot be used.
    """
    folder = build.default_folder() if folder is None else folder
    key = hashlib.sha256(f"{build.cpu_identity()}\0{name}".encode()).hexdigest()[:16]
    try:
        times = record(
            folder / f"tiles-{key}.json", lambda: measure_tiles(library), _are_tile_times
        )
    except OSError as error:
        raise BuildError(f"the CPU kernels could not be chosen: {error}") from error
    return Tiles(**{form: crossover(times[form]) for form in TILE_FORMATS})


def crossover(times: dict[str, list[float]]) -> int | None:
    """Return the smallest number of rows from which tiles take at most `SLOWER` times as long.

    Slightly slower is acceptable: if tiles multiply all rows, a bfloat16 row has the same bits in
    every executable.

    Args:
      times: seconds without tiles and with them, by number of rows.
    """
    found = None
    for rows, (plain, tiles) in reversed(times.items()):
        if tiles > SLOWER * plain:
            break
        found = int(rows)
    return found


def measure_tiles(library: ctypes.CDLL) -> dict[str, dict[str, list[float]]]:
    """Return seconds on one thread without tiles and with them, by format and number of rows."""
    time = library.forge_time_linear
    time.restype = ctypes.c_double
    time.argtypes = [ctypes.c_void_p, *(ctypes.c_int64,) * 5]
    outputs, inputs = TILE_SHAPE
    return {
        form: {
            str(rows): [
                statistics.median(column)
                for column in zip(
                    *(
                        [
                            time(weights.ctypes.data, number, rows, outputs, inputs, tiles)
                            for tiles in (0, 1)
                        ]
                        for _ in range(TILE_ROUNDS)
                    ),
                    strict=True,
                )
            ]
            for rows in TILE_ROWS
        }
        for form, (number, make) in TILE_FORMATS.items()
        for weights in [make(outputs * inputs)]
    }


def _are_tile_times(found: Any) -> bool:
    def are_times(times: Any) -> bool:
        return (
            isinstance(times, dict)
            and list(times) == [str(rows) for rows in TILE_ROWS]
            and all(isinstance(pair, list) and len(pair) == 2 for pair in times.values())
            and all(_is_positive(x) for pair in times.values() for x in pair)
        )

    return isinstance(found, dict) and all(are_times(found.get(f)) for f in TILE_FORMATS)


def _is_positive(x: Any) -> bool:
    return isinstance(x, float) and math.isfinite(x) and x > 0
