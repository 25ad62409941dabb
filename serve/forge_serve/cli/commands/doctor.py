"""`forge-jax doctor`: describe the installation for a bug report and check it for problems."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from forge_jax.errors import ConfigError
from forge_jax.telemetry.units import bytes_text
from forge_serve.cli.flags import MODEL, Commands
from forge_serve.cli.terminal import harmless

if TYPE_CHECKING:
    from forge_jax.tools.doctor import Report

GIB = 1 << 30
TIMEOUT_S = 60.0
DESCRIPTION = """\
Report the installed packages, the devices that JAX finds, and problems. Paste the output into bug
reports. With MODEL, also check if this machine can serve that model, without downloading it. The
exit status is 1 if there is a problem.

The report contains no keys, tokens or host names."""


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "doctor",
        help="check the installation and print a report",
        usage="forge-jax doctor [MODEL] [options]",
        description=DESCRIPTION,
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL.metadata["doc"])
    parser.add_argument("--json", action="store_true", help="write one JSON object instead of text")
    parser.add_argument(
        "--timeout",
        type=float,
        default=TIMEOUT_S,
        metavar="X",
        help="seconds that each check may take, such as finding devices or building the CPU "
        f"kernels; more than 0 (default: {TIMEOUT_S:g})",
    )
    parser.set_defaults(run=run)


def run(options: dict[str, Any]) -> int:
    if not options["timeout"] > 0:
        raise ConfigError(f"--timeout must be greater than 0, not {options['timeout']}")
    from forge_jax.tools.doctor import examine

    report = examine(options["model"], timeout_s=options["timeout"])
    if options["json"]:
        print(json.dumps(report.as_json(), indent=2))
    else:
        sys.stdout.write(harmless(text(report)))
    return 0 if report.ok else 1


def text(report: Report) -> str:
    """Return the report for the terminal, one fact per line."""
    facts = report.facts
    rows = [
        ("forge-jax", facts["forge-jax"]),
        ("python", f"{facts['python']} on {facts['platform']}"),
        ("cpu", f"{facts['cpu']}, {facts['cores']} cores"),
        (
            "memory",
            f"{_gib(facts['memory_bytes'])}, {_gib(facts['memory_available_bytes'])} available",
        ),
        *_gpus(facts),
        *(("device", _device(device)) for device in facts.get("devices", ())),
        ("CPU kernels", _kernels(facts["cpu_kernels"])),
        *((f"cache of {cache['name']}", _cache(cache)) for cache in facts["caches"]),
        ("open files", "{open_files}, at most {open_files_at_most}".format(**facts["limits"])),
        *_model(facts.get("model")),
        *((name, value) for name, value in facts["environment"].items()),
        ("packages", ", ".join(f"{name} {v}" for name, v in facts["packages"].items())),
    ]
    lines = [f"{name}: {value}" for name, value in rows]
    lines.append("")
    for issue in report.issues:
        lines += [f"{issue.level}: {issue.what}", f"  remedy: {issue.remedy}"]
    if report.ok:
        lines.append("no problem found")
    return "\n".join(lines) + "\n"


def _gpus(facts: dict[str, Any]) -> list[tuple[str, str]]:
    nvidia, rows = facts["nvidia"], []
    if nvidia["driver"] is not None or "driver_cuda" in facts:
        cuda = facts.get("driver_cuda")
        rows.append(
            ("NVIDIA driver", (nvidia["driver"] or "") + (f" for CUDA {cuda}" if cuda else ""))
        )
    return rows + [("NVIDIA GPU", ", ".join(gpu.values())) for gpu in nvidia["gpus"]]


def _device(device: dict[str, Any]) -> str:
    line = f"{device['platform']}:{device['id']} {device['kind']}"
    if device["memory_bytes"] is None:
        return line
    return f"{line}, {_gib(device['memory_bytes'])}, {_gib(device['memory_used_bytes'])} in use"


def _kernels(found: dict[str, Any]) -> str:
    state = "built" if found.get("built") else "not built"
    parts = [state, found.get("chosen"), found.get("compiler")]
    return ", ".join(filter(None, parts))


def _cache(cache: dict[str, Any]) -> str:
    if cache["fault"] is not None:
        return f"{cache['path']}: {cache['fault']}"
    size = "many files" if cache["num_bytes"] is None else f"{cache['num_bytes'] / 1e6:,.1f} MB"
    return f"{cache['path']}, {size}, {_gib(cache['free_bytes'])} free there"


def _model(found: dict[str, Any] | None) -> list[tuple[str, str]]:
    if found is None:
        return []
    parts = [found["name"], found.get("architecture"), found.get("dtype")]
    if "weights_bytes" in found:
        parts.append(f"{bytes_text(found['weights_bytes'])} of weights")
    if found.get("state_bytes"):
        parts.append(f"{bytes_text(found['state_bytes'])} of state per sequence")
    return [("model", ", ".join(filter(None, parts)))]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
