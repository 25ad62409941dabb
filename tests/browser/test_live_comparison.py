"""The live comparison on the page: two streamed answers, and the divergence of their models."""

from __future__ import annotations

import itertools
import json
import math
import random
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import Server, Visit, serving
from page_actions import bodies, entry, set_options
from playwright.sync_api import Page, Route, expect
from test_accessibility import problems
from test_page_safety import VECTORS, WATCH, inspect
from tiny_adapter import write_adapter

PROMPT = "Tell me a story about a dog and a boat."
ADAPTER = "stories"


@pytest.fixture(scope="module")
def adapted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Start a deterministic server with the bundled model and one LoRA adapter.

    Otherwise, rounding depends on the batch, and a greedy token may not have rank 1.
    """
    adapter = write_adapter(tmp_path_factory.mktemp("adapter"))
    flags = ("--num-blocks", "256", "--max-num-seqs", "2", "--lora", f"{ADAPTER}={adapter}")
    yield from serving(request, *flags, "--deterministic")


def opened(visit: Visit, **settings: str) -> Page:
    """Open the dialog and set fields of both sides, or of the side that their names begin with."""
    page = visit.page
    expect(page.locator("#state")).to_have_attribute("data-state", "ready")
    page.get_by_role("button", name="Compare two models").click()
    for name, value in settings.items():
        side, _, rest = name.partition("_")
        for each in side if side in ("a", "b") else "ab":
            field = page.locator(f"#live-{each}-{rest if side in ('a', 'b') else name}")
            if field.evaluate("field => field.matches('select')"):
                field.select_option(value)
                continue
            details = field.locator("xpath=ancestor::details")
            if details.count() and details.get_attribute("open") is None:
                details.locator("summary").click()
            field.fill(value)
    return page


def run(page: Page, prompt: str = PROMPT) -> None:
    page.get_by_label("Prompt for both sides").fill(prompt)
    page.get_by_role("button", name="Run", exact=True).click()


def saved(page: Page, folder: Path) -> dict[str, Any]:
    with page.expect_download() as download:
        page.get_by_role("button", name="Save report").click()
    download.value.save_as(folder / "saved.json")
    return json.loads((folder / "saved.json").read_text())


# ---- pure functions ------------------------------------------------------------------------------


def call(page: Page, function: str, cases: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the results of an exported function of differences.js."""
    script = """async ([name, cases]) => {
      const functions = await import("/static/differences.js");
      const value = (each) => each.logprobs ? new Map(each.logprobs) : each;
      return cases.map((args) => functions[name](...args.map(value)));
    }"""
    return page.evaluate(script, [function, cases])


def distribution(rng: random.Random, size: int, sharpness: float) -> list[float]:
    logits = [rng.gauss(0.0, sharpness) for _ in range(size)]
    total = math.log(sum(math.exp(each - max(logits)) for each in logits)) + max(logits)
    return [each - total for each in logits]


def top(rng: random.Random, logprobs: Sequence[float], count: int, token: int) -> dict[str, Any]:
    """Return the most likely tokens and one other, with the rounding of a server."""
    likeliest = sorted(range(len(logprobs)), key=lambda i: -logprobs[i])[:count]
    error = rng.uniform(-2e-6, 2e-6)  # normalization error, the same for all tokens
    rounded = {i: struct.unpack("f", struct.pack("f", logprobs[i] + error))[0] for i in likeliest}
    return {"logprobs": [[token, logprobs[token] + error], *map(list, rounded.items())]}


def test_lower_bound_never_exceeds_the_exact_divergence(server, visit):
    rng = random.Random(0)
    cases, exact, complete, similar = [], [], [], []
    sizes = itertools.product((2, 30, 200), (0.1, 2.0, 8.0), (0.0, 0.01, 1.0), (1, 5, 20))
    for size, sharpness, change, count in sizes:
        for _ in range(3):
            p = distribution(rng, size, sharpness)
            other = distribution(rng, size, sharpness)
            mixed = [(1 - change) * one + change * two for one, two in zip(p, other, strict=True)]
            total = math.log(sum(map(math.exp, mixed)))
            q = [each - total for each in mixed]
            token = rng.randrange(size)
            cases.append([top(rng, each, count, token) for each in (p, q)])
            kl = sum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))
            exact.append(max(kl, 0.0))
            complete.append(count >= size)
            similar.append(change == 0.01 and count == 20 and sharpness == 8.0)
    found = call(visit(server).page, "klLowerBound", cases)
    pairs = list(zip(found, exact, strict=True))
    assert all(0 <= bound <= kl for bound, kl in pairs)
    assert all(bound > kl - 4e-5 for bound, kl in itertools.compress(pairs, complete))
    bounds, kls = map(sum, zip(*itertools.compress(pairs, similar), strict=True))
    assert bounds > 0.9 * kls  # few tokens have most of the probability


