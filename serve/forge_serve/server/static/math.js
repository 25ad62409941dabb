// Formulas, typeset by KaTeX, which is loaded with the first formula.

import { element } from "./dom.js";

const OPTIONS = { throwOnError: true, trust: false, strict: "ignore", maxSize: 20, maxExpand: 500 };
const MOST_CHARS = 5_000; // a longer formula is shown as its source

let loading = null;

/** Return an element that shows the source until KaTeX is loaded, and if it cannot be typeset. */
export function formula(source, display) {
  const shown = element(display ? "div" : "span", "formula", element("code", "", source));
  if (display) shown.tabIndex = 0; // wide formulas scroll
  if (source.length <= MOST_CHARS) {
    if (globalThis.katex) typeset(shown, source, display);
    else load().then(() => typeset(shown, source, display), () => {});
  }
  return shown;
}

function load() {
  loading ??= Promise.all([style("static/vendor/katex/katex.css"), import("./vendor/katex/katex.js")]);
  return loading;
}

function style(href) {
  const link = element("link");
  link.rel = "stylesheet";
  link.href = href;
  document.head.append(link);
  return new Promise((resolve, reject) => {
    link.addEventListener("load", resolve);
    link.addEventListener("error", reject);
  });
}

function typeset(shown, source, displayMode) {
  try {
    const tree = globalThis.katex.__renderToDomTree(source, { ...OPTIONS, displayMode });
    setStylesAside(tree);
    const node = tree.toNode();
    for (const each of node.querySelectorAll("[data-style]")) {
      each.style.cssText = each.dataset.style;
      each.removeAttribute("data-style");
    }
    shown.replaceChildren(node);
  } catch {
    shown.classList.add("failed"); // invalid TeX: the source stays
  }
}

/** Rename `style` attributes of KaTeX's tree. The content security policy blocks these attributes, but
 *  not styles that a script sets. */
function setStylesAside(node) {
  if (node.attributes?.style) {
    node.attributes["data-style"] = node.attributes.style;
    delete node.attributes.style;
  }
  for (const child of node.children ?? []) setStylesAside(child);
}
