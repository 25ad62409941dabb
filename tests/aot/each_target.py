"""Runs a script of compilations for each GPU, because Mosaic compiles for only one per process."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

from forge_jax.step.targets import TARGETS


def run_each_target(
    header: Sequence[str],
    output: Path | None,
    targets: Sequence[str] = tuple(TARGETS),
    parts: Mapping[str, int] = MappingProxyType({}),
) -> int:
    """Run this script again with each `--target`, one process per processor at a time.

    Args:
      header: names of the columns that the script prints.
      output: the file for the whole table, if any.
      targets: the targets, longest first.
      parts: number of processes of a target, each with `--part`. Others have one process.

    Returns:
      The exit code: 1 if a process failed, or if no row was printed.
    """

    def run(job: Sequence[str]) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *sys.argv, *job]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)

    jobs = [
        ("--target", target, *(("--part", str(part)) if target in parts else ()))
        for target in targets
        for part in range(parts.get(target, 1))
    ]
    table = [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header))]
    print("\n".join(table), flush=True)
    code, first = 0, len(table)
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for done in pool.map(run, jobs):
            print(done.stdout, end="", flush=True)
            table += [line for line in done.stdout.splitlines() if line.startswith("|")]
            code = code or done.returncode
    if output is not None:
        output.write_text("\n".join(table) + "\n")
    return code or int(len(table) == first)
