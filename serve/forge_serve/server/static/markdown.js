// Markdown as elements. marked splits the text into tokens, and each token becomes an element of a fixed
// set. No text is parsed as HTML: markup in a message is shown as text, and images become links.

import { codeBlock } from "./code.js";
import { element } from "./dom.js";
import { formula } from "./math.js";
import { Marked } from "./vendor/marked/marked.js";

const SAFE_LINK = /^(https?:|mailto:)/i;
const MOST_DEPTH = 40; // deeper nesting is shown as its source
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", hellip: "…", mdash: "—",
  ndash: "–", copy: "©", reg: "®", trade: "™", times: "×", deg: "°", rarr: "→", larr: "←" };

// $$…$$ and \[…\] are displayed; $…$ and \(…\) are inline. A price, as in "$5 or $6", is no formula.
const DISPLAY = /^(?:\$\$([^$]+?)\$\$|\\\[([^]+?)\\\])/;
const INLINE = /^(?:\$(?![\s$])((?:\\.|[^$\\\n])*?[^\s\\$])\$(?![\d$])|\\\(([^\n]+?)\\\))/;

function mathRule(name, level, pattern, start, display) {
  return {
    name,
    level,
    start: (text) => {
      const at = text.search(start);
      return at < 0 ? undefined : at;
    },
    tokenizer(text) {
      const found = pattern.exec(text);
      if (!found) return undefined;
      return { type: "math", raw: found[0], text: (found[1] ?? found[2]).trim(), display };
    },
  };
}

const parser = new Marked({ gfm: true });
parser.use({
  extensions: [
    mathRule("displayMath", "block", DISPLAY, /(?<=^|\n)(?:\$\$|\\\[)/, true), // interrupts a paragraph
    mathRule("displayMathInText", "inline", DISPLAY, /\$\$|\\\[/, true),
    mathRule("inlineMath", "inline", INLINE, /\$|\\\(/, false),
  ],
});

function tokensOf(text) {
  try {
    return parser.lexer(text);
  } catch {
    return [{ type: "text", raw: text, text }]; // nesting too deep for the parser's stack
  }
}

/** Markdown text in an element. While the text grows, blocks that did not change keep their elements. */
export class MarkdownView {
  constructor(element) {
    this.element = element;
    this._blocks = []; // [source, node]
  }

  update(text) {
    const tokens = tokensOf(text).filter((token) => token.type !== "space" && token.type !== "def");
    let same = 0;
    while (same < this._blocks.length && this._blocks[same][0] === tokens[same]?.raw) same += 1;
    for (const [, node] of this._blocks.splice(same)) node.remove();
    for (const token of tokens.slice(same)) {
      const node = block(token, 0);
      this._blocks.push([token.raw, node]);
      this.element.append(node);
    }
  }
}

const source = (token) => element("p", "source", token.raw);

function block(token, depth) {
  if (depth > MOST_DEPTH) return source(token);
  switch (token.type) {
    case "heading":
      return element(`h${Math.min(token.depth + 1, 6)}`, `heading-${token.depth}`, ...inlines(token.tokens, depth));
    case "paragraph":
      return element("p", "", ...inlines(token.tokens, depth));
    case "text": // the text of a list item
      return token.tokens ? element("span", "", ...inlines(token.tokens, depth)) : element("p", "source", token.text);
    case "blockquote":
      return element("blockquote", "", ...blocks(token.tokens, depth));
    case "list":
      return list(token, depth);
    case "code":
      return codeBlock(token.text, (token.lang ?? "").trim().split(/\s/)[0].toLowerCase());
    case "table":
      return table(token, depth);
    case "hr":
      return element("hr");
    case "math":
      return formula(token.text, true);
    default:
      return source(token); // HTML
  }
}

function blocks(tokens, depth) {
  return tokens.filter((token) => token.type !== "space" && token.type !== "def").map((token) => block(token, depth + 1));
}

function list(token, depth) {
  const items = token.items.map((item) => element("li", item.task ? "task" : "", ...itemNodes(item, depth)));
  const made = element(token.ordered ? "ol" : "ul", "", ...items);
  if (token.ordered && Number.isSafeInteger(token.start)) made.start = token.start;
  return made;
}

/** Return the blocks of an item, where a check box may precede a block. */
function itemNodes(item, depth) {
  return item.tokens
    .filter((token) => token.type !== "space" && token.type !== "def")
    .map((token) => (token.type === "checkbox" ? inline(token, depth) : block(token, depth + 1)));
}

function table(token, depth) {
  const cell = (name) => (from) => {
    const made = element(name, "", ...inlines(from.tokens, depth));
    if (from.align) made.classList.add(from.align);
    if (name === "th") made.scope = "col";
    return made;
  };
  const head = element("thead", "", element("tr", "", ...token.header.map(cell("th"))));
  const rows = token.rows.map((row) => element("tr", "", ...row.map(cell("td"))));
  const box = element("div", "table-box", element("table", "", head, element("tbody", "", ...rows)));
  box.tabIndex = 0; // wide tables scroll
  box.setAttribute("role", "region");
  box.setAttribute("aria-label", "Table");
  return box;
}

function inlines(tokens, depth) {
  return (tokens ?? []).map((token) => inline(token, depth + 1));
}

const INLINE_ELEMENTS = { strong: "strong", em: "em", del: "del" };

function inline(token, depth) {
  if (depth > MOST_DEPTH) return token.raw;
  switch (token.type) {
    case "strong":
    case "em":
    case "del":
      return element(INLINE_ELEMENTS[token.type], "", ...inlines(token.tokens, depth));
    case "codespan":
      return element("code", "", token.text);
    case "br":
      return element("br");
    case "link":
      return link(token.href, inlines(token.tokens, depth), token.raw);
    case "image":
      return link(token.href, [`image: ${token.text || token.href}`], token.raw);
    case "math":
      return formula(token.text, token.display);
    case "checkbox":
      return element("span", "box", token.checked ? "☑ " : "☐ ");
    case "escape":
      return token.text;
    case "text":
      return token.tokens ? element("span", "", ...inlines(token.tokens, depth)) : decoded(token.text);
    default:
      return token.raw; // HTML
  }
}

function link(href, children, raw) {
  if (!SAFE_LINK.test(href)) return raw;
  const made = element("a", "", ...children);
  made.href = href;
  made.title = href;
  made.target = "_blank";
  made.rel = "noopener noreferrer nofollow";
  return made;
}

/** Replace character references, such as "&lt;" and "&#8211;". */
function decoded(text) {
  return text.replace(/&(?:#(\d{1,7})|#[xX]([\da-fA-F]{1,6})|(\w+));/g, (whole, decimal, hex, name) => {
    if (name) return Object.hasOwn(ENTITIES, name) ? ENTITIES[name] : whole;
    const point = decimal ? Number(decimal) : parseInt(hex, 16);
    return point > 0 && point <= 0x10ffff ? String.fromCodePoint(point) : "\ufffd";
  });
}
