"""The page in a real browser: its features for users, and its security."""

from __future__ import annotations

import base64
import json
import re
import zlib

import pytest
from conftest import KEY
from page_actions import answer_with, bodies, entry, events, set_options, show_panel
from playwright.sync_api import Page, Route, expect

STORY = "Tell me a story about a dog."
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Rex", "Bello"]}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


# ---- the chat ----------------------------------------------------------------------------------


def test_answer_streams_in_and_the_conversation_continues(server, visit):
    visit = visit(server)
    asked = bodies(visit.page)
    set_options(visit.page, system="Be kind.", temperature="0", seed="12345678901234567890")
    visit.ask(STORY)
    first = visit.answered()
    assert len(first.split()) > 20 and first != STORY
    expect(visit.page.locator(".meta")).to_contain_text(re.compile(r"\d+ tokens"))
    visit.ask("What happened then?")
    visit.answered(2)
    system, question = {"role": "system", "content": "Be kind."}, {"role": "user", "content": STORY}
    assert asked[0]["messages"] == [system, question] and asked[0]["stream"] is True
    assert (asked[0]["temperature"], asked[0]["seed"]) == (0, "12345678901234567890")
    assert [message["content"] for message in asked[1]["messages"]][:3] == [
        "Be kind.", STORY, asked[1]["messages"][2]["content"]
    ]  # fmt: skip
    assert asked[1]["messages"][2]["content"].strip() == first.strip()
    visit.page.get_by_role("button", name="New chat").click()
    expect(visit.page.locator(".turn")).to_have_count(0)
    visit.ask(STORY)
    visit.answered()
    assert asked[2]["messages"] == [system, question]


def test_text_appears_before_the_answer_is_complete(slow_server, visit):
    visit = visit(slow_server)
    set_options(visit.page, max_tokens="60")
    visit.ask(STORY)
    answer = visit.page.locator(".turn.assistant")
    visit.streaming()
    assert answer.get_attribute("aria-busy") == "true"
    visit.page.keyboard.press("Escape")
    visit.answered()
    assert answer.get_attribute("aria-busy") == "false"
    slow_server.until(lambda stats: not stats["num_running"])


@pytest.mark.parametrize("how", ["button", "Escape", "New chat", "leaving"])
def test_stop_button_ends_the_request_on_the_server(slow_server, visit, how):
    visit = visit(slow_server)
    before = slow_server.get("/stats")["generation_tokens"]
    set_options(visit.page, max_tokens="3000")
    visit.ask(STORY)
    visit.streaming()
    slow_server.until(lambda stats: stats["num_running"] == 1)
    match how:
        case "button":
            visit.page.get_by_role("button", name="Stop", exact=True).click()
        case "Escape":
            visit.page.keyboard.press("Escape")
        case "New chat":
            visit.page.get_by_role("button", name="New chat").click()
        case "leaving":
            visit.page.goto("about:blank")
    slow_server.until(lambda stats: not stats["num_running"] and not stats["num_used_blocks"])
    assert slow_server.get("/stats")["generation_tokens"] - before < 3000
    if how in ("button", "Escape"):
        expect(visit.page.locator(".meta")).to_contain_text("stopped")
        expect(visit.page.get_by_label("Message", exact=True)).to_be_focused()
        expect(visit.page.get_by_role("button", name="Send")).to_be_visible()


def test_answer_follows_the_json_schema(server, visit):
    visit = visit(server)
    set_options(visit.page, schema=json.dumps(SCHEMA), max_tokens="200")
    expect(visit.page.locator("#schema-note")).to_contain_text("will follow")
    visit.ask("Name a dog, and its age.")
    answer = json.loads(visit.answered())
    assert set(answer) == {"name", "age"}
    assert answer["name"] in ("Rex", "Bello") and answer["age"] <= 99


