"""Comparisons of two models: the page of `compare --html`, and the dialog of the web page."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from test_accessibility import problems
from test_page_safety import VECTORS, WATCH, inspect

from forge_serve.cli.compare.page import html

WORDS = ("One", " day", ",", " she", " said", " hello", " to", " him")
KLS = (0.0, 4e-7, 0.002, 0.03, 0.2, 1.7, 0.0004, 0.01)


def position(token: int, piece: str, kl: float) -> dict[str, Any]:
    other = 90 if kl > 1 else token
    top = [
        [[token, piece, math.log(0.6)], [91, " x", -3.0]],
        [[other, piece, -0.7], [92, "", -4.0]],
    ]
    return {
        "token": token, "piece": piece, "text": piece, "kl": kl, "logprobs": [math.log(0.6), -9.5],
        "ranks": [1, 1200], "entropies": [0.5, 1.25], "same_top": other == token, "top": top,
    }  # fmt: skip


def entry(prompt: str, words: tuple[str, ...]) -> dict[str, Any]:
    answer = {"text": "".join(words), "finish_reason": "length", "tokens": list(range(len(words)))}
    positions = [position(i, word, KLS[i % len(KLS)]) for i, word in enumerate(words)]
    return {
        "prompt": prompt, "prompt_tokens": 3, "divergence": 5, "positions": positions,
        "answers": [{**answer, "pieces": list(words)}, {**answer, "pieces": [*words[:5], " no"]}],
    }  # fmt: skip


def report(*words: str) -> dict[str, Any]:
    sides = [
        {"name": name, "label": f"tiny --dtype {dtype}", "model": "tiny", "options": {},
         "weight_bytes": 1_234_567, "vocab_size": 3000}
        for name, dtype in (("A", "float32"), ("B", "bfloat16"))
    ]  # fmt: skip
    figures = {
        "positions": 16, "mean_kl": 0.24, "median_kl": 4e-5, "p90_kl": 0.9, "p99_kl": 1.6,
        "max_kl": 1.7, "same_top": 0.875, "rms_probability_change": 0.021,
        "perplexity": [1.5, 1.61], "prompts": 2, "same_answers": 0,
    }  # fmt: skip
    return {
        "format": "forge-jax-comparison", "version": 1, "forge_jax": "1.2", "date": "2026-01-02T03",
        "sides": sides, "summary": figures,
        "prompts": [entry("Tell a story", words or WORDS) for _ in range(2)],
        "settings": {"scored": "answers", "temperature": 0.0, "seed": 0},
    }  # fmt: skip


def hostile() -> dict[str, Any]:
    """Return a report with a hostile text in every place."""
    made = report(*VECTORS)
    everything = "\n".join(VECTORS)
    for side in made["sides"]:
        side["label"] = side["model"] = everything
    made["forge_jax"] = made["date"] = everything
    for each in made["prompts"]:
        each["prompt"] = everything
        each["answers"][1]["pieces"] = list(VECTORS)
    return made


@pytest.fixture
def shown(browser, tmp_path):
    """Open the file of a report and return the page; at the end, require that nothing was wrong."""
    pages: list[Page] = []
    wrong: list[str] = []

    def shown(made: dict[str, Any], **options: Any) -> Page:
        file = tmp_path / f"report-{len(pages)}.html"
        file.write_text(html(made))
        page = browser.new_context(**options).new_page()
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: (wrong.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda r: r.url == file.as_uri() or wrong.append(f"request {r.url}"))
        page.add_init_script(WATCH)
        page.goto(file.as_uri())
        pages.append(page)
        return page

    yield shown
    for page in pages:
        page.wait_for_timeout(100)
        assert page.evaluate("hits") == []
        page.context.close()
    assert wrong == []


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1440, "light"), (1280, "dark")])
def test_axe_finds_no_violation_and_nothing_is_cut_off(shown, width, scheme):
    page = shown(report(), viewport={"width": width, "height": 800}, color_scheme=scheme,
                 bypass_csp=True)  # fmt: skip
    page.locator(".scored").nth(5).hover()
    expect(page.get_by_role("tooltip")).to_be_visible()
    assert problems(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    box = page.get_by_role("tooltip").bounding_box()
    assert box and box["x"] >= 0 and box["x"] + box["width"] <= width


def test_tokens_are_shaded_and_show_both_distributions(shown):
    page = shown(report())
    tokens = page.locator(".scored")
    levels = [f"kl-{level}" for level in (0, 0, 1, 2, 3, 4, 0, 2)]
    for i, level in enumerate(levels):
        assert level in str(tokens.nth(i).get_attribute("class")).split()
    expect(page.locator(".scored.differs")).to_have_text([" hello"] * 2)
    expect(page.locator(".passage .parted").first).to_have_text(" no")
    tokens.nth(5).hover()
    tip = page.get_by_role("tooltip")
    expect(tip).to_contain_text("KL 1.70 nats")
    expect(tip).to_contain_text("60.0 %, rank 1")
    expect(tip).to_contain_text("<0.1 %, rank 1,200")
    assert tip.locator("ol").count() == 2
    page.mouse.move(0, 0)
    expect(tip).to_be_hidden()


def test_tokens_can_be_reached_with_the_keyboard_and_from_the_table(shown):
    page = shown(report())
    page.locator(".passage").first.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    expect(page.locator(".scored.active")).to_have_text(",")
    expect(page.locator("[aria-live]")).to_contain_text("KL 0.00200 nats")
    page.keyboard.press("Escape")
    expect(page.get_by_role("tooltip")).to_be_hidden()
    page.locator("td button").first.click()
    expect(page.locator(".scored.active")).to_have_text(" hello")
    expect(page.get_by_role("tooltip")).to_contain_text("KL 1.70 nats")


def test_chart_of_a_long_text_shows_the_maximum_of_each_group(shown):
    made = report(*(f" w{i}" for i in range(1000)))
    for i, each in enumerate(made["prompts"][0]["positions"]):
        each["kl"] = 5.0 if i == 997 else 0.002
    page = shown(made)
    chart = page.locator(".chart svg").first
    assert chart.locator(".bar").count() == 250
    expect(chart.locator(".bar.kl-4")).to_have_count(1)
    box = chart.bounding_box()
    assert box
    page.mouse.move(box["x"] + box["width"] - 2, box["y"] + 40)
    expect(page.locator(".scored.active")).to_have_text(" w997")
    expect(page.get_by_role("tooltip")).to_contain_text("KL 5.00 nats")
    tip = page.get_by_role("tooltip").bounding_box()
    assert tip and box["y"] < tip["y"] and tip["y"] + tip["height"] <= 720
    text = page.locator(".passage").first.bounding_box()
    token = page.locator(".scored.active").bounding_box()
    assert text and token and text["y"] <= token["y"] < text["y"] + text["height"]  # it scrolled


def test_hostile_texts_do_nothing(shown):
    for bypass in (True, False):  # the code alone must resist, and the policy must allow the code
        page = shown(hostile(), bypass_csp=bypass)
        assert page.locator(".scored").nth(0).inner_text() == VECTORS[0]
        for i in (0, 3, 8):
            page.locator(".scored").nth(i).hover(position={"x": 2, "y": 4})
        inspect(page, ".comparison")
        assert page.locator("script").count() == 2


def test_policy_of_the_file_blocks_other_scripts(browser, tmp_path):
    file = tmp_path / "report.html"
    planted = "<script>window.planted = 1</script></body>"
    file.write_text(html(report()).replace("</body>", planted))
    page = browser.new_page()
    page.goto(file.as_uri())
    expect(page.locator(".comparison")).to_be_visible()
    assert page.evaluate("window.planted") is None
    page.close()


def test_dialog_opens_reports_and_names_the_wrong_field(server, visit):
    opened = visit(server)
    page = opened.page
    page.get_by_role("button", name="Compare two models").click()
    dialog = page.locator("#comparison-dialog")
    expect(dialog).to_contain_text("forge-jax compare MODEL")
    broken = report()
    broken["prompts"][1]["positions"][2]["kl"] = None
    for made, error in (
        (broken, "prompts[1].positions[2].kl must be a number."),
        ({"format": "forge-jax-chats"}, "compare --json"),
        (report(), "report.json"),
    ):
        content = json.dumps(made).encode()
        file = {"name": "report.json", "mimeType": "application/json", "buffer": content}
        page.locator("#comparison-file").set_input_files(file)
        expect(page.locator("#comparison-note")).to_contain_text(error)
    expect(dialog.locator(".scored")).to_have_count(16)
    dialog.locator(".scored").nth(5).hover()
    expect(dialog.get_by_role("tooltip")).to_contain_text("KL 1.70 nats")
    page.get_by_label("Close the comparison").click()
    expect(dialog).to_be_hidden()


def test_axe_finds_no_violation_in_the_dialog(server, visit):
    page = visit(server, viewport={"width": 390, "height": 844}, bypass_csp=True).page
    page.get_by_role("button", name="Compare two models").click()
    assert problems(page) == []
    content = json.dumps(report()).encode()
    file = {"name": "report.json", "mimeType": "application/json", "buffer": content}
    page.locator("#comparison-file").set_input_files(file)
    expect(page.locator(".scored").first).to_be_visible()
    assert problems(page) == []
