"""Files in chats of the three protocols: text files, PDFs, and files that are rejected."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import threading
from typing import Any

import pytest

from forge_jax.engine.thread import Engine
from forge_jax.errors import OverloadedError
from forge_jax.text import ChatTemplate
from forge_serve.config import ServerConfig
from forge_serve.generation import pdf
from forge_serve.generation.pdf import MAX_PROCESSES, Pdf, PdfError, PdfLimits, extract_text
from forge_serve.generation.workers import Workers
from forge_serve.responses_api.compaction import ASKS_FOR_SUMMARY
from tests import pdfs
from tests.serve.conftest import Server

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
TEXT = "größer\n# two\n"
PDF = pdfs.text_pdf("The sky is green.", "So is the sea.")
PDF_TEXT = "The sky is green.\n\nSo is the sea."
SECRET = "zq7331"


def encoded(data: bytes, media_type: str | None = None) -> str:
    text = base64.b64encode(data).decode()
    return text if media_type is None else f"data:{media_type};base64,{text}"


def chat_file(data: str, name: str | None = "a.txt", **more: Any) -> dict[str, Any]:
    return {"type": "file", "file": {"filename": name, "file_data": data, **more}}


def input_file(data: str, name: str | None = "a.txt", **more: Any) -> dict[str, Any]:
    return {"type": "input_file", "filename": name, "file_data": data, **more}


def document(data: str, name: str | None = "a.txt", **more: Any) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "text/plain", "data": data, **more}
    return {"type": "document", "title": name, "source": source}


def chat(content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "seed": 1, **more}


def responses(content: Any, **more: Any) -> dict[str, Any]:
    given = [{"role": "user", "content": content}]
    return {"input": given, "max_output_tokens": 8, "seed": 1, **more}


FORMS = {CHAT: (chat, chat_file), RESPONSES: (responses, input_file), MESSAGES: (chat, document)}


def texts_of(path: str, answer: Any) -> str:
    if path == CHAT:
        return answer["choices"][0]["message"]["content"]
    if path == RESPONSES:
        return answer["output"][-1]["content"][0]["text"]
    return answer["content"][0]["text"]


@pytest.fixture
def rendered(monkeypatch) -> list[list[dict[str, Any]]]:
    """Return a list that gets the messages of each chat, as its template renders them."""
    found = []
    encode = ChatTemplate.encode

    def spy(self: ChatTemplate, messages: list[dict[str, Any]], *args: Any, **more: Any) -> Any:
        found.append(messages)
        return encode(self, messages, *args, **more)

    monkeypatch.setattr(ChatTemplate, "encode", spy)
    return found


async def answered(server: Server, path: str, body: dict[str, Any]) -> str:
    status, answer = await server.post(path, body)
    assert status == 200, answer
    return texts_of(path, answer)


async def refused(server: Server, path: str, part: dict[str, Any]) -> tuple[str, str | None]:
    make, _ = FORMS[path]
    text = {"type": "input_text" if path == RESPONSES else "text", "text": SECRET}
    status, answer = await server.post(path, make([text, part]))
    assert status == 400, answer
    error = answer["error"]
    assert SECRET not in json.dumps(error)
    return error["message"], error.get("param")


@pytest.mark.parametrize("path", FORMS)
@pytest.mark.parametrize(
    ("data", "text"), [(PDF, PDF_TEXT), (TEXT.encode(), TEXT)], ids=["pdf", "text"]
)
async def test_file_is_the_text_with_its_name(server, rendered, path, data, text):
    make, part = FORMS[path]
    question = {"type": "input_text" if path == RESPONSES else "text", "text": "Why?"}
    for form in (encoded(data), encoded(data, "application/octet-stream")):
        await answered(server, path, make([part(form), question]))
        content = f"File a.txt:\n\n{text}\n\nWhy?"
        assert rendered[-1] == [{"role": "user", "content": content}]


@pytest.mark.parametrize("path", FORMS)
async def test_streams_take_files(server, path):
    make, part = FORMS[path]
    body = make([part(encoded(PDF))])
    whole = await answered(server, path, body)
    async with server.http.post(server.url + path, json={**body, "stream": True}) as response:
        assert response.status == 200 and response.content_type == "text/event-stream"
        lines = (await response.read()).decode().splitlines()
    found = ""
    for line in lines:
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        if path == CHAT:
            found += event["choices"][0]["delta"].get("content") or ""
        elif path == RESPONSES and event["type"] == "response.output_text.delta":
            found += event["delta"]
        elif path == MESSAGES and event["type"] == "content_block_delta":
            found += event["delta"]["text"]
    assert found == whole


async def test_files_are_between_the_texts_around_them(server, rendered):
    parts = [
        {"type": "text", "text": "One "},
        {"type": "text", "text": "two"},
        chat_file(encoded(b"\xef\xbb\xbfx,y"), "  a\n.csv "),
        chat_file(encoded(b""), None),
        {"type": "text", "text": "three"},
    ]
    text = "One two\n\nFile a .csv:\n\nx,y\n\nFile attachment:\n\n\n\nthree"
    await answered(server, CHAT, chat(parts))
    assert rendered[-1][0]["content"] == text


async def test_count_endpoints_and_tokenize_take_files(server):
    text = f"File a.txt:\n\n{PDF_TEXT}"
    for path, key, (make, part) in (
        ("/v1/responses/input_tokens", "input_tokens", FORMS[RESPONSES]),
        ("/v1/messages/count_tokens", "input_tokens", FORMS[MESSAGES]),
        ("/tokenize", "tokens", FORMS[CHAT]),
    ):
        _, file = await server.post(path, make([part(encoded(PDF))]))
        _, plain = await server.post(path, make(text))
        assert file[key] == plain[key]


async def test_messages_take_documents_as_text_and_in_tool_results(server, rendered):
    text = f"File a.txt:\n\n{TEXT}"
    plain = document(TEXT, media_type="text/plain")
    plain["source"]["type"] = "text"
    await answered(server, MESSAGES, chat([plain]))
    assert rendered[-1][-1]["content"] == text

    def result(content: Any) -> dict[str, Any]:
        use = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}
        block = {"type": "tool_result", "tool_use_id": "toolu_1", "content": content}
        turns = [("user", "Read."), ("assistant", [use]), ("user", [block])]
        messages = [{"role": role, "content": content} for role, content in turns]
        return {"messages": messages, "max_tokens": 8, "seed": 1}

    for block in (plain, document(encoded(TEXT.encode()))):
        await answered(server, MESSAGES, result([block]))
        assert rendered[-1][-1]["content"] == text and rendered[-1][-1]["role"] == "tool"


async def test_stored_responses_keep_their_files(server, rendered):
    parts = [input_file(encoded(PDF)), {"type": "input_text", "text": "Why?"}]
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": parts}
    items = [{"role": "user", "content": parts}, call, output]
    body = {"max_output_tokens": 8, "seed": 1}
    status, first = await server.post(RESPONSES, {**body, "input": items})
    assert status == 200, first
    _, listed = await server.get(f"{RESPONSES}/{first['id']}/input_items?order=asc")
    assert listed["data"][0]["content"] == [
        {"type": "input_file", "filename": "a.txt", "file_data": encoded(PDF)},
        {"type": "input_text", "text": "Why?"},
    ]
    assert listed["data"][2]["output"] == listed["data"][0]["content"]

    more = {**body, "input": "More.", "previous_response_id": first["id"]}
    await answered(server, RESPONSES, more)
    text = f"File a.txt:\n\n{PDF_TEXT}\n\nWhy?"
    contents = [each["content"] for each in rendered[-1]]
    assert contents[0] == contents[2] == text and contents[-1] == "More."


async def test_summaries_include_files_of_the_last_message(server, rendered):
    file, text = input_file(encoded(PDF)), {"type": "input_text", "text": "Why?"}
    for parts, end in (([text, file], PDF_TEXT), ([file, text], "Why?")):
        body = {"model": server.model, "input": [{"role": "user", "content": parts}]}
        await server.post("/v1/responses/compact", {**body, "max_output_tokens": 8})
        [message] = rendered[-1]
        assert message["content"].endswith(f"{end}\n\n{ASKS_FOR_SUMMARY}")


AT = {
    CHAT: "messages[0].content[1].file.file_data",
    RESPONSES: "input[0].content[1].file_data",
    MESSAGES: "messages[0].content[1].source.data",
}


@pytest.mark.parametrize("path", FORMS)
async def test_unreadable_file_is_rejected_by_its_path(server, path):
    data = encoded(pdfs.text_pdf(SECRET)[:-300])
    message, param = await refused(server, path, FORMS[path][1](data))
    reason = "the PDF is damaged or incomplete: save it again, or send the text"
    assert message == f"{AT[path]}: {reason}"
    assert param == (None if path == MESSAGES else AT[path])


@pytest.mark.parametrize(
    ("data", "name", "reason"),
    [
        (f"https://{SECRET}/a.pdf", "a", "in base64 or as a data URL; the server downloads no"),
        (f"data:text/plain,{SECRET}", "a", "a data URL must contain base64: start it with"),
        (encoded(b"\xff" + SECRET.encode()), "a", "neither a PDF nor text in UTF-8: send the text"),
        (encoded(SECRET.encode() + b"\0"), "a", "neither a PDF nor text in UTF-8: send the text"),
        (encoded(SECRET.encode(), "application/pdf"), "a", "the file is not a PDF: save it again"),
        (encoded(SECRET.encode()), "a.PDF", "the file is not a PDF: save it again"),
        (encoded(b"%PDF-1.7 " + SECRET.encode()), "a", "the PDF is damaged or incomplete"),
        (encoded(pdfs.encrypted_pdf(SECRET, "1")), "a", "is encrypted: remove its password"),
        (encoded(pdfs.text_pdf("")), "a", "the PDF has no text; its pages may be images: run"),
        (encoded(pdfs.cyclic_pdf()), "a", "the PDF is damaged or incomplete"),
        (encoded(b""), SECRET * 50, "the file's name is longer than 255 characters"),
    ],
)  # fmt: skip
async def test_error_has_the_reason_and_the_remedy(server, data, name, reason):
    message, param = await refused(server, CHAT, chat_file(data, name))
    assert message.startswith(f"{AT[CHAT]}: ") and reason in message and param == AT[CHAT]


@pytest.mark.parametrize(
    ("path", "part", "message"),
    [
        (CHAT, {"type": "file"}, "messages[0].content[1].file is required"),
        (CHAT, chat_file(None), "messages[0].content[1].file.file_data is required"),
        (CHAT, chat_file("", file_id=SECRET), "[1].file.file_id: the server stores no files; send"),
        (RESPONSES, input_file(None), "input[0].content[1].file_data is required"),
        (RESPONSES, input_file("", file_id=SECRET), "[1].file_id: the server stores no files; sen"),
        (RESPONSES, input_file("", file_url=SECRET), "file_url: the server downloads no files; se"),
        (MESSAGES, {"type": "document"}, "messages[0].content[1].source is required"),
        (MESSAGES, document(None), "messages[0].content[1].source.data is required"),
        (MESSAGES, {"type": "document", "source": {"type": "url", "url": f"https://{SECRET}"}},
         "source.type: the server downloads no files; send a source of the type base64 or text"),
        (MESSAGES, {"type": "document", "source": {"type": "file", "file_id": SECRET}},
         "source.type: the server stores no files; send a source of the type base64 or text"),
        (MESSAGES, {"type": "document", "source": {"type": SECRET}},
         "source.type: this type is not supported; send a source of the type base64 or text"),
        (MESSAGES, {**document(""), "context": SECRET}, "context: not supported; send it in"),
        (MESSAGES, {**document(""), "citations": {"enabled": True}},
         "citations.enabled: not supported; omit it"),
    ],
)  # fmt: skip
async def test_unsupported_reference_to_a_file_is_rejected(server, path, part, message):
    assert message in (await refused(server, path, part))[0]


async def test_only_users_and_tools_send_files_in_responses(server):
    body = responses([input_file(encoded(PDF))])
    body["input"][0]["role"] = "system"
    status, answer = await server.post(RESPONSES, body)
    assert status == 400 and answer["error"]["param"] == "input[0].content[0]"


async def test_missing_pypdf_is_reported_with_its_extra(server, rendered, monkeypatch):
    monkeypatch.setattr(pdf.importlib.util, "find_spec", lambda name: None)
    message, _ = await refused(server, CHAT, chat_file(encoded(pdfs.text_pdf("other"))))
    assert "install its extra pdf, or send the text" in message
    await answered(server, CHAT, chat([chat_file(encoded(TEXT.encode()))]))
    assert rendered[-1][0]["content"] == f"File a.txt:\n\n{TEXT}"


async def test_text_of_a_pdf_is_limited_as_other_text(start):
    limits = dataclasses.replace(ServerConfig().limits, text_bytes=2048)
    server = await start(Engine.fake(max_model_len=8192), ServerConfig(limits=limits))
    long = encoded(pdfs.text_pdf("a" * 1500, "b" * 1500))
    message, _ = await refused(server, CHAT, chat_file(long))
    assert "more than 2048 bytes of text (--max-text-bytes): send fewer pages" in message
    two = [chat_file(encoded(pdfs.text_pdf(each * 1500))) for each in "cd"]
    status, answer = await server.post(CHAT, chat(two))
    assert status == 400 and "at most 2048 are allowed" in answer["error"]["message"]


# ---- limits of one PDF ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "limits", "reason"),
    [
        (pdfs.slow_pdf, {"cpu_s": 1}, "takes more than 1 s of CPU time to read: send fewer pages"),
        (pdfs.memory_pdf, {"memory_bytes": 44 << 20}, "needs more than 44 MiB of memory to read"),
        (pdfs.bomb_pdf, {}, "too complex to read: send fewer pages, or the text"),
        (lambda: pdfs.text_pdf("a", "b", "c"), {"pages": 2}, "has more than 2 pages: send fewer"),
        (lambda: pdfs.text_pdf("a" * 60, "b" * 41), {}, "more than 100 bytes of text"),
    ],
    ids=["slow", "memory", "bomb", "pages", "text"],
)
def test_hostile_pdf_ends_at_a_limit(data, limits, reason):
    with pytest.raises(PdfError, match=reason.replace("(", "\\(")):
        extract_text(data(), PdfLimits(**limits), 100)


def test_pdf_may_reach_the_limits():
    data = pdfs.text_pdf("a" * 60, "b" * 40)
    assert extract_text(data, PdfLimits(pages=2), 100) == "a" * 60 + "\n\n" + "b" * 40
    assert extract_text(pdfs.memory_pdf(), PdfLimits(), 100) == "small"


def test_pdf_without_cpu_time_can_be_retried():
    with pytest.raises(OverloadedError, match="try again later"):
        extract_text(pdfs.slow_pdf(), PdfLimits(wait_s=0.1), 100)


class Processes:
    """Replaces `extract_text`: each call waits for its release."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.begun = 0
        self.release = threading.Semaphore(0)
        monkeypatch.setattr(pdf, "extract_text", self.extract)

    def extract(self, data: bytes, limits: PdfLimits, max_bytes: int) -> str:
        self.begun += 1
        assert self.release.acquire(timeout=30)
        return data.decode()