def test_invalid_schema_is_reported_and_not_sent(server, visit):
    visit = visit(server)
    asked = bodies(visit.page)
    show_panel(visit.page, "settings")
    box = visit.page.get_by_label("Schema for the answer")
    for wrong in ('{"type": ', "[1]", "3"):
        box.fill(wrong)
        expect(visit.page.locator("#schema-note")).to_contain_text("Invalid schema")
        expect(box).to_have_attribute("aria-invalid", "true")
        visit.ask(STORY)
        expect(box).to_be_focused()
    assert not asked
    box.fill("")
    expect(box).to_have_attribute("aria-invalid", "false")


def test_sampling_controls_reach_the_server(server, visit):
    visit = visit(server)
    asked = bodies(visit.page)
    given = {
        "temperature": 0.5, "max_tokens": 9, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": 7,
        "presence_penalty": 0.1, "frequency_penalty": 0.2, "repetition_penalty": 1.1,
    }  # fmt: skip
    set_options(visit.page, **{name: str(value) for name, value in given.items()})
    set_options(visit.page, stop="END\n\n ok")
    visit.ask(STORY)
    visit.answered()
    [body] = asked
    assert {name: body[name] for name in given} == given and body["stop"] == ["END", " ok"]
    assert "logprobs" not in body and "response_format" not in body
    set_options(visit.page, **{**dict.fromkeys(given, ""), "stop": "", "max_tokens": "4"})
    visit.ask(STORY)
    visit.answered(2)
    assert set(body) - set(asked[1]) == {*given, "stop"} - {"max_tokens"}


def test_server_error_is_shown_and_the_message_is_kept(server, visit):
    visit = visit(server)
    visit.refusals = 1
    set_options(visit.page, top_p="7", temperature="0", max_tokens="5")
    visit.ask(STORY)
    error = visit.page.get_by_role("alert").filter(has_text="top_p")
    expect(error).to_contain_text("at most 1")
    message = visit.page.get_by_label("Message", exact=True)
    expect(message).to_have_value(STORY)
    set_options(visit.page, top_p="")
    asked = bodies(visit.page)
    message.press("Enter")
    visit.answered()
    expect(error).to_have_count(0)
    assert [each["content"] for each in asked[0]["messages"]] == [STORY]  # once


# ---- token probabilities -----------------------------------------------------------------------


def test_pointing_at_a_token_shows_its_probability_and_alternatives(server, visit):
    visit = visit(server)
    set_options(visit.page, temperature="0", max_tokens="30", top_logprobs="4")
    visit.page.get_by_label("Show probabilities").check()
    visit.ask(STORY)
    text = visit.answered()
    tokens = visit.page.locator(".turn.assistant .token")
    assert "".join(tokens.all_text_contents()).strip() == text.strip()  # every letter has its token
    tip = visit.page.get_by_role("tooltip")
    expect(tip).to_be_hidden()
    tokens.nth(5).hover()
    expect(tip).to_be_visible()
    expect(tip.locator(".tip-head b")).to_have_text(re.compile(r"^<?[\d.]+ %$"))
    rivals = tip.locator("li")
    expect(rivals).to_have_count(4)
    parts = [float(p.strip("<% ")) for p in rivals.locator("span").all_text_contents()]
    assert parts == sorted(parts, reverse=True) and sum(parts) < 100.6
    chosen = tip.locator(".chosen code").inner_text()
    assert (
        chosen == tip.locator(".tip-head code").inner_text()
    )  # the most likely token at temperature 0
    visit.page.mouse.move(5, 5)
    expect(tip).to_be_hidden()


