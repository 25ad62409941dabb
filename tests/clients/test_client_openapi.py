"""The served OpenAPI document, and schemathesis on a real server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

HERE = Path(__file__).parent
CASES = 15  # per operation, in addition to those that cover its schema


def test_openapi_document_is_valid_3_1(server):
    OpenAPIV31SpecValidator(server.document).validate()


@pytest.mark.timeout(900)
def test_schemathesis_finds_no_failures(server, tmp_path):
    command = [
        str(Path(sys.executable).parent / "schemathesis"),
        "--config-file", str(HERE / "schemathesis.toml"),
        "run", f"{server.url}/openapi.json",
        "--max-examples", str(CASES),
        "--phases", "examples,coverage,fuzzing",
        "--workers", "2",
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=HERE, env={"PYTHONPATH": str(HERE)}
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
