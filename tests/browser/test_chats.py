"""Stored conversations: list, versions of messages, files, tools, settings."""

from __future__ import annotations

import json
from typing import Any

from conftest import Visit
from page_actions import answer_with, bodies, events, set_options, show_panel
from playwright.sync_api import Page, expect


def say(visit: Visit, question: str, answer: str) -> None:
    """Ask a question that gets this answer, and wait for its end."""
    page = visit.page
    page.unroute_all()
    answer_with(page, events({"content": answer}))
    count = page.locator(".turn.assistant .meta").count()
    visit.ask(question)
    page.locator(".turn.assistant .meta").nth(count).wait_for()


def titles(page: Page) -> list[str]:
    return page.locator("#chat-list .open").all_inner_texts()


def texts(page: Page) -> list[str]:
    return page.locator(".turn .text").all_inner_texts()


def new_chat(page: Page) -> None:
    page.get_by_role("button", name="New chat", exact=True).click()


def act(page: Page, name: str, turn: int) -> None:
    page.locator(".turn").nth(turn).hover()
    page.locator(".turn").nth(turn).get_by_role("button", name=name, exact=True).click()


def test_chats_survive_a_reload_and_are_listed_newest_first(server, visit):
    visit = visit(server)
    page = visit.page
    say(visit, "First question", "First **answer**")
    new_chat(page)
    say(visit, "Second question", "Second answer")
    assert titles(page) == ["Second question", "First question"]
    page.reload()
    expect(page.locator("#chat-list .open")).to_have_count(2)
    assert page.locator(".turn").count() == 0
    page.get_by_role("button", name="First question", exact=True).click()
    assert texts(page) == ["First question", "First answer"]
    assert page.locator(".turn strong").inner_text() == "answer"
    expect(page.locator("[aria-current=page]")).to_have_text("First question")
    asked = bodies(page)
    say(visit, "And then?", "More")
    sent = [message["content"] for message in asked[0]["messages"]]
    assert sent == ["First question", "First **answer**", "And then?"]
    assert titles(page)[0] == "First question"


def test_partial_answer_is_stored_when_the_page_is_left(slow_server, visit):
    visit = visit(slow_server)
    set_options(visit.page, max_tokens="3000")
    visit.ask("A long story")
    visit.streaming()
    with visit.page.expect_event("console", lambda message: message.text == "saved"):
        visit.page.evaluate("""() => document.addEventListener("conversations-changed",
            () => setTimeout(() => console.log("saved"), 300), { once: true })""")
    visit.page.reload()
    visit.page.get_by_role("button", name="A long story", exact=True).click()
    assert len(texts(visit.page)[1]) > 10


def test_search_finds_words_in_titles_and_messages(server, visit):
    visit = visit(server)
    page = visit.page
    say(visit, "About dogs", "They bark at <b>trees</b>")
    new_chat(page)
    say(visit, "About cats", "They purr")
    page.keyboard.press("Control+k")
    expect(page.get_by_label("Search chats")).to_be_focused()
    for query, found in (("BARK dogs", ["About dogs"]), ("they", ["About cats", "About dogs"])):
        page.get_by_label("Search chats").fill(query)
        assert titles(page) == found
    page.get_by_label("Search chats").fill("birds")
    expect(page.get_by_text("No chat contains these words.")).to_be_visible()
    page.keyboard.press("Escape")
    assert len(titles(page)) == 2


def test_rename_and_delete_change_the_list_and_the_database(server, visit):
    visit = visit(server)
    page = visit.page
    say(visit, "Old name", "Answer")
    page.locator(".chat-row").hover()
    page.get_by_role("button", name="Rename Old name").click()
    page.get_by_label("Name of the chat").fill("New name")
    page.keyboard.press("Enter")
    assert titles(page) == ["New name"]
    page.locator(".chat-row").hover()
    page.get_by_role("button", name="Rename New name").click()
    page.get_by_label("Name of the chat").fill("not kept")
    page.keyboard.press("Escape")
    page.reload()
    expect(page.locator("#chat-list .open")).to_have_text("New name")
    page.get_by_role("button", name="New name", exact=True).click()
    page.locator(".chat-row").hover()
    page.get_by_role("button", name="Delete New name").click()
    page.get_by_role("button", name="Cancel").click()
    assert titles(page) == ["New name"]
    page.locator(".chat-row").hover()
    page.get_by_role("button", name="Delete New name").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(page.get_by_text("No chats yet.")).to_be_visible()
    assert page.locator(".turn").count() == 0
    page.reload()
    expect(page.get_by_text("No chats yet.")).to_be_visible()