def test_multi_token_characters_and_empty_tokens_are_placed(server, visit):
    visit = visit(server)
    smile = "🙂".encode()
    half = {**entry("?"), "token": "\ufffd"}
    halves = [{**half, "bytes": list(smile[:2])}, {**half, "bytes": list(smile[2:])}]
    chunks = [
        {
            "delta": {"content": "Hi"},
            "logprobs": {"content": [entry(" Hi")]},
        },  # the leading space is stripped
        {"delta": {}, "logprobs": {"content": halves[:1]}},
        {"delta": {"content": "🙂 no"}, "logprobs": {"content": [halves[1]]}},
        {"delta": {"content": "w"}, "logprobs": {"content": [entry(" now", 0.125)]}},
        {"delta": {}, "logprobs": {"content": [entry("</s>")]}, "finish_reason": "stop"},
    ]
    each = [json.dumps({"id": "chatcmpl-x", "choices": [{"index": 0, **c}]}) for c in chunks]
    answer_with(visit.page, "".join(f"data: {event}\n\n" for event in each) + "data: [DONE]\n\n")
    visit.ask("Hello")
    assert visit.answered() == "Hi🙂 now"
    tokens = visit.page.locator(".turn.assistant .token")
    assert tokens.all_text_contents() == ["Hi", "🙂", " now"]
    tokens.nth(2).hover()
    expect(visit.page.locator(".tip-head")).to_have_text("␣now12.5 %")


# ---- the engine --------------------------------------------------------------------------------


def number(page: Page, name: str) -> int:
    return int(page.locator(f"#num-{name}").inner_text())


def test_block_map_and_timeline_change_during_a_request(slow_server, visit):
    visit = visit(slow_server)
    page = visit.page
    show_panel(page, "engine")
    blocks = page.get_by_role("img", name=re.compile("Map of 256 KV blocks"))
    expect(blocks).to_have_attribute("aria-label", re.compile(" 0 owned, 0 shared"))
    expect(page.locator("#no-sequences")).to_be_visible()
    pixels = "canvas => canvas.toDataURL()"
    before = blocks.evaluate(pixels)
    set_options(page, max_tokens="400")
    show_panel(page, "engine")
    visit.ask(STORY * 4)
    expect(blocks).to_have_attribute("aria-label", re.compile(" [1-9][0-9]* owned"))
    expect(page.locator("#running")).to_have_text("1/256")
    row = page.locator("#sequences tr")
    expect(row).to_contain_text("this chat")
    expect(page.locator("#steps")).to_have_attribute("aria-label", re.compile("Step [0-9]+: [0-9]"))
    assert blocks.evaluate(pixels) != before
    owned = number(page, "owned")
    assert owned >= 7 and owned + sum(number(page, k) for k in ("shared", "cached", "free")) == 256
    expect(page.locator("#rate")).to_have_text(re.compile("^[1-9]"))

    blocks.hover(position={"x": 4, "y": 4})
    probe = page.locator("#blocks-probe")
    expect(probe).to_have_text(re.compile("^Block 0: "))
    blocks.focus()
    for _ in range(256):
        page.keyboard.press("ArrowRight")
        if "owned" in probe.inner_text():
            break
    expect(probe).to_have_text(re.compile(r"^Block \d+: owned by this chat$"))
    page.get_by_label("Message", exact=True).focus()
    page.keyboard.press("Escape")
    slow_server.until(lambda stats: not stats["num_running"])
    expect(page.locator("#no-sequences")).to_be_visible()
    expect(page.locator("#num-owned")).to_have_text("0")
    assert number(page, "cached") >= 7  # the prompt stays in the prefix cache
    visit.ask(STORY * 4)
    visit.streaming(2)
    expect(page.locator("#hits")).not_to_have_text("0 %")
    page.keyboard.press("Escape")


def test_shared_blocks_and_other_requests_are_distinguished(slow_server, visit):
    body = {"prompt": "a dog " * 20, "n": 3, "max_tokens": 300, "ignore_eos": True, "stream": True}
    visit = visit(slow_server)
    visit.page.evaluate(
        "body => { fetch('/v1/completions', {method: 'POST', body: JSON.stringify(body)}); }", body
    )
    show_panel(visit.page, "engine")
    rows = visit.page.locator("#sequences tr")
    expect(rows).to_have_count(3)
    expect(rows.nth(1)).to_contain_text("shared")
    assert number(visit.page, "shared") >= 5
    colors = rows.locator(".swatch").evaluate_all("all => all.map(each => each.className)")
    assert len(set(colors)) == 3
    assert visit.page.get_by_text("this chat").count() == 0


