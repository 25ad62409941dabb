"""Upper bounds of this machine's byte rates, to compare with reading weights.

    python -m benchmarks.floors FILE

Prints bytes per second as JSON, with one thread per core, for three operations:

- reading FILE into reused memory, from the page cache or the disk
- copying memory in use
- writing as much new memory as FILE has bytes

Runs in a separate process, because new memory is only new once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from forge_serve.bench.errors import BenchmarkError

FLOORS = {
    "file": "(the files, into memory in use)",
    "new_memory": "(as many bytes of new memory)",
    "copy": "(as many bytes, copied)",
}
PIECE = 4 << 20  # bytes
COPIED = 256 << 20  # bytes, more than a cache holds


def measure(file: Path) -> dict[str, float]:
    """Return bytes per second by kind."""
    size = file.stat().st_size
    return {"file": read_file(file), "new_memory": write_new(size), "copy": copy()}


def seconds_at_best(path: Path) -> dict[str, float]:
    """Return the seconds by kind for all bytes of a model, from its largest file."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    sizes = {file: file.stat().st_size for file in files}
    command = [sys.executable, "-m", "benchmarks.floors", str(max(files, key=sizes.__getitem__))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BenchmarkError(f"{' '.join(command)} failed:\n{done.stderr}")
    return {kind: sum(sizes.values()) / rate for kind, rate in json.loads(done.stdout).items()}


def read_file(file: Path) -> float:
    size, number = file.stat().st_size, os.open(file, os.O_RDONLY)

    def read(part: range) -> None:
        buffer = memoryview(bytearray(PIECE))
        for at in part:
            os.preadv(number, [buffer], at)

    try:
        return _per_second(size, read, range(0, size, PIECE))
    finally:
        os.close(number)


def write_new(size: int) -> float:
    memory = np.empty(size, np.uint8)

    def write(part: range) -> None:
        for at in part:
            memory[at : at + PIECE].fill(1)

    return _per_second(size, write, range(0, size, PIECE))


def copy() -> float:
    source, target = (np.ones(COPIED, np.uint8) for _ in range(2))

    def write(part: range) -> None:
        for at in part:
            target[at : at + PIECE] = source[at : at + PIECE]

    return max(_per_second(COPIED, write, range(0, COPIED, PIECE)) for _ in range(3))


def _per_second(size: int, work: Callable[[range], None], pieces: range) -> float:
    num = len(os.sched_getaffinity(0))
    per_thread = -(-len(pieces) // num)
    parts = [pieces[i : i + per_thread] for i in range(0, len(pieces), per_thread)]
    with ThreadPoolExecutor(num) as pool:
        begin_s = time.perf_counter()
        for _ in pool.map(work, parts):
            pass
        return size / (time.perf_counter() - begin_s)


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]))))
