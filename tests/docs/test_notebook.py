"""The example notebook runs as in Jupyter: cell by cell, on a running event loop."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from documents import ROOT

from forge_jax.config import BatchConfig

NOTEBOOK = json.loads((ROOT / "examples/tour.ipynb").read_text())
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_outputs_are_not_committed():
    assert CODE
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in CODE)
    assert NOTEBOOK["nbformat"] == 4


@pytest.mark.slow
def test_cells_run_on_a_running_event_loop(capsys, monkeypatch):
    # With 512 tokens per step, the default, an engine compiles two steps more.
    monkeypatch.setitem(BatchConfig.__init__.__kwdefaults__, "max_num_batched_tokens", 64)

    async def run() -> tuple[dict[str, Any], list[str]]:
        names: dict[str, Any] = {}
        printed = []
        for cell in CODE:
            exec("".join(cell["source"]), names)  # a kernel also runs cells on its event loop
            printed.append(capsys.readouterr().out)
        return names, printed

    names, printed = asyncio.run(run())
    assert "Paris" in printed[1] and "42" in printed[1]
    assert "Tokyo" in printed[2]
    assert max(names["scores"], key=names["scores"].get) == " Rome"
    lines = printed[4].splitlines()
    assert len(lines) == len(names["stream"]) and "Cairo" in lines[-1]