def test_lower_bound_of_a_remainder_without_probability_is_finite(server, visit):
    half, nearly = math.log(0.5), math.log(0.5 + 1e-9)
    p, q = ({"logprobs": [[1, x], [2, y]]} for x, y in ((half, math.log(0.25)), (nearly, half)))
    [bound] = call(visit(server).page, "klLowerBound", [(p, q)])
    assert 0 < bound < 5  # Q(rest) is negative by rounding


def longest_common(a: Sequence[int], b: Sequence[int]) -> int:
    row = [0] * (len(b) + 1)
    for one in a:
        previous = row
        row = [0]
        for j, two in enumerate(b):
            row.append(previous[j] + 1 if one == two else max(previous[j + 1], row[j]))
    return row[-1]


def test_aligned_tokens_are_a_longest_common_subsequence(server, visit):
    rng = random.Random(1)
    pairs: list[tuple[list[int], list[int]]] = [([], []), ([1], []), ([1, 2], [1, 2])]
    for length in range(1, 25):
        a = [rng.randrange(5) for _ in range(length)]
        b = [each for each in a if rng.random() < 0.8] + [rng.randrange(5)] * rng.randrange(3)
        pairs.append((a, b))
    page = visit(server).page
    firsts = call(page, "divergence", pairs)
    for (a, b), first, flags in zip(pairs, firsts, call(page, "differing", pairs), strict=True):
        kept = [x for x, differs in zip(a, flags[0], strict=True) if not differs]
        assert kept == [x for x, differs in zip(b, flags[1], strict=True) if not differs]
        assert len(kept) == longest_common(a, b)
        assert (first is None) == (a == b)
        if first is not None:
            assert a[:first] == b[:first] and a[first : first + 1] != b[first : first + 1]


# ---- runs ----------------------------------------------------------------------------------------


def test_base_and_adapter_are_compared_and_the_report_opens_again(adapted, visit, tmp_path):
    page = opened(visit(adapted), b_model=ADAPTER, temperature="0", max_tokens="60")
    run(page)
    expect(page.locator("#live-status")).to_contain_text("The answers differ from token")
    report = saved(page, tmp_path)
    [found] = report["prompts"]
    apart = found["divergence"]
    a, b = (answer["tokens"] for answer in found["answers"])
    assert len(a) == len(b) == 60 and a[:apart] == b[:apart] and a[apart] != b[apart]
    columns = page.locator("#live-answers article")
    for column, answer in zip(columns.all(), found["answers"], strict=True):
        assert column.locator(".tokens").inner_text() == answer["text"]
        assert "".join(answer["pieces"]).strip() == answer["text"].strip()
        marked = column.locator(".token.first")
        expect(marked).to_have_count(1)
        assert marked.evaluate("each => each.textContent") == answer["pieces"][apart]
        assert 0 < column.locator(".token.changed").count() <= 60 - apart
        expect(column).to_contain_text("60 tokens ·")
        expect(column).to_contain_text("tokens/s · first token after")
        marked.hover()
        expect(page.get_by_role("tooltip")).to_contain_text(answer["pieces"][apart].strip())
        expect(page.locator("#tip li")).to_have_count(5)
    check_scores(adapted, report)

    file = {
        "name": "saved.json", "mimeType": "application/json",
        "buffer": (tmp_path / "saved.json").read_bytes(),
    }  # fmt: skip
    shown = page.locator("#live-report .figures").inner_text()
    assert shown.count("≥ ") == 4
    page.locator("#comparison-file").set_input_files(file)
    expect(page.locator("#live")).to_be_hidden()
    view = page.locator("#comparison-view")
    assert view.locator(".figures").inner_text() == shown
    expect(view).to_contain_text("lower bound of the KL divergence")
    expect(view).to_contain_text("KL ≥ is a lower bound from the 20 most likely tokens")
    view.locator(".scored").nth(apart).hover()
    expect(view.get_by_role("tooltip")).to_contain_text("KL ≥")
    page.get_by_role("button", name="Live").click()
    expect(page.locator("#live-report .figures")).to_be_visible()


def check_scores(server: Server, report: dict[str, Any]) -> None:
    """Check the scores of A's tokens with the logprobs of the same tokens as they were sampled."""
    body = {
        "model": report["sides"][0]["model"], "temperature": 0, "max_tokens": 60, "logprobs": True,
        "messages": [{"role": "user", "content": PROMPT}], "top_logprobs": 5,
    }  # fmt: skip
    entries = server.post("/v1/chat/completions", body)["choices"][0]["logprobs"]["content"]
    positions = report["prompts"][0]["positions"]
    assert len(positions) == len(entries)
    for found, sampled in zip(positions, entries, strict=True):
        assert found["text"] == sampled["token"] and found["ranks"][0] == 1
        assert found["logprobs"][0] == sampled["logprob"]
        assert found["top"][0][0][1] == sampled["top_logprobs"][0]["token"]
    summary = report["summary"]
    kls = [found["kl"] for found in positions]
    assert 0 < summary["mean_kl"] == pytest.approx(sum(kls) / len(kls))
    assert summary["max_kl"] == max(kls) and summary["positions"] == len(kls)
    apart = report["prompts"][0]["divergence"]
    assert positions[apart]["top"][1][0][0] == report["prompts"][0]["answers"][1]["tokens"][apart]


