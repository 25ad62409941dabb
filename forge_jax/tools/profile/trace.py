"""The times of a trace in microseconds: per step, by operation, kernel and host phase.

On a CPU the operations are events of the plane "/host:CPU", on the lines of the threads that ran
them. Their stats have the module, the instruction and the run. On other devices they are events of
a plane "/device:...", on the line "XLA Ops" or else on the lines of its streams. The time of an
event such as a loop excludes the events within it.
"""

from __future__ import annotations

import gzip
import json
import re
import warnings
import zlib
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from jax.profiler import ProfileData

from forge_jax.errors import ConfigError
from forge_jax.telemetry.spans import PREFIX, STEP
from forge_jax.telemetry.trace_recorder import ABOUT, EXECUTABLES
from forge_jax.tools.profile.hlo import NO_SCOPE, Hlo, Instruction, kernel_name, read_hlo

_SUFFIX = ".xplane.pb"


class Op(NamedTuple):
    """The key of operations. Instances of a kernel in one scope and kind of step share it."""

    kind: str  # kind of step: "decode", "mixed"
    scope: str
    kernel: str


@dataclass
class Time:
    """The number of runs, and their total time."""

    count: int = 0
    us: float = 0.0
    by_run: dict[int, float] = field(  # us, by the number of the run in order of time
        default_factory=lambda: defaultdict(float), compare=False
    )

    def add(self, us: float) -> None:
        self.count += 1
        self.us += us


@dataclass
class Trace:
    """The content of one trace.

    Attributes:
      name: the folder of the trace, relative to the given one.
      place: that folder, or the file.
      ran: the model and the flags that differ from their defaults; "" if unknown.
      command_buffers: whether XLA used them while the trace was taken; "" if unknown.
      other_cpu_share: share of the machine's CPU time that other processes used meanwhile.
      ops: times of device operations.
      phases: times of host phases. The runs of a phase are the steps that contain it.
      steps: the number of host steps.
      runs: the number of runs of executables, by kind.
      modules: the names of the modules that ran, by kind.
      figures: values by executable and name: XLA's cost analysis, and the numbers of kernels and
        fusions.
    """

    name: str
    place: Path = Path()
    ran: str = ""
    command_buffers: str = ""
    other_cpu_share: float | None = None
    ops: dict[Op, Time] = field(default_factory=lambda: defaultdict(Time))
    phases: dict[str, Time] = field(default_factory=lambda: defaultdict(Time))
    steps: int = 0
    runs: Counter[str] = field(default_factory=Counter)
    modules: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    figures: dict[tuple[str, str], float] = field(default_factory=dict)


def read_traces(place: Path) -> list[Trace]:
    """Return all traces in a folder, or the trace of a file.

    If a run was traced several times, the newest trace counts.

    Raises:
      ConfigError: there is no trace, or it cannot be read.
    """
    if not place.exists():
        raise ConfigError(f"{place} does not exist")
    if place.is_file():
        name = place.name.removesuffix(_SUFFIX)
        return [_read(name, [place], _run_of(place.resolve().parent), place)]
    newest: dict[Path, Path] = {}  # session folder by run folder
    for session in sorted({file.parent for file in place.resolve().rglob(f"*{_SUFFIX}")}):
        newest[_run_of(session)] = session
    if not newest:
        raise ConfigError(
            f"{place} contains no trace (*{_SUFFIX}): forge-jax profile MODEL --logdir DIR takes "
            "one"
        )
    traces = []
    for run, session in sorted(newest.items()):
        name = _relative(run, place.resolve())
        traces.append(_read(name, sorted(session.glob(f"*{_SUFFIX}")), run, place / name))
    return traces


def _run_of(session: Path) -> Path:
    """Return the folder of a run; the profiler writes to plugins/profile/SESSION below it."""
    above = session.parents
    nested = len(above) > 2 and (above[0].name, above[1].name) == ("profile", "plugins")
    return above[2] if nested else session


def _relative(run: Path, place: Path) -> str:
    name = run.relative_to(place).as_posix() if run.is_relative_to(place) else ""
    return "" if name == "." else name


def _read(name: str, files: Iterable[Path], run: Path, place: Path) -> Trace:
    hlo, figures = _read_executables(run / EXECUTABLES)
    about = _read_json(run / ABOUT) if (run / ABOUT).is_file() else {}
    trace = Trace(
        name,
        place,
        ran=str(about.get("ran", "")),
        command_buffers=str(about.get("command_buffers", "")),
        other_cpu_share=about.get("other_cpu_share"),
    )
    for file in files:
        try:
            data = ProfileData.from_file(str(file))
        except Exception as error:
            raise ConfigError(f"{file}: not a trace of JAX's profiler: {error}") from error
        with warnings.catch_warnings():  # jaxlib's warnings about types without a module
            warnings.simplefilter("ignore", DeprecationWarning)
            add_planes(trace, data, hlo)
    for module in {module for modules in trace.modules.values() for module in modules}:
        for figure, value in figures.get(module, {}).items():
            trace.figures[step_name(module), figure] = value
    return trace


