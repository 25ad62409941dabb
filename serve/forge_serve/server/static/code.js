// Blocks of code: highlighted, with a copy button.

import { copyFrom, element, iconButton } from "./dom.js";
import highlighter from "./vendor/highlight/highlight.js";

const MOST_CHARS = 50_000; // longer code is shown without colors

export function codeBlock(code, language) {
  const known = highlighter.getLanguage(language) !== undefined && code.length <= MOST_CHARS;
  const shown = element("code", "", ...(known ? colored(code, language) : [code]));
  const pre = element("pre", "", shown);
  pre.tabIndex = 0; // scrolls with the arrow keys
  const copy = iconButton("copy", "Copy code", () => copyFrom(copy, code));
  const bar = element("div", "code-bar", element("span", "", language || "text"), copy);
  return element("figure", "code-block", bar, pre);
}

/** Return nodes for the highlighter's tree of scopes, which avoids parsing its HTML. */
function colored(code, language) {
  const { _emitter: emitter } = highlighter.highlight(code, { language, ignoreIllegals: true });
  return emitter.rootNode.children.map(scoped);
}

function scoped(node) {
  if (typeof node === "string") return node;
  const span = element("span", "", ...node.children.map(scoped));
  for (const part of node.scope?.split(".") ?? []) span.classList.add(`hljs-${part}`);
  return span;
}
