"""`Recorder`: takes traces with JAX's profiler, and writes beside each what XLA has compiled."""

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

EXECUTABLES = "executables"  # the folder beside a trace
ABOUT = "about.json"  # beside it, too
log = logging.getLogger(__name__)

_lock = threading.Lock()  # JAX has one profiler for the process
_folder: Path | None = None  # of the trace that is being taken


class Recorder:
    """Takes one trace after the other; a process can take one at a time.

    Args:
      executables: what has been compiled, by name, asked for when a trace ends.
      ran: the model, and what else is to be told of the engine.
    """

    def __init__(self, executables: Callable[[], Mapping[str, jax.stages.Compiled]], ran: str):
        self._executables = executables
        self._ran = ran

    def start(self, folder: Path) -> None:
        """Begins a trace that `stop` will write under `folder`. In any thread.

        Raises:
          RequestError: one is being taken, or the folder cannot be written to.
        """
        global _folder
        with _lock:
            if _folder is not None:
                raise RequestError("a profile is being taken: stop it first")
            try:
                make_private_folder(folder)
            except OSError as error:
                raise RequestError(f"profiles cannot be written: {error.strerror}") from error
            options = jax.profiler.ProfileOptions()
            # A name for every Python call would make the host look several times slower.
            options.python_tracer_level = 0
            try:
                jax.profiler.start_trace(str(folder), profiler_options=options)
            except RuntimeError as error:  # somebody else's, in this process
                raise RequestError("a profile is being taken by another part") from error
            _folder = folder
            spans.turn_on(
                lambda name: jax.profiler.TraceAnnotation(name),
                lambda name, number: jax.profiler.StepTraceAnnotation(name, step_num=number),
            )

    def stop(self) -> Path:
        """Ends the trace and writes it: its folder. Takes long. In any thread.

        Raises:
          RequestError: none is being taken, or it could not be written.
        """
        global _folder
        with _lock:
            if _folder is None:
                raise RequestError("no profile is being taken: start one first")
            spans.turn_off()
            folder, _folder = _folder, None
            try:
                jax.profiler.stop_trace()
                write_executables(folder / EXECUTABLES, self._executables())
                (folder / ABOUT).write_text(json.dumps({"ran": self._ran}) + "\n")
            except OSError as error:
                raise RequestError(f"the profile cannot be written: {error.strerror}") from error
        log.info("a profile has been written to %s", folder)
        return folder


def write_executables(folder: Path, compiled: Mapping[str, jax.stages.Compiled]) -> None:
    """Writes each one's optimised HLO (`NAME.hlo.txt.gz`) and XLA's figures (`NAME.json`)."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, executable in compiled.items():
        text = executable.as_text()
        if text is None:  # this backend does not tell
            continue
        stem = re.sub(r"\W+", "_", name).strip("_")
        with gzip.open(folder / f"{stem}.hlo.txt.gz", "wt", compresslevel=1) as file:
            file.write(text)
        figures = {"name": name, **_figures(executable)}
        (folder / f"{stem}.json").write_text(json.dumps(figures, indent=1) + "\n")


def _figures(executable: jax.stages.Compiled) -> dict[str, float]:
    """XLA's own analysis; what a backend does not tell is left out."""
    cost: Any = executable.cost_analysis() or {}
    known = ("flops", "transcendentals", "bytes accessed")
    figures = {name.replace(" ", "_"): float(cost[name]) for name in known if name in cost}
    memory = executable.memory_analysis()
    if memory is not None:
        figures["temporary_bytes"] = float(memory.temp_size_in_bytes)
        figures["code_bytes"] = float(memory.generated_code_size_in_bytes)
    return figures
