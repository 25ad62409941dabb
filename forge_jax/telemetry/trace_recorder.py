"""Traces with JAX's profiler, with the compiled executables stored next to each trace."""

from __future__ import annotations

import gzip
import json
import logging
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from forge_jax.errors import RequestError
from forge_jax.telemetry import spans
from forge_kernels.private_files import make_private_folder

EXECUTABLES = "executables"  # the folder next to a trace
ABOUT = "about.json"  # the file next to a trace
log = logging.getLogger(__name__)

_lock = threading.Lock()  # JAX has one profiler per process
_folder: Path | None = None  # of the running trace


class Recorder:
    """A recorder of traces, one at a time per process.

    Args:
      executables: returns the compiled executables by name; called when a trace ends.
      ran: a description of the model and the engine.
    """

    def __init__(self, executables: Callable[[], Mapping[str, jax.stages.Compiled]], ran: str):
        self._executables = executables
        self._ran = ran

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
            spans.turn_on(
                lambda name: jax.profiler.TraceAnnotation(name),
                lambda name, number: jax.profiler.StepTraceAnnotation(name, step_num=number),
            )

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
            try:
                jax.profiler.stop_trace()
                write_executables(folder / EXECUTABLES, self._executables())
                (folder / ABOUT).write_text(json.dumps({"ran": self._ran}) + "\n")
            except OSError as error:
                raise RequestError(f"the profile cannot be written: {error.strerror}") from error
        log.info("profile written to %s", folder)
        return folder


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
