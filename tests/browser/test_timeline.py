"""The timelines of requests in the engine view: live, recorded, and by keyboard and pointer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Server, Visit
from page_actions import set_options, show_panel
from playwright.sync_api import Page, expect

STORY = "Tell me a story about a dog."
ARRIVAL_S = 1000.0
MOST_SPANS = 65  # spans that a row shows
NAME = "<b>one</b>"  # all 8 characters of a name that are shown, and 2 that are not
SPANS = [
    ["queued", 0, 0.5, 0, 0, 0, 0],
    ["loading", 0.5, 0.25, 0, 0, 0, 0],
    ["prefill", 0.75, 0.25, 1, 512, 0, 0],
    ["prefill", 1, 0.25, 1, 88, 0, 0],
    ["decode", 1.25, 1, 20, 20, 0, 0],
    ["draft", 2.25, 0.5, 6, 18, 24, 12],
    ["preempted", 2.75, 0.5, 0, 0, 0, 0],
    ["prefill", 3.25, 0.25, 1, 39, 0, 0],
    ["decode", 3.5, 0.5, 1, 1, 0, 0],
]
TEXTS = [
    "queued, 500 ms",
    "loading blocks from host memory, 250 ms",
    "prefill chunk, 512 tokens, 250 ms",
    "prefill chunk, 88 tokens, 250 ms",
    "decode, 20 tokens, 1.00 s",
    "draft verification, 12 of 24 drafts accepted, 18 tokens in 6 steps, 500 ms",
    "preempted, 500 ms",
    "prefill chunk, 39 tokens, 250 ms",
    "decode, 1 token, 500 ms",
]


def sequence(**changed: Any) -> dict[str, Any]:
    counts = ("prompt", "sample", "blocks", "shared_blocks")
    return {
        **dict.fromkeys(counts, 0), "request_id": NAME, "status": "running",
        "prompt_tokens": 600, "output_tokens": 40, "computed_tokens": 600, "cached_tokens": 64,
        "preemptions": 1, "draft_tokens": 24, "accepted_tokens": 12, "arrival_s": ARRIVAL_S,
        "queue_s": 0.75, "ttft_s": 1.25, "spans": SPANS, **changed,
    }  # fmt: skip


DONE = sequence(
    request_id="done", status="finished", finish_reason="abort", arrival_s=ARRIVAL_S + 1,
    queue_s=0.001, spans=[["queued", 0, 0.001, 0, 0, 0, 0], ["prefill", 0.001, 1, 1, 8, 0, 0]],
)  # fmt: skip


@pytest.fixture(scope="module")
def recording(slow_server: Server) -> dict[str, Any]:
    """Return a recording without sequences."""
    state = slow_server.get("/engine_state")
    state |= {"sequences": [], "finished": [], "steps": [], "time_s": ARRIVAL_S + 4}
    return {"format": "forge-jax-engine-state", "version": 1, "recorded": 0, "state": state}


@pytest.fixture
def replay(slow_server: Server, visit: Callable[..., Visit], recording) -> Callable[..., Page]:
    def replay(*, to: Visit | None = None, **changed: Any) -> Page:
        page = (to or visit(slow_server)).page
        show_panel(page, "engine")
        file = {**recording, "state": {**recording["state"], **changed}}
        text = json.dumps(file).encode()
        named = {"name": "state.json", "mimeType": "application/json", "buffer": text}
        page.locator("#state-file").set_input_files(named)
        return page

    return replay


def said(page: Page, key: str) -> str:
    """Press a key on the chart, and return the selected span."""
    page.locator("#requests").press(key)
    return page.locator("#request-span").inner_text()


def row_of(page: Page) -> list[str]:
    """Return the spans of the selected row, by keyboard."""
    texts = [said(page, "Home")]
    while (text := said(page, "ArrowRight")) != texts[-1]:
        texts.append(text)
        assert len(texts) <= MOST_SPANS, texts
    return texts


def select_last_row(page: Page) -> None:
    """Select the latest request. Earlier ones are in the rows above."""
    said(page, "End")
    for _ in range(30):
        said(page, "ArrowDown")


def pixel(page: Page, x: float, y: float) -> str:
    """Return the color of the chart at a place, in CSS pixels."""
    return page.locator("#requests").evaluate(
        """(canvas, [x, y]) => {
          const copy = new OffscreenCanvas(1, 1).getContext("2d");
          const [left, top] = [x, y].map((each) => -Math.round(each * devicePixelRatio));
          copy.drawImage(canvas, left, top);
          const [r, g, b] = copy.getImageData(0, 0, 1, 1).data;
          return `rgb(${r}, ${g}, ${b})`;
        }""",
        [x, y],
    )


def color(page: Page, name: str) -> str:
    return page.evaluate(
        """(name) => {
          const probe = document.body.appendChild(document.createElement("i"));
          probe.style.color = `var(--${name})`;
          const found = getComputedStyle(probe).color;
          probe.remove();
          return found;
        }""",
        name,
    )


def test_request_is_followed_from_queue_to_end(slow_server, visit):
    visit = visit(slow_server)
    page = visit.page
    set_options(page, max_tokens="400", temperature="1")
    show_panel(page, "engine")
    chart = page.get_by_role("img", name=re.compile("Timelines of"))
    visit.ask(STORY)
    visit.streaming()
    expect(chart).to_have_attribute("aria-label", re.compile("1 running, 0 waiting"))
    chart.focus()
    figures = page.locator("#request-figures")
    expect(figures).to_have_text(re.compile("arrow keys"))
    select_last_row(page)
    after_a_decode = re.compile(r"\+ ([2-9]|\d\d+) tokens")
    expect(figures).to_have_text(after_a_decode)
    page.get_by_role("button", name="Pause").click()
    page.wait_for_timeout(300)  # a request may be in flight
    select_last_row(page)
    texts = row_of(page)
    assert all(text.startswith("this chat: ") for text in texts)
    assert [text.split(": ")[1].split(",")[0] for text in texts][:2] == ["queued", "prefill chunk"]
    assert re.search(r": (decode, \d+ tokens?|draft verification, \d+ of \d+ drafts)", texts[2])
    expect(figures).to_have_text(
        re.compile(r"\d+ \+ \d+ tokens.* · queued [\d.]+ ms · first token after .*s · running")
    )
    page.get_by_role("button", name="Pause").click()
    page.get_by_label("Message", exact=True).focus()
    page.keyboard.press("Escape")
    slow_server.until(lambda stats: not stats["num_running"])
    expect(chart).to_have_attribute("aria-label", re.compile("0 running, 0 waiting"))
    select_last_row(page)
    expect(figures).to_have_text(re.compile("tokens/s · aborted"))


def test_spans_of_a_recording_have_their_figures_and_colors(replay):
    page = replay(sequences=[sequence()], finished=[DONE])
    chart = page.locator("#requests")
    expect(chart).to_have_attribute(
        "aria-label", "Timelines of 2 requests over 4.00 s: 1 running, 0 waiting, 1 finished"
    )
    said(page, "ArrowRight")
    assert row_of(page) == [f"{NAME[:8]}: {text}" for text in TEXTS]
    expect(page.locator("#request-figures")).to_have_text(
        "600 + 40 tokens · 64 cached · queued 750 ms · first token after 1.25 s · 14 tokens/s · "
        "1 preemption · running"
    )
    expect(page.locator("#request-live")).to_have_text(f"{NAME[:8]}: {TEXTS[-1]}")
    expect(page.locator(".of-loads")).to_be_visible()

    box = chart.bounding_box()
    assert box
    said(page, "Escape")
    font = 11
    left, top, pitch = round(6.2 * font), round(1.9 * font), round(1.6 * font)
    second = (box["width"] - left - 2) / 4
    colors = {}
    for time_s, name in (
        *((0.25, "cached"), (0.6, "loading"), (0.85, "prompt"), (1.7, "decode"), (3, "preempted")),
    ):
        colors[name] = pixel(page, left + time_s * second, top + pitch / 2)
        assert colors[name] == color(page, name), name
    assert len(set(colors.values())) == 5
    high, low = (pixel(page, left + 2.5 * second, top + pitch * part) for part in (0.3, 0.7))
    assert (high, low) == (color(page, "proposed"), color(page, "accepted"))

    chart.hover(position={"x": left + 3 * second, "y": top + pitch / 2})
    expect(page.locator("#request-span")).to_have_text(f"{NAME[:8]}: {TEXTS[6]}")
    chart.hover(position={"x": left + 3 * second, "y": top + 1.5 * pitch})
    expect(page.locator("#request-span")).to_have_text("done: prefill chunk, 8 tokens, 1.00 s")
    expect(page.locator("#request-figures")).to_have_text(re.compile("aborted$"))


def test_arrow_keys_move_between_rows_and_escape_closes(replay):
    page = replay(sequences=[sequence()], finished=[DONE])
    assert said(page, "Home").endswith(TEXTS[-1])  # the sentence for the first row
    assert said(page, "Home").endswith(TEXTS[0])
    assert said(page, "ArrowDown") == "done: queued, 1.0 ms"  # the nearest one
    assert said(page, "End") == "done: prefill chunk, 8 tokens, 1.00 s"
    assert said(page, "ArrowDown") == "done: prefill chunk, 8 tokens, 1.00 s"
    assert said(page, "ArrowUp").endswith(TEXTS[4])
    assert said(page, "Escape") == ""
    expect(page.locator("#engine")).to_be_visible()


def test_window_limits_the_spans(replay):
    page = replay(sequences=[sequence()], finished=[DONE])
    page.get_by_label("Time shown").select_option("1 s")
    expect(page.locator("#requests")).to_have_attribute(
        "aria-label", "Timelines of 1 request over 1.00 s: 1 running, 0 waiting, 0 finished"
    )
    said(page, "End")
    assert row_of(page) == [f"{NAME[:8]}: {text}" for text in TEXTS[6:]]


def test_link_and_file_keep_the_timelines(replay, slow_server, visit, tmp_path):
    page = replay(sequences=[sequence()], finished=[DONE])
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy link").click()
    expect(page.locator("#state-link")).to_have_text("Copied")
    link = page.evaluate("navigator.clipboard.readText()")
    with page.expect_download() as download:
        page.get_by_role("button", name="Save state").click()
    state = json.loads(Path(download.value.path()).read_text())["state"]
    assert (state["sequences"], state["finished"]) == ([sequence()], [DONE])

    other = visit(slow_server).page
    other.goto(link)
    other.reload()
    expect(other.locator("#engine-note")).to_contain_text("Recorded")
    said(other, "End")
    assert row_of(other) == [f"{NAME[:8]}: {text}" for text in TEXTS]
    other.get_by_role("button", name="Pause").click()
    expect(other.locator("#engine-note")).to_be_empty()
    expect(other.locator("#requests")).not_to_have_attribute("aria-label", re.compile("over 4.00"))


def test_recording_of_an_older_version_opens_without_timelines(replay):
    new = ("arrival_s", "queue_s", "ttft_s", "spans")
    old = {name: value for name, value in sequence().items() if name not in new}
    page = replay(sequences=[old], finished=None)
    expect(page.locator("#engine-note")).to_contain_text("Recorded")
    expect(page.locator("#sequences")).to_contain_text("600 + 40")
    expect(page.get_by_text("No requests were recorded.")).to_be_visible()
    expect(page.locator("#requests")).to_be_hidden()


def test_invalid_span_names_the_field(replay, slow_server, visit):
    one = visit(slow_server)
    for spans, reason in (
        (3, "state.sequences[0].spans must be a list"),
        ([SPANS[0], ["decode", 1, 2]], "state.sequences[0].spans[1] must be a span"),
        ([["__proto__", *SPANS[0][1:]]], "state.sequences[0].spans[0] must be a span"),
        ([["decode", "0", *SPANS[0][2:]]], "state.sequences[0].spans[0] must be a span"),
    ):
        page = replay(to=one, sequences=[sequence(spans=spans)])
        expect(page.locator("#notice")).to_contain_text(reason)
    page = replay(to=one, finished=[{}])
    expect(page.locator("#notice")).to_contain_text("state.finished[0].prompt must be a number")


def test_rows_and_memory_are_bounded(replay):
    spans = [["prefill", i / 1000, 0.001, 1, 1, 0, 0] for i in range(500)]
    many = [sequence(sample=i, spans=spans, arrival_s=ARRIVAL_S + 3) for i in range(100)]
    done = [{**each, "sample": 100 + i, "status": "finished"} for i, each in enumerate(many)]
    page = replay(sequences=many, finished=done)
    expect(page.locator("#requests")).to_have_attribute(
        "aria-label", re.compile("^Timelines of 24 requests .* 140 more not shown$")
    )
    box = page.locator("#requests").bounding_box()
    assert box and box["height"] < 500
    with page.expect_download() as download:
        page.get_by_role("button", name="Save state").click()
    state = json.loads(Path(download.value.path()).read_text())["state"]
    assert len(state["finished"]) == 64 and len(state["sequences"]) == 100
    assert {len(each["spans"]) for each in state["sequences"] + state["finished"]} == {65}


AT_ONCE = [["queued", 0, 0, 0, 0, 0, 0], ["prefill", 0, 1, 1, 512, 0, 0], *SPANS[3:]]
AT_ONCE_TEXTS = ["queued, 0.0 ms", "prefill chunk, 512 tokens, 1.00 s", *TEXTS[3:]]


@pytest.mark.parametrize(
    ("news", "texts"),
    [
        ([SPANS[:1], SPANS[:3], [SPANS[3], ["decode", 1.25, 0.1, 2, 2, 0, 0]], SPANS[4:]], TEXTS),
        ([AT_ONCE[:1], AT_ONCE[:2], AT_ONCE], AT_ONCE_TEXTS),
        ([AT_ONCE[:1], AT_ONCE[1:3], AT_ONCE[1:]], AT_ONCE_TEXTS),
    ],
    ids=["waits", "admitted at once", "only news"],
)
def test_growing_spans_of_live_states_are_merged(slow_server, visit, news, texts):
    """Answers polls with news only, as the server does."""
    page = visit(slow_server).page
    base = slow_server.get("/engine_state")
    polls = 0

    def answer(route):
        nonlocal polls
        seq = sequence(spans=news[min(polls, len(news) - 1)])
        if polls > 1:  # only news
            del seq["queue_s"], seq["ttft_s"]
        route.fulfill(json={**base, "sequences": [seq], "finished": [], "time_s": ARRIVAL_S + 4})
        polls += 1

    page.route("**/engine_state*", answer)
    show_panel(page, "engine")
    page.wait_for_timeout(500)
    while polls < len(news) + 1:
        page.wait_for_timeout(100)
    said(page, "End")
    assert row_of(page) == [f"{NAME[:8]}: {text}" for text in texts]
    expect(page.locator("#request-figures")).to_contain_text("first token after 1.25 s")


@pytest.mark.parametrize("touch", [False, True])
def test_tap_selects_a_span(slow_server, visit, replay, touch):
    one = visit(slow_server, viewport={"width": 390, "height": 844}, has_touch=touch)
    page = replay(to=one, sequences=[sequence()])
    chart = page.locator("#requests")
    chart.scroll_into_view_if_needed()
    place = {"x": 200.0, "y": 30.0}
    chart.tap(position=place) if touch else chart.click(position=place)
    expect(page.locator("#request-span")).to_have_text(re.compile(re.escape(NAME[:8]) + ": "))
