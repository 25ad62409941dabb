"""The process of one part: runs its cases one by one, and appends each row as soon as it exists."""

from __future__ import annotations

import faulthandler
import json
import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import PARTS, Missing

ENOUGH_S = 5.0  # remaining time that is enough to start a case


def work(part: str, rows: Path, trace: Path, end_s: float, *, tiny: bool) -> None:
    """Run the cases of a part that have no row yet.

    A case that takes longer than its limit ends this process, with a traceback of all threads in
    `trace`. Its row is then the one of `begun`.

    Args:
      part: a key of PARTS.
      rows: a file of JSON lines, to which rows are appended.
      trace: a file for the traceback of a case that hangs.
      end_s: when no case may run any more, in seconds of `time.time`.
      tiny: use small shapes.
    """
    done = names_of(read_rows(rows), part)
    with trace.open("w") as file:
        for case in PARTS[part].cases(tiny):
            left_s = end_s - time.time()
            if case.name in done:
                continue
            if left_s < ENOUGH_S:
                return
            limit_s = min(case.limit_s, left_s)
            append(rows, {"part": part, "begun": case.name, "limit_s": round(limit_s, 1)})
            faulthandler.dump_traceback_later(limit_s, exit=True, file=file)
            begin_s = time.perf_counter()
            try:
                figures = case.run()
            except Missing as missing:
                figures = {"skipped": str(missing)}
            except Exception as failure:
                figures = {"failed": f"{type(failure).__name__}: {failure}"[:400]}
            faulthandler.cancel_dump_traceback_later()
            seconds = round(time.perf_counter() - begin_s, 1)
            append(rows, {"part": part, "case": case.name, **figures, "seconds": seconds})


def drop_partial_line(rows: Path) -> None:
    """Remove the end of a line whose writer was killed."""
    if rows.exists() and not (text := rows.read_text()).endswith("\n"):
        rows.write_text(text[: text.rfind("\n") + 1])


def append(rows: Path, row: dict[str, Any]) -> None:
    with rows.open("a") as file:
        file.write(json.dumps(row, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_rows(rows: Path) -> list[dict[str, Any]]:
    """Return all whole lines; a process that was killed may have left a part of one."""
    if not rows.exists():
        return []
    whole = rows.read_text().split("\n")[:-1]
    return [json.loads(line) for line in whole if line]


def names_of(rows: Collection[dict[str, Any]], part: str) -> set[str]:
    """Return the cases of a part that have a row."""
    return {row["case"] for row in rows if row["part"] == part and "case" in row}


def unfinished(rows: Collection[dict[str, Any]], part: str) -> dict[str, Any] | None:
    """Return the line of a case that was begun last and has no row."""
    begun = [row for row in rows if row["part"] == part and "begun" in row]
    if not begun or begun[-1]["begun"] in names_of(rows, part):
        return None
    return begun[-1]
