"""Measured peaks of the machine: operations/s by multiply-add instruction, memory bytes/s.

`peak.cpp` measures operations in registers and tiles, without memory access.
"""

from __future__ import annotations

import math
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
    """The program of `peak.cpp`; `program` is None if it cannot be built."""

    def __init__(self, program: Path | None):
        self._program = program

    def operations_per_s(self, threads: int) -> dict[str, float]:
        """Return the rate of all threads together by instruction; empty without the program.

        Each instruction runs in a separate process, so that an instruction that the machine does
        not allow ends only that process.
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
        """Return the best rate at which all threads together read uncached memory.

        Two readers are tried: the program and numpy.
        """
        rates = [read_bandwidth_bytes_per_s(threads)]
        if self._program is not None:
            rates.append(float(_run([self._program, "read", threads])))
        return max(rates)


@contextmanager
def probe() -> Iterator[Probe]:
    """Build the program for this CPU; without a compiler, print why there are no peaks."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "peak"
        try:
            _run([*find_compiler(), *FLAGS, SOURCE, "-o", program])
        except (BuildError, OSError, subprocess.SubprocessError) as error:
            print(f"no peaks: {_reason(error)}", flush=True)
            program = None
        yield Probe(program)


def peak_for(peaks: Mapping[str, float], bits: float) -> float | None:
    """Return the best operations/s for weights of `bits` bits, or None if not measured.

    Weights of up to 8 bits may be multiplied as integers, wider ones only as floats. Products of
    4-bit weights may be summed in 16 bits. Scales add up to a bit per value.
    """
    most_bits = {"int8": 9, "int4": 5}  # by the first part of the instruction's name
    usable = [
        rate for name, rate in peaks.items() if bits <= most_bits.get(name.split("_")[0], math.inf)
    ]
    return max(usable, default=None)


def _run(command: list[object]) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=TIMEOUT_S)
    return done.stdout


def _reason(error: Exception) -> str:
    said = getattr(error, "stderr", None) or ""
    return " ".join(f"{error} {said}".split())[:300]
