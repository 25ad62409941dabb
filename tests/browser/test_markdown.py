"""Markdown in answers: elements, code, formulas."""

from __future__ import annotations

from conftest import Visit
from page_actions import answer_with, events
from playwright.sync_api import Locator, expect

TABLE = "| a | b |\n|:--|--:|\n| 1 | *2* |\n"
CODE = '```python\ndef f(x):\n    return "<b>"  # note\n```'


def shown(visit: Visit, text: str) -> Locator:
    """Return the formatted answer with this text."""
    answer_with(visit.page, events({"content": text}))
    visit.ask("Hello")
    answer = visit.page.locator(".turn.assistant")
    answer.locator(".meta").wait_for()
    return answer.locator(".markdown")


def test_headings_lists_quotes_and_tables_become_elements(server, visit):
    text = f"# One\n\n## Two\n\n3. c\n4. d\n   - e\n   - [x] f\n\n> **g** ~~h~~\n\n{TABLE}\n---"
    answer = shown(visit(server), text)
    assert answer.locator("h2").inner_text() == "One"  # h1 is the page's
    assert answer.locator("h3").inner_text() == "Two"
    assert answer.locator("ol").first.get_attribute("start") == "3"
    assert answer.locator("ol ul li").all_inner_texts() == ["e", "☑ f"]
    assert answer.locator("blockquote strong").inner_text() == "g"
    assert answer.locator("blockquote del").inner_text() == "h"
    assert answer.locator("th, td").all_inner_texts() == ["a", "b", "1", "2"]
    assert answer.locator("td").nth(1).evaluate("e => getComputedStyle(e).textAlign") == "right"
    assert answer.locator("hr").count() == 1


def test_code_is_highlighted_and_copied(server, visit):
    visit = visit(server, permissions=["clipboard-read", "clipboard-write"])
    answer = shown(visit, f"Use `x`:\n\n{CODE}\n\n```\nplain\n```\n\n```nosuchlanguage\ny\n```")
    block = answer.locator(".code-block").first
    assert block.locator("code").inner_text() == 'def f(x):\n    return "<b>"  # note'
    assert block.locator(".hljs-keyword").all_inner_texts() == ["def", "return"]
    assert block.locator(".hljs-string").inner_text() == '"<b>"'
    colors = [
        block.locator(f".hljs-{kind}").first.evaluate("e => getComputedStyle(e).color")
        for kind in ("keyword", "string", "comment")
    ]
    assert len(set(colors)) == 3
    block.get_by_role("button", name="Copy code").click()
    expect(block.locator("[data-copied]")).to_be_visible()
    copied = visit.page.evaluate("navigator.clipboard.readText()")
    assert copied == 'def f(x):\n    return "<b>"  # note'
    assert answer.locator(".code-block").count() == 3


def test_formulas_are_typeset_and_prices_are_not(server, visit):
    visit = visit(server)
    text = r"A $x^2$ and \(y\), for $5 or $6." + "\n\n$$\\frac{a}{b} \\vec{v} \\fbox{c}$$\n\n"
    answer = shown(visit, text + r"\[z\]" + "\n\n$\\nosuchcommand$ end")
    expect(answer.locator(".katex")).to_have_count(4)
    assert answer.locator("div.formula .katex-display").count() == 2
    assert "for $5 or $6." in answer.inner_text()
    assert answer.locator(".formula.failed").inner_text() == r"\nosuchcommand"
    fonts = [url for url in visit.requested if url.endswith(".woff2")]
    assert fonts and len(fonts) < 8  # only those of the formulas
    arrow = answer.locator(".katex-accent svg").first  # the arrow of \vec; the page sets its style
    assert arrow.evaluate("e => e.style.width")


def test_katex_is_loaded_only_for_formulas(server, visit):
    visit = visit(server)
    shown(visit, "No formula here.")
    assert not [url for url in visit.requested if "katex" in url]


def test_only_web_links_are_links_and_images_are_not_loaded(server, visit):
    web = "[a](https://example.org/b) <https://c.example> ![a picture](https://example.org/x.png)"
    other = "[a](javascript:alert(1)) [b](data:text/html,c) [d](relative) [e](file:///etc)"
    answer = shown(visit(server), f"{web}\n\n{other}")
    anchors = answer.locator("a")
    assert anchors.all_inner_texts() == ["a", "https://c.example", "image: a picture"]
    assert answer.locator("img").count() == 0
    for anchor in anchors.all():
        assert anchor.get_attribute("rel") == "noopener noreferrer nofollow"
        assert anchor.get_attribute("target") == "_blank"


def test_character_references_are_decoded_and_html_is_shown(server, visit):
    answer = shown(visit(server), "a &lt;b&gt; &amp;amp; &#8211; &#x41; &nosuch; <i>c</i>")
    assert answer.inner_text() == "a <b> &amp; – A &nosuch; <i>c</i>"
    assert answer.locator("i").count() == 0


def test_pathological_nesting_is_shown(server, visit):
    lengths = visit(server).page.evaluate("""async () => {
      const { MarkdownView } = await import("./static/markdown.js");
      const texts = ["> ".repeat(3000) + "x", "- ".repeat(3000) + "x", "*a ".repeat(5000),
        "[".repeat(5000), "`".repeat(5001) + "x", "| ".repeat(5000), "$".repeat(5000)];
      return texts.map((text) => {
        const view = new MarkdownView(document.createElement("div"));
        view.update(text);
        return view.element.textContent.length;
      });
    }""")
    assert all(lengths)


def test_unchanged_blocks_keep_their_elements_while_text_streams(server, visit):
    kept = visit(server).page.evaluate("""async () => {
      const { MarkdownView } = await import("./static/markdown.js");
      const view = new MarkdownView(document.createElement("div"));
      view.update("# A\\n\\nfirst\\n\\nsec");
      const before = [...view.element.children];
      view.update("# A\\n\\nfirst\\n\\nsecond **bold**\\n\\n- c");
      const after = [...view.element.children];
      return [after.length, before.map((node, i) => node === after[i]), view.element.textContent];
    }""")
    assert kept == [4, [True, True, False], "Afirstsecond boldc"]