def test_accepted_drafts_are_shown_by_position(slow_server, visit):
    visit = visit(slow_server)
    set_options(visit.page, temperature="0", max_tokens="24", seed="1")
    for _ in range(8):  # the second can draft from the first, if drafts paid off before
        visit.ask(STORY)
        visit.answered()
        visit.page.get_by_role("button", name="New chat").click()
        visit.page.locator(".turn").first.wait_for(state="detached")
        if sum(slow_server.get("/stats")["speculation"]["accepted_per_position"]):
            break
    show_panel(visit.page, "engine")
    expect(visit.page.locator("#acceptance")).to_contain_text(re.compile(r"\d+ of \d+ tokens"))
    expect(visit.page.locator("#positions li").first).to_have_text(re.compile(r"\d+ %"))


def test_disabled_speculation_is_shown(server, visit):
    visit = visit(server)
    show_panel(visit.page, "engine")
    expect(visit.page.locator("#acceptance")).to_have_text("speculation is off")
    expect(visit.page.locator(".of-drafts").first).to_be_hidden()


def test_engine_state_is_not_polled_while_hidden_or_paused(server, visit):
    visit = visit(server)
    page = visit.page
    looks = lambda: sum("/engine_state" in url for url in visit.requested)  # noqa: E731
    expect(page.locator("#state")).to_have_attribute("data-state", "ready")
    expect(page.locator("#engine")).to_be_hidden()  # at first
    assert looks() == 0
    show_panel(page, "engine")
    expect(page.locator("#num-free")).not_to_have_text("–")
    page.get_by_role("button", name="Pause").click()
    page.wait_for_timeout(300)  # a request may be in flight
    paused = looks()
    page.wait_for_timeout(1200)
    assert looks() == paused
    page.get_by_role("button", name="Pause").click()
    with page.expect_request("**/engine_state*"):
        pass
    page.get_by_role("button", name="Close the engine").click()
    expect(page.locator("[data-shows=engine]")).to_be_focused()
    page.wait_for_timeout(300)
    hidden = looks()
    page.wait_for_timeout(1200)
    assert looks() == hidden


def test_saved_state_is_replayed_until_resumed(slow_server, visit, tmp_path):
    one = visit(slow_server)
    set_options(one.page, max_tokens="400")
    show_panel(one.page, "engine")
    one.ask(STORY)
    expect(one.page.locator("#sequences")).to_contain_text("this chat")
    expect(one.page.locator("#running")).to_have_text("1/256")  # it no longer waits
    expect(one.page.locator("#steps")).to_have_attribute("aria-label", re.compile("Step "))
    one.page.get_by_role("button", name="Pause").click()
    owned = number(one.page, "owned")
    with one.page.expect_download() as download:
        one.page.get_by_role("button", name="Save state").click()
    file = tmp_path / "state.json"
    download.value.save_as(file)
    assert STORY not in file.read_text()
    one.page.keyboard.press("Escape")
    slow_server.until(lambda stats: not stats["num_running"])

    page = visit(slow_server).page
    show_panel(page, "engine")
    page.locator("#state-file").set_input_files(file)
    expect(page.locator("#engine-note")).to_contain_text("Recorded")
    expect(page.locator("#running")).to_have_text("1/256")
    assert number(page, "owned") == owned > 0
    expect(page.locator("#steps")).to_have_attribute("aria-label", re.compile("Step "))
    page.get_by_role("button", name="Pause").click()
    expect(page.locator("#running")).to_have_text("0/256")
    expect(page.locator("#engine-note")).to_be_empty()


