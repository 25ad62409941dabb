"""Measurements from Linux: CPU time of the machine and of a process group, memory bandwidth."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_IDLE_FIELDS = (3, 4)  # idle, iowait
_GUEST_FIELDS = (8, 9)  # already counted in user and nice
PROBE_BYTES = 512 * 2**20


class BusyMeter:
    """Meter of the CPU time that other processes used since its creation, in cores.

    `ours` returns the CPU seconds of the measured processes; this process is added. Time stolen by
    the hypervisor also counts.
    """

    def __init__(self, ours: Callable[[], float]):
        self._ours = ours
        self._start = time.perf_counter()
        self._machine_s, self._own_s = machine_cpu_s(), self._count()

    def foreign_cores(self) -> float:
        others_s = (machine_cpu_s() - self._machine_s) - (self._count() - self._own_s)
        return max(0.0, others_s / (time.perf_counter() - self._start))

    def _count(self) -> float:
        return self._ours() + sum(os.times()[:2])


def machine_cpu_s() -> float:
    """Return the CPU seconds used on all cores since boot."""
    with open("/proc/stat", encoding="ascii") as file:
        ticks = [int(field) for field in file.readline().split()[1:]]
    used = sum(t for i, t in enumerate(ticks) if i not in _IDLE_FIELDS + _GUEST_FIELDS)
    return used / _TICKS_PER_S


def group_cpu_s(group: int) -> float:
    """Return the CPU seconds, user and system, of a process group's living processes."""
    return sum(_cpu_ticks(fields) for _, fields in _group(group)) / _TICKS_PER_S


def group_is_stopped(group: int) -> bool:
    """Return True if each process of the group is stopped (T) or dead (Z, X)."""
    return all(fields[0] in "TZX" for _, fields in _group(group))


def group_memory_bytes(group: int) -> int:
    total = 0
    for pid, _ in _group(group):
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


def _group(group: int) -> Iterator[tuple[int, list[str]]]:
    """Yield (pid, fields of /proc/PID/stat from the state on) of each process of the group."""
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with suppress(OSError):  # the process ended
            text = Path(f"/proc/{name}/stat").read_text()
            fields = text.rpartition(")")[2].split()  # the name may contain spaces and brackets
            if int(fields[2]) == group:
                yield int(name), fields


def _cpu_ticks(fields: list[str]) -> int:
    return int(fields[11]) + int(fields[12])


def read_bandwidth_bytes_per_s(threads: int, repeats: int = 5) -> float:
    """Return the best rate at which `threads` threads together read uncached memory."""
    share = PROBE_BYTES // 8 // threads
    arrays = [np.ones(share, np.float64) for _ in range(threads)]

    def once() -> float:
        workers = [threading.Thread(target=array.max) for array in arrays]
        start = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return time.perf_counter() - start

    return share * threads * 8 / min(once() for _ in range(repeats))