def test_edited_question_and_new_answers_are_versions(server, visit):
    visit = visit(server)
    page = visit.page
    say(visit, "Q1", "A1")
    say(visit, "Q2", "A2")
    answer_with(page, events({"content": "A1b"}))
    asked = bodies(page)
    act(page, "Edit", 0)
    page.get_by_label("Edited message").fill("Q1b")
    page.keyboard.press("Control+Enter")
    page.locator(".turn.assistant .meta").wait_for()
    expect(page.locator(".turn .text")).to_have_text(["Q1b", "A1b"])
    assert [message["content"] for message in asked[0]["messages"]] == ["Q1b"]
    act(page, "Previous version", 0)
    assert texts(page) == ["Q1", "A1", "Q2", "A2"]

    answer_with(page, events({"content": "A2b"}))
    act(page, "Regenerate", 3)
    expect(page.locator(".turn .text")).to_have_text(["Q1", "A1", "Q2", "A2b"])
    page.locator(".turn").nth(3).locator(".meta").wait_for()
    expect(page.locator(".turn").nth(3).locator(".count")).to_have_text("2/2")
    act(page, "Previous version", 3)
    assert texts(page)[3] == "A2"

    act(page, "Edit", 3)
    page.get_by_label("Edited message").fill("A2c")
    page.get_by_role("button", name="Save").click()
    assert texts(page)[3] == "A2c"
    page.reload()
    page.get_by_role("button", name="Q1", exact=True).click()
    assert texts(page) == ["Q1", "A1", "Q2", "A2c"]


def test_failed_requests_keep_the_shown_versions(server, visit):
    visit = visit(server)
    page = visit.page
    visit.refusals = 3
    refusal = json.dumps({"error": {"message": "No."}})
    answer_with(page, refusal, 500)
    visit.ask("Never answered")
    expect(page.locator(".error")).to_have_text("No.")
    expect(page.get_by_text("No chats yet.")).to_be_visible()
    assert texts(page) == []
    say(visit, "Q1", "A1")
    assert titles(page) == ["Q1"]
    page.unroute_all()
    answer_with(page, refusal, 500)
    act(page, "Regenerate", 1)
    expect(page.locator(".error")).to_have_text("No.")
    expect(page.locator(".turn .text")).to_have_text(["Q1", "A1"])
    act(page, "Edit", 0)
    page.get_by_label("Edited message").fill("Q1b")
    page.get_by_role("button", name="Send", exact=True).first.click()
    expect(page.get_by_label("Message", exact=True)).to_have_value("Q1b")
    assert texts(page) == ["Q1", "A1"]
    page.reload()
    page.get_by_role("button", name="Q1", exact=True).click()
    assert texts(page) == ["Q1", "A1"]


def test_continue_appends_to_the_answer(server, visit):
    visit = visit(server)
    page = visit.page
    set_options(page, temperature="0", max_tokens="8")
    visit.ask("Tell me a story about a dog.")
    first = visit.answered()
    asked = bodies(page)
    act(page, "Continue", 1)
    expect(page.locator(".turn.assistant .text")).not_to_have_text(first)
    whole = visit.answered()
    page.locator(".turn.assistant [aria-label=Continue]").wait_for()
    whole = visit.answered()
    assert whole.startswith(first) and len(whole) > len(first)
    assert asked[0]["continue_final_message"] is True
    assert asked[0]["messages"][-1]["content"] == first
    new_chat(page)
    set_options(page, max_tokens="16")
    visit.ask("Tell me a story about a dog.")
    assert visit.answered() == whole  # as if it had not been interrupted


def test_branch_copies_the_chat_up_to_a_message(server, visit):
    visit = visit(server)
    page = visit.page
    say(visit, "Q1", "A1")
    say(visit, "Q2", "A2")
    act(page, "Branch from here", 1)
    assert texts(page) == ["Q1", "A1"] and titles(page) == ["Q1", "Q1"]
    say(visit, "Q3", "A3")
    page.locator("#chat-list .open").nth(1).click()
    assert texts(page) == ["Q1", "A1", "Q2", "A2"]


