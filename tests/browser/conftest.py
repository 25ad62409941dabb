"""Fixtures: a server process with the bundled model, and a real browser on its page.

`make test-browser` creates the environment of these tests. If the driver is not installed, nothing
here is collected.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import shutil
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from tests import server_process
from tests.server_process import ROOT

if importlib.util.find_spec("playwright") is None:
    collect_ignore_glob = ["test_*.py"]

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page

KEY = "the-key-of-the-tests"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--page-server-python",
        default=str(ROOT / ".venv/bin/python"),
        help="the Python that has forge-jax",
    )
    parser.addoption(
        "--chromium",
        default=shutil.which("chromium") or shutil.which("chromium-browser"),
        help="the browser",
    )


@dataclass(frozen=True)
class Server:
    """A running server process."""

    url: str

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path) as response:
            return json.load(response)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as response:
            return json.load(response)

    def until(self, holds: Callable[[dict[str, Any]], bool], timeout_s: float = 60.0) -> None:
        end_s = time.monotonic() + timeout_s
        while not holds(stats := self.get("/stats")):
            assert time.monotonic() < end_s, f"it never held: {stats}"
            time.sleep(0.01)


def serving(request: pytest.FixtureRequest, *flags: str) -> Iterator[Server]:
    python = request.config.getoption("--page-server-python")
    with server_process.serving(python, *flags) as (url, _, _):
        yield Server(url=url)


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    flags = ("--num-blocks", "512", "--max-num-seqs", "8")
    yield from serving(request, *flags)


@pytest.fixture(scope="session")
def slow_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """Start a server at 20 tokens/s that drafts from earlier outputs, so that tests can look."""
    flags = ("--fake", "--fake-step-time-ms", "50", "--num-blocks", "256")
    yield from serving(request, *flags, "--speculation", "suffix", "--engine-process")


@pytest.fixture(scope="session")
def closed_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """Start a server that requires `KEY`; its model does not matter."""
    yield from serving(request, "--fake", "--api-key", KEY)


@pytest.fixture(scope="session")
def browser(request: pytest.FixtureRequest) -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    chromium = request.config.getoption("--chromium")
    assert chromium, "there is no chromium: install it (on Debian: apt-get install chromium)"
    with sync_playwright() as driver:
        # Tests may run as root, for which the browser has no sandbox.
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass
class Visit:
    """A page and the record of its requests; `check` runs at the end of each test."""

    page: Page
    origin: str
    requested: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)  # errors from the console and the scripts
    refusals: int = 0  # number of 4xx and 5xx answers that a test expects

    def check(self) -> None:
        """Raise if a script failed, a policy was violated, or a request left for another origin."""
        refused = [text for text in self.wrong if text.startswith("Failed to load resource")]
        assert len(refused) <= self.refusals, refused
        assert not [text for text in self.wrong if text not in refused]
        assert self.requested, "nothing was recorded"
        for url in self.requested:
            scheme, host, *_ = urlsplit(url)
            assert f"{scheme}://{host}" == self.origin, f"a request to {url}"

    def ask(self, text: str) -> None:
        self.page.get_by_label("Message", exact=True).fill(text)
        self.page.keyboard.press("Enter")

    def streaming(self, number: int = 1) -> None:
        """Wait for the first text of an answer."""
        answers = self.page.locator(".turn.assistant .answer")
        answers.nth(number - 1).filter(has_text=re.compile(r"\S")).wait_for()

    def answered(self, number: int = 1) -> str:
        """Wait for the end of the first `number` answers and return the text of the last one."""
        turns = self.page.locator(".turn.assistant")
        turns.nth(number - 1).locator(".meta").wait_for()
        return turns.nth(number - 1).locator(".text").inner_text()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., Visit]]:
    """Open a server's page in a separate profile; the options are those of a browser context."""
    with contextlib.ExitStack() as stack:
        visits: list[Visit] = []

        def visit(server: Server, **options: Any) -> Visit:
            options = {"viewport": {"width": 1280, "height": 800}, **options}
            context: BrowserContext = browser.new_context(**options)
            stack.callback(context.close)
            context.set_default_timeout(60_000)
            visit = Visit(context.new_page(), server.url)
            # A handler of a route may still run when the test ends.
            stack.callback(visit.page.unroute_all, behavior="ignoreErrors")
            visits.append(visit)

            def said(message: ConsoleMessage) -> None:
                if message.type in ("error", "warning"):
                    visit.wrong.append(message.text)

            visit.page.on("console", said)
            visit.page.on("pageerror", lambda error: visit.wrong.append(str(error)))
            context.on("request", lambda request: visit.requested.append(request.url))
            visit.page.goto(server.url)
            return visit

        yield visit
        for each in visits:
            each.check()