def _read_executables(folder: Path) -> tuple[dict[str, Hlo], dict[str, dict[str, float]]]:
    """Return the compiled modules that are stored next to a trace, and their figures, by module."""
    modules, figures = {}, {}
    for file in sorted(folder.glob("*.hlo.txt.gz")):
        try:
            with gzip.open(file, "rt") as text:
                hlo = read_hlo(text.read())
        except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
            raise _unreadable(file) from error
        modules[hlo.module] = hlo
        own = {"kernels": float(hlo.kernels.total()), "fusions": float(hlo.fusions)}
        beside = file.with_name(file.name.replace(".hlo.txt.gz", ".json"))
        if beside.is_file():
            known = _read_json(beside)
            own |= {
                name.replace("_", " "): v for name, v in known.items() if isinstance(v, int | float)
            }
        own |= {f"kernels in {scope}": float(n) for scope, n in hlo.kernels.items()}
        figures[hlo.module] = own
    return modules, figures


def _read_json(file: Path) -> dict[str, Any]:
    try:
        known = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise _unreadable(file) from error
    if not isinstance(known, dict):
        raise _unreadable(file)
    return known


def _unreadable(file: Path) -> ConfigError:
    return ConfigError(
        f"{file} cannot be read: take the profile again, or delete the file to compare without it"
    )


_Run = tuple[str, Any]  # (module, run id)


class _Event(NamedTuple):
    start_ns: float
    end_ns: float
    name: str
    stats: dict[str, Any]


def add_planes(trace: Trace, data: ProfileData, hlo: dict[str, Hlo]) -> None:
    """Add the profiler's events. `hlo` has the compiled modules, for scopes and kernel names."""
    spans: list[_Event] = []
    runs: dict[str, dict[_Run, float]] = defaultdict(dict)  # start times, by kind
    times: dict[tuple[Op, _Run], float] = defaultdict(float)
    nameless: dict[str, Counter[str]] = defaultdict(Counter)  # events without a run, by module
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
                end_ns = event.start_ns + event.duration_ns
                if name.startswith(PREFIX):
                    spans.append(_Event(event.start_ns, end_ns, name.partition("#")[0], {}))
                    continue
                stats = dict(event.stats)
                if "hlo_op" in stats or on_device:
                    events.append(_Event(event.start_ns, end_ns, name, stats))
            for event, us in _self_times(events):
                module = str(event.stats.get("hlo_module", ""))
                instruction = str(event.stats.get("hlo_op", event.name))
                known = hlo.get(module, Hlo("")).instructions.get(instruction)
                known = known or Instruction(NO_SCOPE, kernel_name(instruction))
                # A GPU's event has the kernel's name, and a CPU's event the instruction's name.
                kernel = known.kernel if event.name == instruction else kernel_name(event.name)
                op = Op(kind_of(module), known.scope, kernel)
                trace.ops[op].add(us)
                trace.modules[op.kind].add(module)
                if "run_id" in event.stats:
                    run = module, event.stats["run_id"]
                    times[op, run] += us
                    began = runs[op.kind].get(run, event.start_ns)
                    runs[op.kind][run] = min(began, event.start_ns)
                else:
                    nameless[module][instruction] += 1
    numbers: dict[_Run, int] = {}
    for kind, begun in runs.items():
        in_order = sorted(begun, key=begun.__getitem__)
        numbers |= {run: i for i, run in enumerate(in_order, start=trace.runs[kind])}
        trace.runs[kind] += len(begun)
    for (op, run), us in times.items():
        trace.ops[op].by_run[numbers[run]] += us
    for module, instructions in nameless.items():
        if not any(module == of for of, _ in numbers):
            # Without run ids, the most common number of events per instruction counts.
            trace.runs[kind_of(module)] += Counter(instructions.values()).most_common(1)[0][0]
    _add_spans(trace, spans)


def _add_spans(trace: Trace, spans: list[_Event]) -> None:
    steps = sorted(span.start_ns for span in spans if span.name == STEP)
    before, trace.steps = trace.steps, trace.steps + len(steps)
    for span in spans:
        us = (span.end_ns - span.start_ns) / 1e3
        phase = trace.phases[span.name.removeprefix(PREFIX)]
        phase.add(us)
        phase.by_run[before + max(0, bisect_right(steps, span.start_ns) - 1)] += us


def _self_times(events: list[_Event]) -> Iterator[tuple[_Event, float]]:
    """Yield the events of a line, with their microseconds without the events within them."""
    open_: list[tuple[_Event, list[float]]] = []  # events with the durations of direct children
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
    """Return the engine's name of a module: "decode_4" of "jit_decode_4"."""
    return module.removeprefix("jit_") or "(no module)"


def kind_of(module: str) -> str:
    """Return the kind of a module: "decode" of "jit_decode_4".

    Steps of different sizes have the same kind, so that they can be compared.
    """
    return re.sub(r"(_\d+)+$", "", step_name(module))