def test_exported_chats_are_imported_in_another_browser(server, visit, tmp_path):
    one = visit(server)
    say(one, "Q1", "A1")
    answer_with(one.page, events({"content": "A1b"}))
    act(one.page, "Regenerate", 1)
    one.page.locator(".turn .count").wait_for()
    new_chat(one.page)
    say(one, "Other", "Answer")
    with one.page.expect_download() as download:
        one.page.get_by_role("button", name="Export all").click()
    file = tmp_path / "chats.json"
    download.value.save_as(file)
    one.page.locator(".chat-row").first.hover()
    with one.page.expect_download() as download:
        one.page.get_by_role("button", name="Export Other").click()
    assert download.value.suggested_filename == "Other.json"

    other = visit(server)
    other.page.locator("#import-file").set_input_files(file)
    expect(other.page.locator("#chat-list .open")).to_have_text(["Other", "Q1"])
    other.page.get_by_role("button", name="Q1", exact=True).click()
    assert texts(other.page) == ["Q1", "A1b"]
    act(other.page, "Previous version", 1)
    assert texts(other.page) == ["Q1", "A1"]


def chats(**changes: Any) -> dict[str, Any]:
    message = {"id": "a", "parent": None, "role": "user", "content": "x", **changes}
    file = {"format": "forge-jax-chats", "version": 1}
    return {**file, "conversations": [{"title": "t", "messages": [message]}]}


INVALID_FILES = (
    ("{", "JSON"),
    ([], "exported"),
    ({"format": "other"}, "exported"),
    ({**chats(), "version": 2}, "version must be 1, not 2"),
    ({**chats(), "conversations": [3]}, "conversations[0] must be an object"),
    (chats(role="system"), "conversations[0].messages[0].role must be user, assistant, tool"),
    (chats(content=7), "conversations[0].messages[0].content must be a string"),
    (chats(parent="a"), "messages[0].parent must be the id of an earlier message"),
    (chats(calls="x"), "messages[0].calls must be a list"),
    (chats(attachments=[{"name": "n"}]), "attachments[0].text must be a string"),
)


def test_invalid_import_names_the_field_and_adds_nothing(server, visit):
    page = visit(server).page
    for file, reason in INVALID_FILES:
        text = file if isinstance(file, str) else json.dumps(file)
        named = {"name": "chats.json", "mimeType": "application/json", "buffer": text.encode()}
        page.locator("#import-file").set_input_files(named)
        expect(page.locator("#notice")).to_contain_text("chats.json was not imported")
        expect(page.locator("#notice")).to_contain_text(reason)
    assert titles(page) == []


def test_text_files_are_sent_with_the_question(server, visit, tmp_path):
    visit = visit(server)
    page = visit.page
    (tmp_path / "notes.txt").write_text("alpha\nbeta")
    (tmp_path / "more.py").write_text("x = 1")
    (tmp_path / "image.bin").write_bytes(b"\xff\xfe\x00")
    page.locator("#files").set_input_files([tmp_path / "notes.txt", tmp_path / "more.py"])
    expect(page.locator("#attachments li")).to_have_count(2)
    page.get_by_role("button", name="Remove more.py").click()
    page.locator("#files").set_input_files(tmp_path / "image.bin")
    expect(page.locator("#notice")).to_contain_text(
        "image.bin is neither a PDF nor a text file in UTF-8"
    )
    asked = bodies(page)
    say(visit, "Summarize.", "Done")
    assert asked[0]["messages"][0]["content"] == "File notes.txt:\n\nalpha\nbeta\n\nSummarize."
    expect(page.locator("#attachments li")).to_have_count(0)
    page.locator(".file summary").click()
    expect(page.locator(".file pre")).to_have_text("alpha\nbeta")


