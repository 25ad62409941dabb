"""The tables of `docs/models.md`: a row for every tested model, and figures within limits."""

from __future__ import annotations

import pytest
from figures import PAGE, TABLES, Figures, between, table

LIMITS = {"whole": 2e-4, "chunks": 2e-4, "devices": 2e-4, "adapters": 1e-4}
LIMITS |= {"logits": 2e-6, "experts": 2e-6}


def rows(name: str) -> dict[str, dict[str, str]]:
    page = PAGE.read_text()
    start, end = between(page, name)
    _, _, *lines = page[start:end].strip().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row: dict(zip(TABLES[name][1], found, strict=True)) for row, *found in cells}


def test_every_golden_model_has_a_row(goldens):
    found = rows("families")
    assert set(found) == {folder.name for folder in goldens.iterdir() if folder.is_dir()}
    for name, row in found.items():
        assert row["greedy"] == "72 of 72", name
        assert "-" not in (row["whole"], row["chunks"])


@pytest.mark.parametrize("name", ["families", "forms"])
def test_figures_are_within_their_limits(name):
    for row, found in rows(name).items():
        for column, value in found.items():
            if column in LIMITS and value != "-":
                assert float(value) < LIMITS[column], (row, column)


def test_recorded_figures_become_rows_in_order():
    figures = Figures()
    for row, column, value in (("b", "experts", "same bits"), ("a", "logits", 1.234e-7)):
        report = pytest.TestReport("x", ("", 0, ""), {}, "passed", None, "call")
        report.user_properties = [("figure", ("forms", row, column, value)), ("other", 1)]
        figures.pytest_runtest_logreport(report)
    failed = pytest.TestReport("x", ("", 0, ""), {}, "failed", None, "call")
    failed.user_properties = [("figure", ("forms", "c", "experts", "same bits"))]
    figures.pytest_runtest_logreport(failed)
    assert table("forms", figures.noted["forms"]) == (
        "| format | logits | MLP on 4 devices | experts |\n"
        "| --- | --- | --- | --- |\n"
        "| b | - | - | same bits |\n| a | 1.2e-07 | - | - |\n"
    )