def test_sampling_settings_of_one_model_change_only_the_tokens(adapted, visit):
    page = opened(visit(adapted), temperature="1", max_tokens="30", a_seed="1", b_seed="2")
    run(page)
    status = page.locator("#live-status")
    expect(status).to_contain_text("The answers differ")
    expect(status).to_contain_text("not the model’s distributions, so KL = 0.")
    expect(page.get_by_role("button", name="Save report")).to_be_hidden()
    expect(page.locator("#live-report .comparison")).to_have_count(0)

    page.locator("#live-b-seed").fill("1")
    run(page)
    expect(status).to_contain_text("The answers have the same tokens.")
    expect(page.locator("#live-answers .changed")).to_have_count(0)

    page.locator("#live-b-system").fill("You are a sad cat.")  # another prompt
    run(page)
    expect(page.locator("#live-report .figures")).to_be_visible()
    expect(page.locator("#live-report .sides")).to_contain_text('system="You are a sad cat."')


def test_both_sides_start_with_the_current_settings_and_can_send_the_open_chat(adapted, visit):
    visit = visit(adapted)
    page = visit.page
    set_options(page, system="Be kind.", max_tokens="4", seed="12345678901234567890")
    visit.ask("Hello")
    visit.answered()
    sent = bodies(page)
    opened(visit, b_model=ADAPTER, b_system="", b_top_k="3")
    expect(page.locator("#live-a-system")).to_have_value("Be kind.")
    expect(page.locator("#live-sides summary").first).to_have_text(
        "Sampling: max tokens 4, seed 12345678901234567890"
    )
    page.get_by_label("Send the open chat instead").check()
    expect(page.get_by_label("Prompt for both sides")).to_be_disabled()
    page.get_by_role("button", name="Run", exact=True).click()
    expect(page.locator("#live-report .figures")).to_be_visible()
    question = {"role": "user", "content": "Hello"}
    chats = {each["model"]: each for each in sent if "messages" in each}
    assert chats["forge-tiny"]["messages"] == [{"role": "system", "content": "Be kind."}, question]
    assert chats[ADAPTER]["messages"] == [question]
    assert [chats[name].get("top_k") for name in ("forge-tiny", ADAPTER)] == [None, 3]
    assert chats[ADAPTER]["seed"] == "12345678901234567890"
    scored = [each for each in sent if "prompt_logprobs" in each]
    assert {each["model"] for each in scored} == {"forge-tiny", ADAPTER}
    page.get_by_role("button", name="Use current settings").click()
    values = ("system", "Be kind."), ("top_k", ""), ("model", "forge-tiny")
    for name, value in values:
        expect(page.locator(f"#live-b-{name}")).to_have_value(value)


def test_stop_ends_both_requests(slow_server, visit):
    page = opened(visit(slow_server), max_tokens="200")
    run(page)
    expect(page.locator("#live-answers .tokens").nth(1)).not_to_be_empty()
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(page.locator("#live-status")).to_have_text("Stopped.")
    expect(page.get_by_role("button", name="Run", exact=True)).to_be_focused()
    expect(page.locator("#live-answers .quiet")).to_contain_text(["stopped", "stopped"])
    slow_server.until(lambda stats: stats["running"] == 0)

    run(page)
    slow_server.until(lambda stats: stats["running"] == 2)
    page.get_by_label("Close the comparison").click()
    expect(page.locator("#live-answers .quiet")).to_contain_text(["stopped", "stopped"])
    slow_server.until(lambda stats: stats["running"] == 0)


def test_error_of_one_side_is_shown_and_nothing_is_scored(adapted, visit):
    visit = visit(adapted)
    visit.refusals = 1
    page = opened(visit, b_model=ADAPTER, max_tokens="5", b_temperature="-1")
    run(page)
    expect(page.locator("#live-status.wrong")).to_contain_text("a request failed")
    expect(page.locator("#live-answers article").nth(1)).to_contain_text("temperature must be")
    expect(page.locator("#live-answers .changed")).to_have_count(0)
    expect(page.locator("#live-answers article").nth(0)).to_contain_text("5 tokens")
    expect(page.get_by_role("button", name="Save report")).to_be_hidden()


