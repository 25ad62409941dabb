"""The machine's measured peaks: operations a second of each instruction that multiplies and adds,
and bytes a second of memory.

`peak.cpp` measures operations in registers and tiles, where no memory takes part.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from benchmarks.peers.proc import read_bandwidth_bytes_per_s
from forge_kernels.cpu.build import BuildError, find_compiler

SOURCE = Path(__file__).with_name("peak.cpp")
FLAGS = ("-O2", "-std=c++17", "-march=native", "-pthread")
TIMEOUT_S = 120.0


class Probe:
    """The program of `peak.cpp`; `program` is None where it cannot be built."""

    def __init__(self, program: Path | None):
        self._program = program

    def operations_per_s(self, threads: int) -> dict[str, float]:
        """Of all threads together, by instruction; empty without the program.

        Each instruction has a process of its own: one that the machine does not allow ends alone.
        """
        if self._program is None:
            return {}
        peaks = {}
        for name in _run([self._program]).split():
            try:
                peaks[name] = float(_run([self._program, name, threads]))
            except subprocess.SubprocessError as error:
                print(f"no peak of {name}: {_reason(error)}", flush=True)
        return peaks

    def read_bytes_per_s(self, threads: int) -> float:
        """The best rate at which all threads together read memory that no cache holds.

        The better of two readers, the program and numpy.
        """
        rates = [read_bandwidth_bytes_per_s(threads)]
        if self._program is not None:
            rates.append(float(_run([self._program, "read", threads])))
        return max(rates)


@contextmanager
def probe() -> Iterator[Probe]:
    """Builds the program for this CPU. Without a compiler, prints why there are no peaks."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "peak"
        try:
            _run([*find_compiler(), *FLAGS, SOURCE, "-o", program])
        except (BuildError, OSError, subprocess.SubprocessError) as error:
            print(f"no peaks: {_reason(error)}", flush=True)
            program = None
        yield Probe(program)


def peak_for(peaks: Mapping[str, float], bits: float) -> float | None:
    """The best operations/s for weights of so many bits; None: not measured.

    Weights of 8 bits and fewer may be multiplied as whole numbers, wider ones only as floats.
    """
    usable = [rate for name, rate in peaks.items() if bits <= 9 or not name.startswith("int8")]
    return max(usable, default=None)


def _run(command: list[object]) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=TIMEOUT_S)
    return done.stdout


def _reason(error: Exception) -> str:
    said = getattr(error, "stderr", None) or ""
    return " ".join(f"{error} {said}".split())[:300]
