"""The page that compares two profiles, at desktop and phone widths."""

from __future__ import annotations

import pytest

from forge_jax.tools.profile.compare import OPERATIONS, Comparison, Row, Table
from forge_jax.tools.profile.report import html

NAME = "decode/layers/attention/a_scope_within: bitcast-convert_dynamic-update-slice_fusion"
RUN = "/a/folder/with/a-name-" + "that-is-long-" * 9 + ": 20 host steps"


@pytest.fixture(scope="module")
def content() -> str:
    rows = (
        Row("decode/logits: forge_linear", 12_345.6, 1_234_567.8, "slower"),
        Row(NAME, 100.0, 20.0, "faster"),
        Row("decode/embed: copy", 1.0, 1.1, "same"),
    )
    return html([Comparison("decode", (RUN, RUN), (Table(OPERATIONS, "us", rows),), ({}, {}))])


@pytest.mark.parametrize("width", [320, 390, 960, 961, 1400])
def test_profile_page_is_as_wide_as_the_screen(browser, content, width):
    page = browser.new_page(viewport={"width": width, "height": 700})
    page.set_content(content)
    page.get_by_text("1 hardly changed", exact=True).click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    heights = page.locator("td:first-child").evaluate_all("all => all.map(e => e.clientHeight)")
    assert len(heights) == 3 and max(heights) < 80  # names do not wrap into single letters
    edges = page.locator("td").evaluate_all("all => all.map(e => e.getBoundingClientRect().right)")
    assert max(edges) <= width
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_profile_page_follows_the_color_scheme(browser, content, scheme):
    page = browser.new_page(color_scheme=scheme)
    page.set_content(content)
    ink, paper = page.locator("body").evaluate(
        "e => [getComputedStyle(e).color, getComputedStyle(e).backgroundColor]"
        ".map(c => c.match(/\\d+/g).slice(0, 3).reduce((a, b) => a + +b, 0))"
    )
    assert (ink > paper + 500) if scheme == "dark" else (paper > ink + 500)
    page.close()
