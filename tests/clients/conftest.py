"""Fixtures: a server process with the bundled model, for clients.

`make test-clients` creates the environment of these tests. If the clients are not installed,
nothing here is collected.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from tests import server_process
from tests.server_process import ROOT

HERE = Path(__file__).parent
START_S = 90.0
KEY = "the-key-of-the-tests"

CLIENTS = (
    *("anthropic", "instructor", "langchain_openai", "litellm", "pydantic_ai"),
    *("ray", "schemathesis", "smg"),
)
collect_ignore = ["in_process"]  # require forge-jax; see `environment`
if any(importlib.util.find_spec(name) is None for name in CLIENTS):
    collect_ignore_glob = ["test_*.py"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--server-python",
        default=str(ROOT / ".venv/bin/python"),
        help="the Python that has forge-jax",
    )


@dataclass(frozen=True)
class Server:
    """A running server process. `url` has no /v1."""

    url: str
    model: str
    process: subprocess.Popen[str] | None = None

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"

    @cached_property
    def document(self) -> dict[str, Any]:
        request = urllib.request.Request(f"{self.url}/openapi.json")
        with urllib.request.urlopen(request) as response:
            return json.load(response)

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path) as response:
            return json.load(response)

    def lines(self, path: str, body: dict[str, Any]) -> list[str]:
        """Return the non-empty lines of a stream."""
        with self._posted(path, body) as response:
            return [line for raw in response if (line := raw.strip().decode())]

    def post(self, path: str, body: dict[str, Any]) -> Any:
        with self._posted(path, body) as response:
            return json.load(response)

    def _posted(self, path: str, body: dict[str, Any]) -> Any:
        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data=data, headers=headers)
        return urllib.request.urlopen(request)


@contextmanager
def serving(request: pytest.FixtureRequest, *flags: str) -> Iterator[Server]:
    python = request.config.getoption("--server-python")
    with server_process.serving(python, *flags) as (url, model, process):
        yield Server(url=url, model=model, process=process)


def environment(python: str) -> dict[str, str]:
    """Return the environment of forge-jax's Python, with this one's packages behind its own."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    theirs = subprocess.check_output([python, "-c", code], text=True).strip()
    path = [os.environ.get("PYTHONPATH", ""), theirs, sysconfig.get_path("purelib")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """Start the bundled model with a chat template that supports tools."""
    with serving(request, "--chat-template", str(HERE / "tools.jinja")) as server:
        yield server


@pytest.fixture(scope="session")
def closed_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """Start a server that requires `KEY`; its model does not matter."""
    with serving(request, "--fake", "--api-key", KEY) as server:
        yield server


@pytest.fixture(scope="session")
def python() -> str:
    """Return the interpreter that has the clients."""
    return sys.executable
