"""Traces with JAX's profiler, with the compiled executables stored next to each trace."""

from __future__ import annotations

import gzip
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import psutil

from forge_jax.errors import RequestError
from forge_jax.telemetry import spans
from forge_kernels.private_files import make_private_folder

EXECUTABLES = "executables"  # the folder next to a trace
ABOUT = "about.json"  # the file next to a trace
# XProf computes step times from markers whose name begins with "train" or "test".
MARKER = "test step"
log = logging.getLogger(__name__)

_lock = threading.Lock()  # JAX has one profiler per process
_folder: Path | None = None  # folder of the running trace


class Recorder:
    """A recorder of traces, one at a time per process.

    Args:
      executables: returns the compiled executables by name; called when a trace ends.
      ran: a description of the model and the engine.
      command_buffers: True if the executables may use XLA's command buffers (CUDA graphs).
    """

    def __init__(
        self,
        executables: Callable[[], Mapping[str, jax.stages.Compiled]],
        ran: str,
        *,
        command_buffers: bool = False,
    ):
        self._executables = executables
        self._about: dict[str, str | float] = {
            "ran": ran,
            "command_buffers": _during_profile(command_buffers),
        }
        self._cpu = _CpuTimes()  # times at the start of the trace

    def start(self, folder: Path) -> None:
        """Begin a trace that `stop` writes to `folder`. Thread-safe.

        Raises:
          RequestError: a trace is already running, or the folder is not writable.
        """
        global _folder
        with _lock:
            if _folder is not None:
                raise RequestError("a profile is already running: stop it first")
            try:
                make_private_folder(folder)
            except OSError as error:
                raise RequestError(f"profiles cannot be written: {error.strerror}") from error
            options = jax.profiler.ProfileOptions()
            # Tracing every Python call would slow the host down several times.
            options.python_tracer_level = 0
            try:
                jax.profiler.start_trace(str(folder), profiler_options=options)
            except RuntimeError as error:  # other code in this process runs the profiler
                raise RequestError("another part of this process is running a profile") from error
            _folder = folder
            self._cpu = _CpuTimes()
            spans.turn_on(lambda name: jax.profiler.TraceAnnotation(name), _step)

    def stop(self) -> Path:
        """End the trace, write it and return its folder. Slow; thread-safe.

        Raises:
          RequestError: no trace is running, or it cannot be written.
        """
        global _folder
        with _lock:
            if _folder is None:
                raise RequestError("no profile is running: start one first")
            spans.turn_off()
            folder, _folder = _folder, None
            others = self._cpu.share_of_others(_CpuTimes())
            about = self._about | ({} if others is None else {"other_cpu_share": others})
            try:
                jax.profiler.stop_trace()
                write_executables(folder / EXECUTABLES, self._executables())
                (folder / ABOUT).write_text(json.dumps(about) + "\n")
            except OSError as error:
                raise RequestError(f"the profile cannot be written: {error.strerror}") from error
        log.info("profile written to %s", folder)
        return folder


class _CpuTimes:
    """CPU seconds of the machine and of this process, at the time of creation."""

    def __init__(self) -> None:
        machine = psutil.cpu_times()._asdict()
        # The times of guests are part of `user` and `nice`.
        self.total = sum(s for name, s in machine.items() if not name.startswith("guest"))
        self.idle = machine["idle"] + machine.get("iowait", 0.0)
        self.own = time.process_time()

    def share_of_others(self, later: _CpuTimes) -> float | None:
        """Return the share of the machine's CPU time since then that other processes used.

        None if the system's clock, which counts in steps of about 10 ms, has not moved.
        """
        total = later.total - self.total
        if total <= 0:
            return None
        used = total - (later.idle - self.idle) - (later.own - self.own)
        return round(max(0.0, used) / total, 2)


@contextmanager
def _step(name: str, number: int) -> Iterator[None]:
    marker = jax.profiler.StepTraceAnnotation(MARKER, step_num=number)
    with marker, jax.profiler.TraceAnnotation(name):
        yield


def _during_profile(command_buffers: bool) -> str:
    """Describe the use of command buffers while a profile is taken.

    During a profile, XLA launches their operations one by one unless one of its flags is set.
    """
    if not command_buffers:
        return "off"
    flag = r"--xla_enable_command_buffers_during_profiling(=(true|1))?(\s|$)"
    return "on" if re.search(flag, os.environ.get("XLA_FLAGS", "")) else "off during the profile"


def write_executables(folder: Path, compiled: Mapping[str, jax.stages.Compiled]) -> None:
    """Write each executable's optimized HLO (`NAME.hlo.txt.gz`) and XLA's costs (`NAME.json`)."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, executable in compiled.items():
        text = executable.as_text()
        if text is None:  # not available on this backend
            continue
        stem = re.sub(r"\W+", "_", name).strip("_")
        with gzip.open(folder / f"{stem}.hlo.txt.gz", "wt", compresslevel=1) as file:
            file.write(text)
        figures = {"name": name, **_figures(executable)}
        (folder / f"{stem}.json").write_text(json.dumps(figures, indent=1) + "\n")


def _figures(executable: jax.stages.Compiled) -> dict[str, float]:
    """Return XLA's cost analysis, without the values that the backend does not report."""
    cost: Any = executable.cost_analysis() or {}
    known = ("flops", "transcendentals", "bytes accessed")
    figures = {name.replace(" ", "_"): float(cost[name]) for name in known if name in cost}
    memory = executable.memory_analysis()
    if memory is not None:
        figures["temporary_bytes"] = float(memory.temp_size_in_bytes)
        figures["code_bytes"] = float(memory.generated_code_size_in_bytes)
    return figures
