"""Makes the pictures of docs/profiling.md: `make pictures`.

Profiles the bundled model with 4 sequences and with 16, compares them, and looks at what came of it
in TensorBoard, in XProf and as a page.
"""

from __future__ import annotations

import argparse
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.server_process import ROOT, running

START_S = 120.0
WIDE = {"width": 1400, "height": 900}
PHONE = {"width": 390, "height": 700}
COLORS = 64


def profile(python: str, folder: Path) -> None:
    """The folders "before" and "after", with what is to be compared, and "diff.html"."""
    for command in (
        "profile forge-tiny --logdir before",
        "profile forge-tiny --logdir after --sequences 16",
        "profile diff before after --html diff.html --logdir .",
    ):
        words = [python, "-m", "forge_serve", *command.split()]
        subprocess.run(words, cwd=folder, check=True, stdout=subprocess.DEVNULL)


@contextmanager
def tensorboard(folder: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = str(Path(sys.executable).with_name("tensorboard"))
    command = [program, "--logdir", str(folder), "--host", "127.0.0.1", "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    with running(command):
        end_s = time.monotonic() + START_S
        while not answers(f"{url}/data/runs"):
            assert time.monotonic() < end_s, "TensorBoard does not start"
            time.sleep(0.5)
        yield url


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url) as response:
            return b"difference" in response.read()
    except (urllib.error.URLError, ConnectionError):
        return False


def scalars(page: Page, url: str) -> None:
    page.goto(f"{url}/?tagFilter=op_time_us/decode/.*forge_#timeseries")
    page.get_by_role("button", name="Close side pane").click()
    expect(page.locator("card-view").nth(5)).to_be_visible()
    page.locator("card-view svg path").first.wait_for(state="attached")


def text(page: Page, url: str) -> None:
    page.goto(f"{url}/#text")
    page.get_by_text("decode/layers/attention").first.wait_for()


def traces(page: Page, url: str) -> None:
    """The trace viewer, with the list of traces open."""
    page.goto(f"{url}/#profile")
    plugin = page.frame_locator("iframe").first
    plugin.get_by_role("combobox").first.wait_for()
    plugin.get_by_text("Overview Page").first.click()
    plugin.get_by_role("option", name=re.compile("^ *Trace Viewer *$")).click()
    viewer = plugin.frame_locator("iframe").first
    viewer.get_by_text("/host:CPU").locator("visible=true").first.wait_for()
    page.wait_for_timeout(3000)  # what the threads did is drawn, and in no document
    plugin.get_by_role("combobox").first.click()
    expect(plugin.get_by_role("option")).to_have_count(4)


def take(page: Page, file: Path) -> None:
    """A picture of what is seen, in few colours."""
    page.wait_for_timeout(2000)  # until what moves has come to rest
    page.screenshot(path=file)
    with Image.open(file) as picture:
        few = picture.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE)
    few.save(file, optimize=True)
    print(f"{file}: {file.stat().st_size / 1e3:.0f} kB")


def take_all(browser: Browser, url: str, folder: Path, out: Path) -> None:
    for name, open_it in (("scalars", scalars), ("text", text), ("traces", traces)):
        page = browser.new_page(viewport=WIDE)
        page.set_default_timeout(START_S * 1000)
        open_it(page, url)
        take(page, out / f"profile-{name}.png")
        page.close()
    for name, viewport, scheme in (("page", WIDE, "light"), ("page-phone", PHONE, "dark")):
        page = browser.new_page(viewport=viewport, color_scheme=scheme)
        page.goto((folder / "diff.html").as_uri())
        take(page, out / f"profile-{name}.png")
        page.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forge-python", default=str(ROOT / ".venv/bin/python"))
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    parser.add_argument("--chromium", default=chromium)
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        profile(options.forge_python, folder)
        with tensorboard(folder) as url, sync_playwright() as driver:
            # Who makes them may be root, for whom the browser has no sandbox.
            browser = driver.chromium.launch(
                executable_path=options.chromium, args=["--no-sandbox"]
            )
            take_all(browser, url, folder, options.out)
            browser.close()


if __name__ == "__main__":
    main()