TOOLS = [{"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}}]


def test_tool_calls_are_shown_and_answered(server, visit):
    visit = visit(server)
    page = visit.page
    set_options(page, tools=json.dumps(TOOLS))
    expect(page.locator("#tools-note")).to_contain_text("may call")
    calls = [
        {"index": 0, "id": "call-1", "type": "function",
         "function": {"name": "add", "arguments": '{"a"'}},
        {"index": 0, "function": {"arguments": ': 1}'}},
        {"index": 1, "id": "call-2", "function": {"name": "add", "arguments": "{}"}},
    ]  # fmt: skip
    asked = bodies(page)
    answer_with(page, events(*({"tool_calls": [call]} for call in calls)))
    visit.ask("Add")
    expect(page.locator(".call pre")).to_have_text(['{\n  "a": 1\n}', "{}"])
    boxes = page.get_by_label("Result of add")
    expect(boxes).to_have_count(2)
    page.unroute_all()
    answer_with(page, events({"content": "The sum is 3"}))
    boxes.nth(0).fill("3")
    boxes.nth(1).fill("error")
    page.get_by_role("button", name="Send results").click()
    expect(page.locator(".turn.assistant .text").last).to_have_text("The sum is 3")
    assert asked[0]["tools"] == [{"type": "function", "function": TOOLS[0]}]
    assistant, one, other = asked[1]["messages"][1:]
    assert [call["id"] for call in assistant["tool_calls"]] == ["call-1", "call-2"]
    assert assistant["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert one == {"role": "tool", "tool_call_id": "call-1", "content": "3"}
    assert other == {"role": "tool", "tool_call_id": "call-2", "content": "error"}
    expect(page.get_by_role("button", name="Send results")).to_have_count(0)


def test_invalid_tools_are_reported_and_not_sent(server, visit):
    visit = visit(server)
    asked = bodies(visit.page)
    for tools in ("{", "{}", "[3]", '[{"parameters": {}}]'):
        set_options(visit.page, tools=tools)
        expect(visit.page.locator("#tools-note")).to_contain_text("Invalid tools")
        visit.ask("Hello")
        expect(visit.page.locator("#tools")).to_be_focused()
    assert not asked


def test_reasoning_is_collapsed_above_the_answer(server, visit):
    visit = visit(server)
    page = visit.page
    answer_with(
        page, events({"reasoning": "Let me "}, {"reasoning": "*think*"}, {"content": "Yes"})
    )
    visit.ask("Is it?")
    assert visit.answered() == "Yes"
    reasoning = page.locator(".reasoning")
    expect(reasoning.locator("em")).to_be_hidden()
    reasoning.get_by_text("Reasoning").click()
    expect(reasoning.locator("em")).to_have_text("think")


def test_settings_and_theme_survive_a_reload_until_reset(server, visit):
    visit = visit(server, color_scheme="light")
    page = visit.page
    lightness = "parseInt(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])"
    set_options(page, temperature="0.5", system="Be kind.")
    page.get_by_label("Show probabilities").check()
    page.get_by_label("Theme").select_option("dark")
    assert page.evaluate(lightness) < 60
    page.reload()
    assert page.evaluate(lightness) < 60
    show_panel(page, "settings")
    expect(page.locator("#temperature")).to_have_value("0.5")
    expect(page.locator("#system")).to_have_value("Be kind.")
    expect(page.get_by_label("Show probabilities")).to_be_checked()
    page.get_by_role("button", name="Reset").click()
    expect(page.locator("#temperature")).to_have_value("")
    assert page.evaluate(lightness) > 200
    page.reload()
    expect(page.locator("#temperature")).to_have_value("")
    assert page.evaluate("localStorage.length") == 0


def test_question_while_models_are_loading_has_no_model(server, visit):
    visit = visit(server)
    visit.page.route("**/v1/models", lambda route: None)  # never answered
    visit.page.reload()
    asked = bodies(visit.page)
    visit.ask("Hello")
    visit.answered()
    assert "model" not in asked[0]


def test_two_tabs_show_the_same_chats(server, visit):
    one = visit(server)
    other = one.page.context.new_page()
    other.goto(server.url)
    say(one, "From the first tab", "Answer")
    expect(other.locator("#chat-list .open")).to_have_text("From the first tab")


def test_chats_last_until_closed_without_a_database(server, visit):
    visit = visit(server)
    page = visit.page
    page.add_init_script("Object.defineProperty(window, 'indexedDB', { value: undefined })")
    page.reload()
    expect(page.locator("#notice")).to_contain_text("cannot store chats")
    say(visit, "Question", "Answer")
    assert titles(page) == ["Question"]
