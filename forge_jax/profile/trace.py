"""Reads a trace back: microseconds by operation, kernel and phase of the host, step by step.

On a CPU the operations are events of the plane "/host:CPU", on the threads that ran them, with the
module, the instruction and the run in their stats. On other devices they are events of a plane
"/device:...", on the line "XLA Ops" or, where there is none, on those of its streams. The time of
what contains others (a loop) is what is left of it without them.
"""

from __future__ import annotations

import gzip
import json
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from jax.profiler import ProfileData

from forge_jax.errors import ConfigError
from forge_jax.observe.spans import PREFIX, STEP
from forge_jax.profile.hlo import NO_SCOPE, Hlo, Instruction, kernel_name, read_hlo
from forge_jax.profile.recorder import EXECUTABLES

_SUFFIX = ".xplane.pb"


class Op(NamedTuple):
    """What is told apart: instances of one kernel in one part of one kind of step are not."""

    kind: str  # of step: "decode", "mixed"
    scope: str
    kernel: str


@dataclass
class Time:
    """In all: as often, for so long."""

    count: int = 0
    us: float = 0.0

    def add(self, us: float) -> None:
        self.count += 1
        self.us += us


@dataclass
class Trace:
    """What one trace has.

    Attributes:
      name: its folder's, below the one that was asked for.
      ops: of the device.
      phases: of the host.
      steps: of the host.
      runs: of executables, by kind.
      modules: that ran: the names of each kind's.
      figures: of the executables that ran, by name and figure: XLA's analysis, and how many kernels
        and fusions there are.
    """

    name: str
    ops: dict[Op, Time] = field(default_factory=lambda: defaultdict(Time))
    phases: dict[str, Time] = field(default_factory=lambda: defaultdict(Time))
    steps: int = 0
    runs: Counter[str] = field(default_factory=Counter)
    modules: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    figures: dict[tuple[str, str], float] = field(default_factory=dict)


def read_traces(place: Path) -> list[Trace]:
    """All traces in a folder, or the one of a file; of a run that was traced again, the newest.

    Raises:
      ConfigError: there is none, or it cannot be read.
    """
    if place.is_file():
        return [_read(place.stem.removesuffix(".xplane"), [place], place.parent)]
    newest: dict[Path, Path] = {}  # of each run's folder, the session's
    for session in sorted({file.parent for file in place.rglob(f"*{_SUFFIX}")}):
        run = session
        if session.parent.name == "profile" and session.parent.parent.name == "plugins":
            run = session.parent.parent.parent
        newest[run] = session
    if not newest:
        raise ConfigError(f"{place}: there is no trace (*{_SUFFIX}) in it")
    return [
        _read(_relative(run, place), sorted(session.glob(f"*{_SUFFIX}")), run)
        for run, session in sorted(newest.items())
    ]


def _relative(run: Path, place: Path) -> str:
    name = run.relative_to(place).as_posix() if run.is_relative_to(place) else ""
    return "" if name == "." else name


def _read(name: str, files: Iterable[Path], run: Path) -> Trace:
    hlo, figures = _read_executables(run / EXECUTABLES)
    trace = Trace(name)
    for file in files:
        try:
            data = ProfileData.from_file(str(file))
        except Exception as error:
            raise ConfigError(f"{file}: not a trace of JAX's profiler: {error}") from error
        with warnings.catch_warnings():  # jaxlib's own, of types without a module
            warnings.simplefilter("ignore", DeprecationWarning)
            add_planes(trace, data, hlo)
    for module in {module for modules in trace.modules.values() for module in modules}:
        for figure, value in figures.get(module, {}).items():
            trace.figures[step_name(module), figure] = value
    return trace


