"""Makes the pictures of docs/profiling.md: `make pictures`.

Profiles the bundled model with 4 and with 16 sequences, compares them, and captures the result in
TensorBoard, in XProf and as a page.
"""

from __future__ import annotations

import argparse
import gzip
import json
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
from urllib.parse import quote

from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.server_process import ROOT, running

START_S = 120.0
WIDE = {"width": 1400, "height": 900}
PHONE = {"width": 390, "height": 700}
COLORS = 256


def profile(python: str, folder: Path) -> None:
    """Write the folders "before" and "after" with the compared profiles, and "diff.html"."""
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
    command = [program, "--logdir", ".", "--host", "127.0.0.1", "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    said = folder / "tensorboard.log"
    with said.open("w") as log, running(command, stderr=log, cwd=folder):
        end_s = time.monotonic() + START_S
        while not answers(f"{url}/data/runs"):
            assert time.monotonic() < end_s, f"TensorBoard does not start: {said.read_text()}"
            time.sleep(0.5)
        yield url


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url) as response:
            return b"difference" in response.read()
    except (urllib.error.URLError, ConnectionError):
        return False


def scalars(page: Page, url: str) -> None:
    """Show our kernels in a decode step, without smoothing."""
    tags = quote("op_time_us/decode/.*forge_", safe="")
    page.goto(f"{url}/#scalars&tagFilter={tags}&_smoothingWeight=0")
    expect(page.get_by_text("forge_attention").first).to_be_visible()
    page.wait_for_timeout(5000)  # lines are drawn on a canvas, which has no event to wait for


def text(page: Page, url: str) -> None:
    page.goto(f"{url}/#text")
    page.get_by_text("decode/layers/attention").first.wait_for()


def traces(page: Page, url: str) -> None:
    """Show the trace viewer, with the list of traces open."""
    with urllib.request.urlopen(f"{url}/data/plugin/profile/runs") as response:
        content = response.read()
    if response.headers.get("Content-Encoding") == "gzip":  # regardless of Accept-Encoding
        content = gzip.decompress(content)
    run = min(name for name in json.loads(content) if name.startswith("before/decode"))
    page.goto(f"{url}/?tool=trace_viewer@&run={quote(run, safe='')}#profile")
    plugin = page.frame_locator("iframe").first
    viewer = plugin.frame_locator("iframe").first
    viewer.get_by_text("/host:CPU").locator("visible=true").first.wait_for()
    page.wait_for_timeout(3000)  # the threads are drawn on a canvas, which has no event to wait for
    plugin.get_by_role("combobox").first.click()
    expect(plugin.get_by_role("option")).to_have_count(4)


def take(page: Page, file: Path) -> None:
    """Save a picture of the viewport in few colors."""
    page.wait_for_timeout(2000)  # until all animations have ended
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
            # The pictures may be made as root, for which the browser has no sandbox.
            browser = driver.chromium.launch(
                executable_path=options.chromium, args=["--no-sandbox"]
            )
            take_all(browser, url, folder, options.out)
            browser.close()


if __name__ == "__main__":
    main()
