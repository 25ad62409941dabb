"""PDF files that are attached to questions on the page."""

from __future__ import annotations

import base64
import json
from typing import Any

from page_actions import answer_with, bodies, events, set_options
from playwright.sync_api import Page, expect

from tests import pdfs

PDF = pdfs.text_pdf("The dog ran home.")

# Events of a user who pastes or drops a file, which the browser's driver does not have.
GIVE = """([kind, name, data]) => {
    const given = new DataTransfer();
    const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
    given.items.add(new File([bytes], name, { type: "application/pdf" }));
    const options = { bubbles: true, cancelable: true };
    const event = kind === "paste"
        ? new ClipboardEvent("paste", { clipboardData: given, ...options })
        : new DragEvent("drop", { dataTransfer: given, ...options });
    document.getElementById(kind === "paste" ? "prompt" : "log").dispatchEvent(event);
}"""


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def file_part(name: str, data: bytes = PDF) -> dict[str, Any]:
    url = f"data:application/pdf;base64,{encoded(data)}"
    return {"type": "file", "file": {"filename": name, "file_data": url}}


def attach(page: Page, *files: tuple[str, bytes]) -> None:
    chosen = [{"name": name, "mimeType": "", "buffer": data} for name, data in files]
    page.locator("#files").set_input_files(chosen)


def test_server_reads_the_attached_pdf(server, visit):
    visit = visit(server)
    page = visit.page
    set_options(page, max_tokens="8")
    attach(page, ("story.pdf", PDF))
    expect(page.locator("#attachments li")).to_have_text("story.pdf" + "PDF, 1 kB")
    page.get_by_label("Message", exact=True).fill("Go on.")
    with page.expect_response("**/v1/chat/completions") as response:
        page.keyboard.press("Enter")
    assert response.value.status == 200
    visit.answered()
    expect(page.locator(".turn.user .file")).to_have_text("story.pdf" + "PDF, 1 kB")


def test_pdfs_are_chosen_pasted_or_dropped_and_sent_as_file_parts(server, visit):
    visit = visit(server)
    page = visit.page
    attach(page, ("notes.txt", b"alpha"), ("more.txt", b"beta"), ("one.pdf", PDF))
    for kind, name in (("paste", "two.pdf"), ("drop", "three.pdf")):
        page.evaluate(GIVE, [kind, name, encoded(PDF)])
    expect(page.locator("#attachments li")).to_have_count(5)
    page.get_by_role("button", name="Remove two.pdf").click()
    answer_with(page, events({"content": "Done"}))
    asked = bodies(page)
    visit.ask("Why?")
    visit.answered()
    assert asked[0]["messages"][0]["content"] == [
        {"type": "text", "text": "File notes.txt:\n\nalpha\n\nFile more.txt:\n\nbeta"},
        file_part("one.pdf"),
        file_part("three.pdf"),
        {"type": "text", "text": "Why?"},
    ]
    expect(page.locator("#attachments li")).to_have_count(0)


def test_pdfs_stay_with_the_chat_and_in_exports(server, visit, tmp_path):
    one = visit(server)
    attach(one.page, ("one.pdf", PDF))
    answer_with(one.page, events({"content": "A"}))
    one.ask("Q")
    one.answered()
    one.page.reload()
    one.page.get_by_role("button", name="Q", exact=True).click()
    asked = bodies(one.page)
    one.ask("Again")
    one.answered(2)
    sent = [{"type": "text", "text": "Q"}]
    assert asked[0]["messages"][0]["content"] == [file_part("one.pdf"), *sent]
    with one.page.expect_download() as download:
        one.page.get_by_role("button", name="Export all").click()
    file = tmp_path / "chats.json"
    download.value.save_as(file)

    other = visit(server)
    other.page.locator("#import-file").set_input_files(file)
    expect(other.page.locator(".file")).to_have_text("one.pdf" + "PDF, 1 kB")
    asked = bodies(other.page)
    answer_with(other.page, events({"content": "B"}))
    other.ask("And?")
    other.answered(3)
    assert asked[0]["messages"][0]["content"] == [file_part("one.pdf"), *sent]


def test_pdf_that_is_too_large_is_not_attached(server, visit):
    page = visit(server).page
    attach(page, ("big.pdf", PDF.ljust(5_000_001)))
    expect(page.locator("#notice")).to_contain_text("big.pdf is larger than 5 MB.")
    expect(page.locator("#attachments li")).to_have_count(0)


def test_rejected_pdf_is_named_and_attached_again(server, visit):
    visit = visit(server)
    page = visit.page
    visit.refusals = 2
    attach(page, ("good.pdf", PDF), ("scan.pdf", pdfs.text_pdf("")))
    visit.ask("Why?")
    expect(page.locator(".error")).to_contain_text("scan.pdf: the PDF has no text; its pages may")
    expect(page.locator("#attachments li")).to_have_count(2)
    expect(page.get_by_label("Message", exact=True)).to_have_value("Why?")

    message = "messages[0].content[0].file.file_data: this server cannot read PDF files: install"
    error = {"message": message, "param": "messages[0].content[0].file.file_data"}
    answer_with(page, json.dumps({"error": error}), 400)
    page.keyboard.press("Enter")
    text = "good.pdf: this server cannot read PDF files: install"
    expect(page.locator(".error")).to_have_text(text)