def _read_executables(folder: Path) -> tuple[dict[str, Hlo], dict[str, dict[str, float]]]:
    """The compiled modules that were written beside a trace, and their figures, by module."""
    modules, figures = {}, {}
    for file in sorted(folder.glob("*.hlo.txt.gz")):
        with gzip.open(file, "rt") as text:
            hlo = read_hlo(text.read())
        modules[hlo.module] = hlo
        own = {"kernels": float(hlo.kernels.total()), "fusions": float(hlo.fusions)}
        beside = file.with_name(file.name.replace(".hlo.txt.gz", ".json"))
        if beside.is_file():
            known = json.loads(beside.read_text())
            own |= {name.replace("_", " "): v for name, v in known.items() if name != "name"}
        own |= {f"kernels in {scope}": float(n) for scope, n in hlo.kernels.items()}
        figures[hlo.module] = own
    return modules, figures


class _Event(NamedTuple):
    start_ns: float
    end_ns: float
    name: str
    stats: dict[str, Any]


def add_planes(trace: Trace, data: ProfileData, hlo: dict[str, Hlo]) -> None:
    """Adds what the profiler has seen; `hlo`: by module, for what the events do not say."""
    runs: dict[str, set[Any]] = defaultdict(set)  # by module
    counts: dict[str, Counter[str]] = defaultdict(Counter)  # events by instruction, by module
    for plane in data.planes:
        on_device = plane.name.startswith("/device:")
        if not on_device and not plane.name.startswith("/host:"):
            continue
        lines = list(plane.lines)
        if on_device:
            lines = [line for line in lines if line.name == "XLA Ops"] or [
                line for line in lines if line.name.startswith("Stream")
            ]
        for line in lines:
            events = []
            for event in line.events:
                name = event.name
                if name.startswith(PREFIX):
                    _add_span(trace, name.partition("#")[0], event.duration_ns / 1e3)
                    continue
                stats = dict(event.stats)
                if "hlo_op" in stats or on_device:
                    end_ns = event.start_ns + event.duration_ns
                    events.append(_Event(event.start_ns, end_ns, name, stats))
            for event, us in _self_times(events):
                module = str(event.stats.get("hlo_module", ""))
                instruction = str(event.stats.get("hlo_op", event.name))
                known = hlo.get(module, Hlo("")).instructions.get(instruction)
                known = known or Instruction(NO_SCOPE, kernel_name(instruction))
                # A device names the kernel that ran; on a CPU that is the instruction's own name.
                kernel = known.kernel if event.name == instruction else kernel_name(event.name)
                trace.ops[Op(kind_of(module), known.scope, kernel)].add(us)
                trace.modules[kind_of(module)].add(module)
                counts[module][instruction] += 1
                if "run_id" in event.stats:
                    runs[module].add(event.stats["run_id"])
    for module, instructions in counts.items():
        # Without ids of the runs: as often as most instructions ran.
        times = Counter(instructions.values()).most_common(1)[0][0]
        trace.runs[kind_of(module)] += len(runs[module]) or times


def _add_span(trace: Trace, name: str, us: float) -> None:
    if name == STEP:
        trace.steps += 1
    trace.phases[name.removeprefix(PREFIX)].add(us)


def _self_times(events: list[_Event]) -> Iterator[tuple[_Event, float]]:
    """Each event's microseconds without those of the events within it, of one line."""
    open_: list[tuple[_Event, list[float]]] = []  # with what lies within, directly
    for event in sorted(events, key=lambda e: (e.start_ns, -e.end_ns)):
        while open_ and open_[-1][0].end_ns <= event.start_ns:
            yield _closed(open_.pop())
        if open_ and event.end_ns <= open_[-1][0].end_ns:
            open_[-1][1].append(event.end_ns - event.start_ns)
        open_.append((event, []))
    while open_:
        yield _closed(open_.pop())


def _closed(opened: tuple[_Event, list[float]]) -> tuple[_Event, float]:
    event, within = opened
    return event, max(0.0, event.end_ns - event.start_ns - sum(within)) / 1e3


def step_name(module: str) -> str:
    """What the engine calls it: "decode_4" of "jit_decode_4"."""
    return module.removeprefix("jit_") or "(no module)"


def kind_of(module: str) -> str:
    """ "decode" of "jit_decode_4", so that steps of another size can be compared with it."""
    return re.sub(r"(_\d+)+$", "", step_name(module))