def test_copied_link_shows_the_state(slow_server, visit):
    one = visit(slow_server)
    one.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    show_panel(one.page, "engine")
    one.ask(STORY)
    expect(one.page.locator("#sequences")).to_contain_text("this chat")
    expect(one.page.locator("#running")).to_have_text("1/256")  # it no longer waits
    one.page.get_by_role("button", name="Pause").click()
    owned = number(one.page, "owned")
    one.page.get_by_role("button", name="Copy link").click()
    expect(one.page.locator("#state-link")).to_have_text("Copied")
    expect(one.page.locator("#state-link")).to_have_text("Copy link")
    link = one.page.evaluate("navigator.clipboard.readText()")
    one.page.keyboard.press("Escape")
    slow_server.until(lambda stats: not stats["num_running"])

    page = visit(slow_server).page
    page.goto(link)
    page.reload()
    expect(page.locator("#engine-note")).to_contain_text("Recorded")
    expect(page.locator("#running")).to_have_text("1/256")
    assert number(page, "owned") == owned > 0
    page.get_by_role("button", name="Pause").click()
    expect(page.locator("#running")).to_have_text("0/256")
    assert "#" not in page.url


def test_invalid_link_is_reported(server, visit):
    page = visit(server).page
    bomb = zlib.compressobj(wbits=-15)
    packed = bomb.compress(b" " * (5 << 20)) + bomb.flush()
    for code, reason in (
        (base64.urlsafe_b64encode(packed).decode().rstrip("="), "at most 4194304 bytes"),
        ("AAAA", "Compressed input was truncated"),
        ("!!!", "atob"),
    ):
        page.goto(server.url + "/#state=" + code)
        expect(page.locator("#notice")).to_contain_text(reason)
        expect(page.locator("#engine-note")).to_be_empty()


def test_invalid_state_names_the_field(server, visit):
    page = visit(server).page
    show_panel(page, "engine")
    expect(page.locator("#num-free")).not_to_have_text("–")
    with page.expect_download() as download:
        page.get_by_role("button", name="Save state").click()
    good = json.loads(download.value.path().read_text())
    state = good["state"]
    for wrong, reason in (
        ({}, "has no"),
        ({**good, "version": 2}, "has no"),
        ({**good, "state": None}, "state must be an object"),
        ({**good, "state": {**state, "num_slots": "x"}}, "state.num_slots must be a number"),
        ({**good, "state": {**state, "steps": [3]}}, "state.steps[0] must be an object"),
        ({**good, "state": {**state, "blocks": {**state["blocks"], "runs": [[9e9, "free"]]}}},
         "at most 2048 cells"),
        ({**good, "state": {**state, "gpus": [{"index": 0}]}},
         "state.gpus[0].memory_used_bytes must be a number"),
    ):  # fmt: skip
        text = json.dumps(wrong).encode()
        named = {"name": "state.json", "mimeType": "application/json", "buffer": text}
        page.locator("#state-file").set_input_files(named)
        expect(page.locator("#notice")).to_contain_text("state.json was not opened")
        expect(page.locator("#notice")).to_contain_text(reason)
    expect(page.locator("#engine-note")).to_be_empty()


def test_gpus_of_a_recorded_state_are_shown(server, visit, tmp_path):
    page = visit(server).page
    show_panel(page, "engine")
    expect(page.locator("#num-free")).not_to_have_text("–")
    expect(page.locator("#gpus")).to_be_hidden()
    with page.expect_download() as download:
        page.get_by_role("button", name="Save state").click()
    recording = json.loads(download.value.path().read_text())
    gpu = {
        "index": 0,
        "name": "<b>GPU</b>",
        "memory_used_bytes": 61 << 30,
        "memory_total_bytes": 80 << 30,
        "utilization": 0.97,
        "temperature_celsius": 64,
        "power_watts": None,
    }
    recording["state"]["gpus"] = [gpu]
    file = tmp_path / "state.json"
    file.write_text(json.dumps(recording))
    page.locator("#state-file").set_input_files(file)
    expect(page.locator("#gpus li")).to_have_text("GPU 0 61.0 of 80.0 GiB · 97 % busy · 64 °C")
    expect(page.locator("#gpus span")).to_have_attribute("title", "<b>GPU</b>")


