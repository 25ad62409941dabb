"""Accessibility and layout: axe-core's rules, contrast, widths from phones to 4K screens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from conftest import Visit
from page_actions import answer_with, events, set_options, show_panel
from playwright.sync_api import Page, expect

from tests.server_process import ROOT

AXE = ROOT / "tests/browser/node_modules/axe-core/axe.min.js"
SAMPLE = (
    "# Title\n\nText with `code`, [a link](https://example.org) and $x^2$.\n\n"
    "| a | b |\n|--|--|\n| 1 | 2 |\n\n"
    "```python\ndef f():  # note\n    return 'x' + str(3.5)\n```\n\n"
    "> quote\n\n- [x] done\n\n$$\\sum_i x_i$$"
)
CALL = {"index": 0, "id": "c", "function": {"name": "add", "arguments": '{"a": 1}'}}


def problems(page: Page) -> list[str]:
    """Return the violations that axe-core finds, with an example of each."""
    page.wait_for_timeout(50)
    page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run().then((results) => results.violations)")
    return [f"{each['id']}: {each['nodes'][0]['html']}" for each in found]


def converse(visit: Visit) -> None:
    """Show answers with every kind of content, and an error."""
    page = visit.page
    answer_with(page, events({"reasoning": "Hm"}, {"content": SAMPLE}))
    visit.ask("Hello")
    visit.answered()
    expect(page.locator(".katex").first).to_be_visible()
    page.get_by_text("Reasoning").click()
    page.unroute_all()
    answer_with(page, events({"tool_calls": [CALL]}))
    visit.ask("Add")
    page.get_by_label("Result of add").wait_for()


STATES: dict[str, Callable[[Page], None]] = {
    "chat": lambda page: None,
    "settings": lambda page: show_panel(page, "settings"),
    "engine": lambda page: show_panel(page, "engine"),
    "editor": lambda page: page.get_by_role("button", name="Edit").first.click(),
}


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1440, "dark")])
def test_axe_finds_no_violation(server, visit, width, scheme):
    visit = visit(server, viewport={"width": width, "height": 844}, color_scheme=scheme)
    page = visit.page
    expect(page.locator("#state")).to_have_attribute("data-state", "ready")
    assert problems(page) == []
    converse(visit)
    found = {}
    for name, reach in STATES.items():
        reach(page)
        found[name] = problems(page)
        if page.locator("[data-closes]:visible").count() and width < 1000:
            page.locator("[data-closes]:visible").first.click()
    page.keyboard.press("Control+k")
    found["chats"] = problems(page)
    page.locator(".chat-row").hover()
    page.get_by_role("button", name="Delete Hello").click()
    found["dialog"] = problems(page)
    page.keyboard.press("Escape")
    assert not any(found.values()), found


def test_axe_detects_a_planted_violation(server, visit):
    page = visit(server).page
    page.evaluate("document.getElementById('send').removeAttribute('aria-label')")
    page.evaluate("document.getElementById('send').removeAttribute('title')")
    assert any(each.startswith("button-name") for each in problems(page))


@pytest.mark.parametrize("width", [360, 390, 768, 1280, 3840])
def test_nothing_is_cut_off_at_any_width(server, visit, width):
    visit = visit(server, viewport={"width": width, "height": max(740, width // 2)})
    page = visit.page
    over = """() => [document.documentElement.scrollWidth - innerWidth,
      ...[...document.querySelectorAll("main > *")].map((e) => e.scrollWidth - e.clientWidth),
      document.getElementById("log").scrollWidth - document.getElementById("log").clientWidth]"""
    set_options(page, max_tokens="20")
    for panel in ("settings", "engine"):
        show_panel(page, panel)
        assert max(page.evaluate(over)) <= 0, panel
        box = page.locator(f"#{panel}").bounding_box()
        assert box and box["x"] + box["width"] == width
        assert width > 760 or box["x"] == 0
        page.get_by_role("button", name=f"Close the {panel}").click()
    answer_with(page, events({"content": "word" * 200 + f"\n\n{SAMPLE}\n\n`{'x' * 300}`"}))
    visit.ask("word" * 200)
    visit.answered()
    assert max(page.evaluate(over)) <= 0
    page.keyboard.press("Control+b")
    assert max(page.evaluate(over)) <= 0
    size = page.locator(".markdown").evaluate("e => parseFloat(getComputedStyle(e).fontSize)")
    assert size > 24 if width == 3840 else 14 < size < 18