async def test_pdfs_run_concurrently_up_to_a_limit_without_blocking_the_loop(monkeypatch):
    processes, workers = Processes(monkeypatch), Workers()
    try:
        files = [Pdf.of(b"%%PDF-%d" % i) for i in range(MAX_PROCESSES + 2)]
        tasks = [asyncio.ensure_future(workers.pdfs.text("", file, 9)) for file in files]
        while processes.begun < MAX_PROCESSES:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        assert processes.begun == MAX_PROCESSES
        processes.release.release(len(files))
        assert await asyncio.gather(*tasks) == [file.data.decode() for file in files]
    finally:
        workers.close()


async def test_texts_are_cached_by_tenant(monkeypatch):
    processes, workers = Processes(monkeypatch), Workers()
    processes.release.release(100)
    monkeypatch.setattr(pdf, "CACHED_BYTES", 12)
    one, two = Pdf.of(b"%PDF-1"), Pdf.of(b"%PDF-2")  # two of them fit
    try:
        for tenant, file, begun in (
            ("a", one, 1), ("a", one, 1), ("b", one, 2), ("a", one, 2),
            ("a", two, 3), ("a", one, 3), ("b", one, 4),
        ):  # fmt: skip
            await workers.pdfs.text(tenant, file, 9)
            assert processes.begun == begun
    finally:
        workers.close()