# ---- API keys ----------------------------------------------------------------------------------


def test_entered_api_key_is_used(closed_server, visit):
    visit = visit(closed_server)
    visit.refusals = 6
    page = visit.page
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("an API key is required")
    key = dialog.get_by_label("Key", exact=True)
    expect(key).to_be_focused()
    key.fill("another-key")
    page.keyboard.press("Enter")
    expect(dialog).to_contain_text("the API key is not valid")
    key.fill(KEY)
    page.keyboard.press("Enter")
    expect(page.locator("#state")).to_have_attribute("data-state", "ready")
    show_panel(page, "engine")
    expect(page.locator("#num-free")).not_to_have_text("–")
    set_options(page, max_tokens="5")
    visit.ask(STORY)
    assert visit.answered()

    kept = "[JSON.stringify(localStorage), document.cookie, JSON.stringify(sessionStorage)]"
    local, cookies, session = page.evaluate(kept)
    assert KEY in session and KEY not in local and not cookies
    assert not [url for url in visit.requested if KEY in url]
    page.reload()
    expect(page.locator("#state")).to_have_attribute("data-state", "ready")
    show_panel(page, "settings")
    page.get_by_role("button", name="API key").click()
    page.get_by_role("button", name="Remove key").click()
    expect(dialog).to_contain_text("an API key is required")
    assert KEY not in page.evaluate("JSON.stringify(sessionStorage)")


def test_api_key_is_not_shared_with_another_tab(closed_server, visit):
    one, other = visit(closed_server), visit(closed_server)
    one.refusals = other.refusals = 4
    one.page.get_by_label("Key", exact=True).fill(KEY)
    one.page.keyboard.press("Enter")
    expect(one.page.locator("#state")).to_have_attribute("data-state", "ready")
    assert other.page.evaluate("sessionStorage.length") == 0
    expect(other.page.get_by_role("dialog")).to_be_visible()


# ---- accessibility -----------------------------------------------------------------------------


def test_everything_works_with_the_keyboard(server, visit):
    visit = visit(server)
    page = visit.page
    keyboard = page.keyboard
    message = page.get_by_label("Message", exact=True)
    expect(page.locator("#state")).to_have_attribute("data-state", "ready")
    expect(message).to_be_focused()
    keyboard.type("Tell me")
    keyboard.press("Shift+Enter")
    keyboard.type("a story.")
    expect(message).to_have_value("Tell me\na story.")
    expect(page.locator(".turn")).to_have_count(0)
    keyboard.press("Enter")
    visit.answered()
    expect(message).to_be_focused()

    show_panel(page, "settings")
    page.get_by_label("Show probabilities").check()
    visit.ask("Again.")
    visit.answered(2)
    page.locator(".turn.assistant .tokens").focus()
    tip = page.get_by_role("tooltip")
    keyboard.press("ArrowRight")
    expect(tip).to_be_visible()
    first = tip.inner_text()
    keyboard.press("End")
    assert tip.inner_text() != first
    keyboard.press("Home")
    assert tip.inner_text() == first
    keyboard.press("Escape")
    expect(tip).to_be_hidden()

    for panel in ("settings", "engine"):
        show_panel(page, panel)
        usable = page.locator("button, input, select, textarea, [tabindex='0']")
        usable = usable.filter(visible=True).and_(page.locator(":enabled, [tabindex='0']"))
        missing = set(usable.evaluate_all(f"all => all.map({IDENTITY})"))
        for _ in range(80):
            keyboard.press("Tab")
            missing.discard(page.evaluate(IDENTITY + "(document.activeElement)"))
            if not missing:
                break
        assert not missing
    visit.ask("Once more.")
    visit.answered(3)
    expect(page.locator("#steps")).to_have_attribute("aria-label", re.compile("Step "))
    page.locator("#steps").focus()
    keyboard.press("End")
    expect(page.locator("#steps-probe")).to_have_text(re.compile(r"^\d+: [\d.]+ ms"))
    page.locator("#blocks").focus()
    keyboard.press("Home")
    expect(page.locator("#blocks-probe")).to_contain_text("Block 0: ")
    keyboard.press("Control+,")
    page.get_by_role("button", name="API key").focus()
    keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_be_visible()
    keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()