def test_invalid_field_is_shown_and_nothing_is_sent(adapted, visit):
    page = opened(visit(adapted), b_top_k="1.5")
    sent = bodies(page)
    summary = page.locator("#live-sides summary").nth(1)
    summary.click()
    expect(page.locator("#live-b-top_k")).to_be_hidden()
    run(page)
    expect(page.locator("#live-b-top_k")).to_be_focused()
    assert not sent


def test_tokens_can_be_reached_with_the_keyboard(adapted, visit):
    page = opened(visit(adapted), b_model=ADAPTER, temperature="0", max_tokens="20")
    page.get_by_label("Prompt for both sides").fill(PROMPT)
    page.locator("#live-run").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#live-report .figures")).to_be_visible()
    expect(page.locator("#live-run")).to_be_focused()
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator("#live-answers .token").nth(1).evaluate("e => e.matches('.active')")
    expect(page.locator("#comparison-dialog #tip")).to_be_visible()  # above the dialog
    page.keyboard.press("Escape")
    expect(page.locator("#tip")).to_be_hidden()
    expect(page.locator("#comparison-dialog")).to_be_visible()


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
def test_axe_finds_no_violation_and_columns_fit(adapted, visit, width, scheme):
    options = {"viewport": {"width": width, "height": 844}, "color_scheme": scheme}
    page = opened(visit(adapted, **options, bypass_csp=True), b_model=ADAPTER, max_tokens="20")
    assert problems(page) == []
    run(page)
    expect(page.locator("#live-report .figures")).to_be_visible()
    page.locator("#live-answers .token").nth(2).hover()
    expect(page.locator("#tip")).to_be_visible()
    assert problems(page) == []
    dialog = page.locator("#comparison-dialog")
    assert dialog.evaluate("each => each.scrollWidth - each.clientWidth") <= 0
    a, b = (each.bounding_box() for each in page.locator("#live-answers article").all())
    assert a and b
    stacked = b["y"] >= a["y"] + a["height"] and b["x"] == a["x"]
    assert stacked if width == 390 else b["x"] >= a["x"] + a["width"] and b["y"] == a["y"]


# ---- hostile text --------------------------------------------------------------------------------


def hostile_chat(route: Route) -> None:
    """Stream one event per vector, as the text and as the alternatives of a token."""
    lines = []
    for i, vector in enumerate(VECTORS):
        event = {
            "id": "x", "prompt_token_ids": [1, len(route.request.post_data_json["model"])],
            "choices": [{
                "index": 0, "delta": {"content": vector}, "finish_reason": vector,
                "token_ids": [i], "logprobs": {"content": [entry(vector)]},
            }],
        }  # fmt: skip
        lines.append(f"data: {json.dumps(event)}\n\n")
    body = "".join((*lines, "data: [DONE]\n\n"))
    route.fulfill(content_type="text/event-stream", body=body)


def hostile_scores(route: Route) -> None:
    tokens = {
        str(i): {"logprob": -4.0 - i / 90, "rank": i + 1, "decoded_token": vector}
        for i, vector in enumerate(VECTORS)
    }  # fmt: skip
    choice = {"prompt_logprobs": [None, *([tokens] * (len(VECTORS) + 1))]}
    route.fulfill(json={"choices": [choice]})


@pytest.mark.parametrize("bypass", [True, False])
def test_hostile_texts_do_nothing(adapted, visit, bypass):
    visit = visit(adapted, bypass_csp=bypass)
    page = visit.page
    everything = "\n".join(VECTORS)
    names = [everything, everything + "2"]
    page.add_init_script(WATCH)
    page.on("dialog", lambda dialog: (visit.wrong.append(dialog.message), dialog.dismiss()))
    models = {"data": [{"id": each, "max_model_len": 64} for each in names]}
    page.route("**/v1/models", lambda route: route.fulfill(json=models))
    page.route("**/v1/chat/completions", hostile_chat)
    page.route("**/v1/completions", hostile_scores)
    page.route("**/version", lambda route: route.fulfill(json={"version": everything}))
    page.reload()
    opened(visit, system=everything)
    page.locator("#live-b-model").evaluate("each => (each.selectedIndex = 1)")
    run(page, everything)
    expect(page.locator("#live-report .figures")).to_be_visible()
    assert page.locator("#live-answers .token").first.inner_text() == VECTORS[0]
    page.locator("#live-answers .token").first.hover(position={"x": 2, "y": 4})
    expect(page.locator("#tip code").first).to_have_text(VECTORS[0])
    page.locator("#live-report .scored").nth(3).hover(position={"x": 2, "y": 4})
    for root in ("#live-answers", "#live-report", "#tip", "#live-status"):
        inspect(page, root)
    page.wait_for_timeout(100)
    assert page.evaluate("hits") == []
    assert not [url for url in visit.requested if "evil" in url]
