"""Take the pictures of the page for the README: `make page-pictures`.

Serves the bundled model and sends one question on the page. The pictures of a desktop show the
finished answer while other requests run, so that the engine view has sequences. The picture of a
phone shows an answer with Markdown, which the bundled model cannot write. Needs the environment of
`make test-browser`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.browser.page_actions import answer_with, events, set_options, show_panel
from tests.server_process import ROOT, serving

FLAGS = ("--num-blocks", "256", "--max-num-seqs", "8", "--speculation", "suffix")
VIEWPORT = {"width": 1280, "height": 960}
PHONE = {"width": 390, "height": 760}
QUESTION = "Tell me a story about a dog."
SUBJECTS = ("a cat", "a dragon", "a boat", "the moon")
MARKDOWN_QUESTION = "How does temperature change the probabilities?"
MARKDOWN = r"""The **softmax** divides the logits $z_i$ by the temperature $T$:

$$p_i = \frac{e^{z_i / T}}{\sum_j e^{z_j / T}}$$

| temperature | effect |
|--:|:--|
| 0 | most likely token |
| 1 | as trained |
| 2 | more surprises |

```python
def softmax(z, temperature=1.0):
    z = z / temperature
    e = jnp.exp(z - z.max())
    return e / e.sum()  # f32[V]
```
"""
MAX_BYTES = 200_000


def complete(url: str, subject: str, ended: threading.Event) -> None:
    """Send completions with one prefix, one after the other, until `ended` is set."""
    for seed in itertools.count():
        if ended.is_set():
            return
        body = {
            "messages": [{"role": "user", "content": f"Tell me a story about {subject}."}],
            "seed": seed,
            "ignore_eos": True,
        }
        request = urllib.request.Request(
            f"{url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as response:
            response.read()


@contextmanager
def load(url: str) -> Iterator[None]:
    """Keep one request per subject running."""
    ended = threading.Event()
    threads = [threading.Thread(target=complete, args=(url, each, ended)) for each in SUBJECTS]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def take(browser: Browser, url: str, scheme: str, file: Path) -> None:
    """Take one picture of a desktop in a color scheme, "light" or "dark"."""
    page = browser.new_page(viewport=VIEWPORT, color_scheme=scheme)
    page.goto(url)
    set_options(page, temperature="0")
    show_panel(page, "engine")
    page.get_by_label("Message", exact=True).fill(QUESTION)
    page.keyboard.press("Enter")
    page.locator(".turn.assistant .meta").wait_for()
    with load(url):
        expect(page.locator("#sequences tr").nth(len(SUBJECTS) - 1)).to_be_visible()
        page.wait_for_timeout(3000)  # the time line of the steps fills
        expect(page.locator("#sequences tr").nth(1)).to_be_visible()
        save(page, file)


def take_phone(browser: Browser, url: str, file: Path) -> None:
    """Take a picture of an answer with Markdown."""
    page = browser.new_page(viewport=PHONE, color_scheme="dark")
    page.goto(url)
    answer_with(page, events({"content": MARKDOWN}))
    page.get_by_label("Message", exact=True).fill(MARKDOWN_QUESTION)
    page.keyboard.press("Enter")
    page.locator(".turn.assistant .meta").wait_for()
    expect(page.locator(".katex").first).to_be_visible()
    page.locator("#log").evaluate("log => log.scrollTo(0, 0)")
    page.wait_for_timeout(500)  # fonts load
    save(page, file)


def save(page: Page, file: Path) -> None:
    page.screenshot(path=file)
    page.close()
    size = file.stat().st_size
    assert size < MAX_BYTES, f"{file} has {size} bytes"
    print(f"{file}: {size / 1e3:.0f} kB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forge-python", default=str(ROOT / ".venv/bin/python"))
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    parser.add_argument("--chromium", default=chromium)
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    options = parser.parse_args()
    with serving(options.forge_python, *FLAGS) as (url, _, _), sync_playwright() as driver:
        # The sandbox of the browser does not work for root.
        browser = driver.chromium.launch(executable_path=options.chromium, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            take(browser, url, scheme, options.out / f"page-{scheme}.png")
        take_phone(browser, url, options.out / "page-phone.png")
        browser.close()


if __name__ == "__main__":
    main()
