"""Hostile text in a real browser: no script runs, no dialog opens, no request is sent.

The payloads are vectors in contexts. They are tested without the Content-Security-Policy, so that
the page's code alone must resist. Another test checks that the policy stops injected scripts.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pytest
from conftest import Visit
from page_actions import answer_with, entry, events, show_panel
from playwright.sync_api import Page, Route, expect

VECTORS = (
    "<script>hit()</script>",
    "<script src=/static/evil.js></script>",
    "</script><script>hit()</script>",
    "<img src=x onerror=hit()>",
    "<img src=/evil.png>",
    "<img/src='x'/onerror=hit()>",
    "<IMG SRC=x OnErRoR=hit()>",
    "<image src=x onerror=hit()>",
    "<svg onload=hit()>",
    "<svg><script>hit()</script></svg>",
    "<svg><animate onbegin=hit() attributeName=x dur=1s>",
    "<svg><a xlink:href='javascript:hit()'><text y=20>x</text></a></svg>",
    "<svg><use href='data:image/svg+xml,<svg id=x onload=hit()>#x'></use></svg>",
    "<math><mtext><mglyph><style><img src=x onerror=hit()></style></mglyph></mtext></math>",
    "<math href='javascript:hit()'>x</math>",
    "<body onload=hit()>",
    "<iframe srcdoc='<script>parent.hit()</script>'></iframe>",
    "<iframe src='javascript:parent.hit()'></iframe>",
    "<object data='javascript:hit()'></object>",
    "<embed src='javascript:hit()'>",
    "<video><source onerror=hit()></video>",
    "<audio src=x onerror=hit()>",
    "<details open ontoggle=hit()>",
    "<input autofocus onfocus=hit()>",
    "<select autofocus onfocus=hit()>",
    "<textarea autofocus onfocus=hit()>",
    "<marquee onstart=hit()>",
    "<style>@import '/evil.css';</style>",
    "<style>*{background:url(/evil.png)}</style>",
    "<link rel=stylesheet href=/evil.css>",
    "<link rel=prefetch href=/evil>",
    "<meta http-equiv=refresh content='0;url=/evil'>",
    "<base href=//evil.example/>",
    "<form action='javascript:hit()'><button autofocus>x</button></form>",
    "<a href='javascript:hit()'>x</a>",
    "<a href='data:text/html,<script>hit()</script>'>x</a>",
    "<template><script>hit()</script></template>",
    "<noscript><p title='</noscript><img src=x onerror=hit()>'>",
    "<!--><img src=x onerror=hit()>-->",
    "<![CDATA[><img src=x onerror=hit()>]]>",
    "'\"><img src=x onerror=hit()>",
    "\"onmouseover=\"hit()",
    "x' onfocus='hit()' autofocus='",
    "&lt;img src=x onerror=hit()&gt;",
    "&#60;script&#62;hit()&#60;/script&#62;",
    "javascript:hit()",
    "JaVaScRiPt:hit()",
    "java\tscript:hit()",
    "javascript&colon;hit()",
    "&#106;avascript:hit()",
    "vbscript:hit()",
    "data:text/html,<script>hit()</script>",
    "//evil.example/x.png",
    "${hit()}",
    "{{constructor.constructor('hit()')()}}",
    "__proto__",
    "\\href{javascript:hit()}{x}",
    "\\includegraphics{/evil.png}",
    "\\htmlData{onclick=hit()}{x}",
    "\\unicode{<img src=x onerror=hit()>}",
    "\u202e<img src=x onerror=hit()>\u0000",
)  # fmt: skip

MARKDOWN = {
    "plain": "{}",
    "heading": "# {}",
    "list": "- {}\n- [ ] {}",
    "quote": "> {}",
    "table": "| a | b |\n|--|--|\n| {} | {} |",
    "code": "`{}`",
    "fence": "```html\n{}\n```",
    "language": "```{}\nx\n```",
    "link": "[x]({})",
    "link text": "[{}](https://example.org)",
    "link title": '[x](https://example.org "{}")',
    "bracketed link": "[x](<{}>)",
    "autolink": "<{}>",
    "reference": "[x][r]\n\n[r]: {}",
    "image": "![{}]({})",
    "math": "$x {}$ and $$ {} $$",
    "emphasis": "**{}** *{}* ~~{}~~",
}
FIELDS: dict[str, Callable[[str], dict[str, Any]]] = {
    "question": lambda text: {"role": "user", "content": text},
    "file name": lambda text: {
        "role": "user", "content": "", "attachments": [{"name": text, "text": text}]
    },
    "reasoning": lambda text: {"role": "assistant", "content": "", "reasoning": text},
    "figures": lambda text: {"role": "assistant", "content": "", "meta": text},
    "tool call": lambda text: {
        "role": "assistant", "content": "",
        "calls": [{"id": text, "name": text, "arguments": text}],
    },
    "tool result": lambda text: {"role": "tool", "content": text, "name": text, "call": text},
}  # fmt: skip


@dataclass(frozen=True)
class Payload:
    """A hostile text as a message of an imported file."""

    context: str
    vector: str

    def message(self) -> dict[str, Any]:
        if self.context in MARKDOWN:
            text = MARKDOWN[self.context].replace("{}", self.vector)
            return {"role": "assistant", "content": text}
        return FIELDS[self.context](self.vector)


PAYLOADS = [
    Payload(context, vector) for context, vector in itertools.product((*MARKDOWN, *FIELDS), VECTORS)
]
WATCH = "window.hits = []; window.hit = () => hits.push(new Error().stack);"
FORBIDDEN = (
    "script, img, iframe, object, embed, video, audio, form, base, meta, style, link, template, "
    "svg:not(.icon, .katex svg, .chart svg), input:not(#state-file), "
    "select:not(#timeline-window), math:not(.katex math), marquee, image"
)


@pytest.fixture
def open_page(server, visit) -> Iterator[Visit]:
    """Open the page without its policy; at the end, require that nothing happened."""
    opened = visit(server, bypass_csp=True)
    page = opened.page
    dialogs: list[str] = []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    page.add_init_script(WATCH)
    page.reload()
    yield opened
    page.wait_for_timeout(300)  # time for handlers of errors
    assert page.evaluate("hits") == [] and dialogs == []
    assert not foreign(opened)
    assert len(page.context.pages) == 1 and page.url == opened.origin + "/"


def foreign(visit: Visit) -> list[str]:
    """Return the requests that the page does not send by itself."""
    own = ("/static/", "/v1/models", "/v1/chat/completions", "/engine_state")
    paths = [urlsplit(url).path for url in visit.requested if not url.startswith("blob:")]
    return [path for path in paths if (path != "/" and not path.startswith(own)) or "evil" in path]


def inspect(page: Page, root: str = "#log") -> None:
    """Open everything in an element, use it with pointer and focus, and check its elements."""
    wrong = page.locator(root).evaluate(
        """(root, forbidden) => {
          for (const each of root.querySelectorAll("details")) each.open = true;
          const wrong = [...root.querySelectorAll(forbidden)].map((each) => each.outerHTML);
          for (const each of root.querySelectorAll("*")) {
            for (const kind of ["pointerover", "mouseover", "focus"]) {
              each.dispatchEvent(new Event(kind, { bubbles: true }));
            }
            const named = [...each.attributes].filter(({ name }) => /^on|^style$/i.test(name));
            if (named.some(({ name }) => /^on/i.test(name))) wrong.push(each.outerHTML);
            const web = /^(https?|mailto):/.test(each.href);
            if (typeof each.href === "string" && !web) wrong.push(each.outerHTML);
          }
          return wrong;
        }""",
        FORBIDDEN,
    )
    assert not wrong, wrong[:3]


def chats_file(conversations: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    made = []
    for title, messages in conversations.items():
        parents = [None, *map(str, range(len(messages) - 1))]
        linked = [
            {"id": str(i), "parent": parents[i], **each} for i, each in enumerate(messages)
        ]  # fmt: skip
        made.append({"title": title, "messages": linked})
    file = {"format": "forge-jax-chats", "version": 1, "conversations": made}
    return {
        "name": "chats.json", "mimeType": "application/json",
        "buffer": json.dumps(file).encode(),
    }  # fmt: skip


def test_there_are_many_payloads():
    assert len(set(PAYLOADS)) == len(PAYLOADS) > 1000


def test_payloads_in_messages_do_nothing(open_page):
    page = open_page.page
    contexts = {
        context: [each.message() for each in group]
        for context, group in itertools.groupby(PAYLOADS, key=lambda each: each.context)
    }
    page.locator("#import-file").set_input_files(chats_file(contexts))
    expect(page.locator("#chat-list .open")).to_have_count(len(contexts))
    for context, messages in contexts.items():
        page.locator("#chat-list").get_by_role("button", name=context, exact=True).click()
        expect(page.locator(".turn")).to_have_count(len(messages))
        inspect(page)
    page.locator("#chat-list").get_by_role("button", name="math", exact=True).click()
    page.wait_for_function("globalThis.katex !== undefined")
    page.wait_for_timeout(200)
    inspect(page)
    page.locator("#chat-list").get_by_role("button", name="plain", exact=True).click()
    texts = page.locator(".turn.assistant .text")
    assert texts.first.inner_text() == VECTORS[0]  # shown, not removed
    assert texts.nth(3).inner_text() == VECTORS[3]


def test_payloads_in_chat_names_do_nothing(open_page):
    page = open_page.page
    message = {"role": "user", "content": "x"}
    page.locator("#import-file").set_input_files(chats_file({each: [message] for each in VECTORS}))
    expect(page.locator("#chat-list .open")).to_have_count(len(VECTORS))
    inspect(page, "#chats #chat-list")
    page.locator(".chat-row").first.hover()
    page.locator(".chat-row").first.locator("[title^=Rename]").click()
    page.get_by_label("Name of the chat").fill(VECTORS[3])
    page.keyboard.press("Enter")
    page.locator(".chat-row").first.hover()
    page.locator(".chat-row").first.locator("[title^=Delete]").click()
    inspect(page, "#delete-name")
    page.keyboard.press("Escape")


def test_payloads_in_file_names_do_nothing(open_page):
    page = open_page.page
    names = [each.replace("/", "\u2215").replace("\0", "") for each in VECTORS]
    for content in (b"x", b"%PDF-1.7"):
        files = [{"name": each, "mimeType": "text/plain", "buffer": content} for each in names]
        page.locator("#files").set_input_files(files)
    expect(page.locator("#attachments li")).to_have_count(2 * len(names))
    inspect(page, "#attachments")
    open_page.refusals = 1
    param = f"messages[0].content[{len(names)}].file.file_data"
    error = {"message": f"{param}: bad {VECTORS[3]}", "param": param}
    answer_with(page, json.dumps({"error": error}), 400)
    open_page.ask("x")
    expect(page.locator(".error")).to_contain_text("onerror")
    inspect(page)
    page.unroute("**/v1/chat/completions")
    answer_with(page, events({"content": "x"}))
    page.keyboard.press("Enter")
    open_page.answered()
    expect(page.locator(".file")).to_have_count(2 * len(names))
    inspect(page)
    broken = {"name": names[3], "mimeType": "text/plain", "buffer": b"\xff"}
    page.locator("#files").set_input_files(broken)
    expect(page.locator("#notice")).to_contain_text("onerror")
    page.locator("#import-file").set_input_files(broken)
    expect(page.locator("#notice")).to_contain_text("not imported")
    inspect(page, "#notice")


def test_payloads_in_streamed_answers_do_nothing(open_page):
    page = open_page.page
    show_panel(page, "settings")
    page.get_by_label("Show probabilities").check()
    everything = "\n\n".join(VECTORS)
    call = {"index": 0, "id": "c", "function": {"name": everything, "arguments": everything}}
    deltas = [{"reasoning": everything}, *({"content": each + "\n\n"} for each in VECTORS)]
    answer_with(page, events(*deltas, {"tool_calls": [call]}))
    page.route("**/engine_state*", lambda route: route.fulfill(json=evil_state(route)))
    show_panel(page, "engine")
    open_page.ask(everything)
    open_page.answered()
    inspect(page)
    expect(page.locator("#sequences")).to_contain_text("<script>")
    page.locator("#requests").press("ArrowLeft")
    expect(page.locator("#request-span")).to_contain_text("<script>")
    inspect(page, "#engine")

    page.unroute("**/v1/chat/completions")
    page.locator("#new-chat").click()
    chunk = json.loads(events({"content": VECTORS[3]}).split("\n")[0].removeprefix("data: "))
    chunk["choices"][0]["logprobs"] = {"content": [entry(VECTORS[3])]}
    answer_with(page, f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n")
    open_page.ask("again")
    assert open_page.answered() == VECTORS[3]
    page.locator(".token").hover(position={"x": 2, "y": 2})
    expect(page.get_by_role("tooltip")).to_contain_text("onerror")
    inspect(page, "#tip")

    page.unroute("**/v1/chat/completions")
    open_page.refusals = 1
    answer_with(page, json.dumps({"error": {"message": everything, "param": everything}}), 400)
    open_page.ask("and again")
    expect(page.locator(".error")).to_contain_text("<script>")
    inspect(page)


def evil_state(route: Route) -> dict[str, Any]:
    state = route.fetch().json()
    seq = dict.fromkeys(
        ("prompt", "sample", "prompt_tokens", "output_tokens", "computed_tokens", "cached_tokens",
         "blocks", "shared_blocks", "preemptions", "draft_tokens", "accepted_tokens"), 0,
    )  # fmt: skip
    span = ["decode", 0, 1, 1, 1, 0, 0]
    seq = {**seq, "status": "running", "spans": [span]}
    now_s = state["time_s"]
    state["sequences"] = [
        {**seq, "request_id": each, "arrival_s": now_s - 2 + i / 100}
        for i, each in enumerate(VECTORS)
    ]
    state["blocks"]["runs"] = [[state["blocks"]["num_blocks"], 0]]
    return state


def test_suite_detects_text_that_is_parsed_as_html(server, visit):
    opened = visit(server, bypass_csp=True)
    page = opened.page
    page.evaluate(WATCH)
    html = "".join(VECTORS[:10])
    page.evaluate("html => document.getElementById('welcome').innerHTML = html", html)
    with pytest.raises(AssertionError, match="onerror"):
        inspect(page)
    page.evaluate("document.getElementById('welcome').innerHTML = '<img src=/evil onerror=hit()>'")
    page.wait_for_function("hits.length > 0")
    assert "/evil" in foreign(opened)
    opened.refusals = 100
    opened.wrong.clear()


def test_content_security_policy_blocks_injected_scripts(server, visit):
    visit = visit(server)
    page = visit.page
    page.evaluate("window.hacked = 7")
    assert page.evaluate("window.hacked") == 7
    refused = page.evaluate("""() => {
      const log = document.getElementById("log");
      const script = document.createElement("script");
      const attempts = [
        () => (log.innerHTML = "<img src=x onerror='window.hacked = 8'>"),
        () => log.setAttribute("onclick", "window.hacked = 9"),
        () => (script.text = "window.hacked = 10"),
        () => setTimeout("window.hacked = 11"),
      ];
      return attempts.map((attempt) => {
        try {
          return String(attempt());
        } catch (error) {
          return String(error);
        }
      });
    }""")
    assert len(refused) == 4 and all("Trusted" in error for error in refused), refused
    assert page.evaluate("window.hacked") == 7
    assert [text for text in visit.wrong if "Content Security Policy" in text or "Trusted" in text]
    visit.wrong.clear()
