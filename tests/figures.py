"""Writes the tables of `docs/models.md` from test results: `make figures`.

A test records its measurements with the fixture `figure`. This module runs these tests and puts the
results between the marks in the page.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "models.md"
TESTS = (
    *("test_parity", "test_families", "test_gguf", "test_quantized", "test_quantized_experts"),
    *("test_quantization", "test_lora_models"),
    *("test_gguf_gpt_oss", "test_gguf_latent", "test_gguf_gemma4"),
)
PARALLEL = [
    f"tests/parallel/test_{name}.py"
    for name in ("tensor_parallel", "parallel_forms", "parallel_families", "parallel_state")
]
# By table: the title of its rows, and its columns.
TABLES: dict[str, tuple[str, dict[str, str]]] = {
    "families": (
        "model",
        {
            "whole": "whole prompts",
            "chunks": "chunks of 7",
            "greedy": "greedy tokens",
            "bfloat16": "bfloat16",
            "packed": "packed bfloat16",
            "gguf": "weights from GGUF",
            "devices": "4 devices",
            "adapters": "adapters",
        },
    ),
    "forms": (
        "format",
        {
            "logits": "logits",
            "devices": "MLP on 4 devices",
            "experts": "experts",
        },
    ),
    "rounded": ("weights", {"nats": "KL, nats", "same": "top-1 agreement"}),
}

Noted = dict[str, dict[str, dict[str, Any]]]  # table, row, column


class Figures:
    """A plugin that keeps the figures of passing tests."""

    def __init__(self) -> None:
        self.noted: Noted = defaultdict(lambda: defaultdict(dict))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            for name, value in report.user_properties:
                if name == "figure":
                    table, row, column, found = value
                    self.noted[table][row][column] = found


def table(name: str, rows: dict[str, dict[str, Any]]) -> str:
    head, columns = TABLES[name]
    lines = [[head, *columns.values()], ["---"] * (1 + len(columns))]
    lines += [[row, *(_text(found.get(key)) for key in columns)] for row, found in rows.items()]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{float(value):.1e}"


def marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}: written by `make figures` -->\n", f"<!-- end of {name} -->\n"


def between(page: str, name: str) -> tuple[int, int]:
    begin, end = marks(name)
    start = page.index(begin) + len(begin)
    return start, page.index(end, start)


def main() -> int:
    figures = Figures()
    files = [f"tests/models/{name}.py" for name in TESTS] + PARALLEL
    status = pytest.main(["-q", "--rootdir", str(ROOT), *files], plugins=[figures])
    if status != pytest.ExitCode.OK:
        print("docs/models.md is left as it is: a test failed", file=sys.stderr)
        return 1
    page = PAGE.read_text()
    for name in TABLES:
        start, end = between(page, name)
        page = page[:start] + table(name, figures.noted[name]) + page[end:]
    PAGE.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