IDENTITY = "(each => each.id || each.getAttribute('aria-label') || each.className)"


def test_reduced_motion_disables_animation(slow_server, visit):
    visit = visit(slow_server, reduced_motion="reduce")
    set_options(visit.page, max_tokens="40")
    visit.ask(STORY)
    visit.streaming()
    assert visit.page.evaluate("document.getAnimations().length") == 0
    visit.page.keyboard.press("Escape")
    visit.answered()


def test_page_waits_for_a_starting_server(server, visit):
    visit = visit(server)
    visit.refusals = 3
    page = visit.page
    starting = json.dumps({"error": {"message": "the server is starting"}})
    tries: list[int] = []

    def first_refuse(route: Route) -> None:
        tries.append(1)
        if len(tries) == 1:
            route.fulfill(status=503, content_type="application/json", body=starting)
        else:
            route.continue_()

    page.route("**/v1/models", first_refuse)
    page.reload()
    expect(page.locator("#state")).to_have_text("starting")
    expect(page.locator("#state")).to_have_attribute("data-state", "ready")
    assert len(tries) == 2


def test_lost_connection_is_reported(server, visit):
    visit = visit(server)
    visit.refusals = 1
    visit.page.route("**/v1/chat/completions", lambda route: route.abort())
    visit.ask(STORY)
    expect(visit.page.locator(".error")).to_have_text("Cannot reach the server.")
    expect(visit.page.get_by_label("Message", exact=True)).to_have_value(STORY)


def test_interrupted_answer_is_reported_and_kept(server, visit):
    visit = visit(server)
    answer_with(visit.page, events({"content": "Once upon"}).removesuffix("data: [DONE]\n\n"))
    visit.ask(STORY)
    expect(visit.page.locator(".error")).to_contain_text("closed before")
    expect(visit.page.locator(".turn.assistant .text")).to_have_text("Once upon")


def test_new_chat_does_not_resend_a_stopped_answer(slow_server, visit):
    visit = visit(slow_server)
    asked = bodies(visit.page)
    set_options(visit.page, max_tokens="3000")
    visit.ask("the old one")
    visit.streaming()
    visit.page.get_by_role("button", name="New chat").click()
    visit.page.get_by_role("button", name="Send", exact=True).wait_for()
    set_options(visit.page, max_tokens="2")
    visit.ask("the new one")
    visit.answered()
    assert [each["content"] for each in asked[1]["messages"]] == ["the new one"]


def test_restarted_engine_is_followed(slow_server, visit):
    visit = visit(slow_server)
    page = visit.page
    state = slow_server.get("/engine_state")
    names = ("end_s", "sequences", "tokens", "rows", "draft_tokens", "accepted_tokens")
    step = dict.fromkeys(names, 1)
    told = {"generation_tokens": 1000, "steps": [{**step, "step": 900, "seconds": 0.001}]}
    page.route("**/engine_state*", lambda route: route.fulfill(json={**state, **told}))
    show_panel(page, "engine")
    expect(page.locator("#steps")).to_have_attribute("aria-label", re.compile("Step 900"))
    told.update(generation_tokens=5, steps=[{**step, "step": 3, "seconds": 0.001}])
    expect(page.locator("#steps")).to_have_attribute("aria-label", re.compile("Step 3:"))


def test_request_recorder_detects_external_requests(server, visit):
    opened = visit(server)
    opened.requested.append("http://example.org/x")
    with pytest.raises(AssertionError, match=r"example\.org"):
        opened.check()
    opened.requested.pop()
