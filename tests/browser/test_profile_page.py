"""The page that compares two profiles, at desktop and phone widths."""

from __future__ import annotations

import pytest

from forge_jax.tools.profile.compare import (
    COMPILED,
    KERNELS,
    OPERATIONS,
    PARTS,
    PHASES,
    Comparison,
    Row,
    Table,
)
from forge_jax.tools.profile.report import html
from forge_jax.tools.profile.summary import part_name
from forge_jax.tools.profile.verdict import StepTime, Verdict

NAME = "decode/layers/attention/a_scope_within: bitcast-convert_dynamic-update-slice_fusion"
RUN = "/a/folder/with/a-name-" + "that-is-long-" * 9 + ": 20 host steps"


@pytest.fixture(scope="module")
def content() -> str:
    rows = (
        Row("decode/logits: forge_linear", 12_345.6, 1_234_567.8, "slower"),
        Row(NAME, 100.0, 20.0, "faster"),
        Row("decode/embed: copy", 1.0, 1.1, "same"),
    )
    times = StepTime.of([900.0 + i for i in range(20)]), StepTime.of([1000.0] * 20)
    assert times[0] is not None and times[1] is not None
    parts = tuple(Row(part_name(row), row.before, row.after, row.change) for row in rows[:2])
    others = (Table(title, "us", ()) for title in (KERNELS, PHASES, COMPILED))
    comparison = Comparison(
        name="decode",
        runs=(RUN, RUN),
        commands=("", ""),
        modules=(frozenset(), frozenset()),
        command_buffers=("", ""),
        other_cpu_shares=(None, 0.1),
        verdict=Verdict(*times, 5.0),
        tables=(Table(PARTS, "us", parts), Table(OPERATIONS, "us", rows), *others),
        points=({}, {}),
    )
    return html([comparison])


@pytest.mark.parametrize("width", [320, 390, 960, 961, 1400])
def test_profile_page_is_as_wide_as_the_screen(browser, content, width):
    page = browser.new_page(viewport={"width": width, "height": 700})
    page.set_content(content)
    page.get_by_text("1 hardly changed", exact=True).click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    tables = page.locator("table:not(.times)")  # step times scroll on a narrow screen
    names = tables.locator("td:first-child")
    heights = names.evaluate_all("all => all.map(e => e.clientHeight)")
    assert len(heights) == 5 and max(heights) < 80  # names do not wrap into single letters
    cells = tables.locator("td")
    edges = cells.evaluate_all("all => all.map(e => e.getBoundingClientRect().right)")
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
