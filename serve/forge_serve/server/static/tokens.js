// The text of an answer, token by token, and the tooltip with each token's probability.
// The model's text is inserted as text nodes, never as HTML.

import { element } from "./dom.js";

const tip = document.getElementById("tip");
const decoder = new TextDecoder();

export class AnswerText {
  /** `box` shows the text, after a part without tokens. Tokens are added from entries of `logprobs.content`. */
  constructor(box, before = "") {
    this.element = box;
    this.text = before;
    this.entries = [];
    this.spans = [];
    this.active = -1;
    this._shown = before.length; // number of characters that are in spans or before them
    this._bytes = [];
    this._held = []; // entries whose text has not arrived
    this._tail = document.createTextNode("");
    box.append(before, this._tail);
    texts.set(box, this);
  }

  push(text, entries) {
    this.text += text;
    this._held.push(...entries);
    this._align();
    this._tail.data = this.text.slice(this._shown);
  }

  /** Match tokens to the text. Tokens without text (an EOS token, a tag that the server parsed) are
   *  skipped. Tokens that form one character together share its span. */
  _align() {
    while (this._held.length) {
      const rest = this.text.slice(this._shown);
      if (!rest) return;
      const entry = this._held[0];
      this._bytes.push(...(entry.bytes ?? []));
      const token = entry.bytes ? decoder.decode(Uint8Array.from(this._bytes)) : entry.token;
      if (token.endsWith("\ufffd") && !rest.startsWith(token) && this._held.length > 1) {
        this._held.shift(); // part of a character, which the next token completes
        continue;
      }
      let found = token;
      if (!rest.startsWith(found)) found = token.trimStart(); // the server removes the leading space of an answer
      if (found && found !== rest && found.startsWith(rest)) {
        this._bytes.length -= entry.bytes?.length ?? 0;
        return; // the rest of the token's text has not arrived
      }
      this._held.shift();
      this._bytes = [];
      if (found && rest.startsWith(found)) this._place(found, entry);
    }
  }

  _place(text, entry) {
    const span = document.createElement("span");
    span.textContent = text;
    span.className = `token likely-${likeliness(entry.logprob)}`;
    span.dataset.index = this.spans.length;
    this._tail.before(span);
    this.spans.push(span);
    this.entries.push(entry);
    this._shown += text.length;
  }

  show(index) {
    this.spans[this.active]?.classList.remove("active");
    this.active = index;
    if (index < 0) return hideTip();
    const span = this.spans[index];
    span.classList.add("active");
    fillTip(this.entries[index]);
    placeTip(span);
  }
}

const texts = new WeakMap(); // element -> AnswerText

const likeliness = (logprob) => Math.min(4, Math.floor(Math.exp(logprob) * 5)); // 0 to 4
const percent = (logprob) => {
  const part = 100 * Math.exp(logprob);
  return `${part.toFixed(part >= 99.95 || part < 0.05 ? 0 : 1).replace(/^0$/, "<0.1")} %`;
};
const visible = (token) =>
  token === "" ? "∅" : token.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥");

function fillTip(entry) {
  const head = element("p", "tip-head");
  head.append(element("code", "", visible(entry.token)), element("b", "", percent(entry.logprob)));
  const list = element("ol");
  for (const other of entry.top_logprobs ?? []) {
    const item = element("li", other.token === entry.token ? "chosen" : "");
    const bar = element("i", "bar");
    bar.style.width = `${100 * Math.exp(other.logprob)}%`;
    item.append(bar, element("code", "", visible(other.token)), element("span", "", percent(other.logprob)));
    list.append(item);
  }
  tip.replaceChildren(head, ...(list.children.length ? [list] : []));
}

function placeTip(span) {
  (span.closest("dialog") ?? document.body).append(tip); // a modal dialog covers the rest of the page
  tip.hidden = false;
  const at = span.getClientRects()[0] ?? span.getBoundingClientRect();
  const { width, height } = tip.getBoundingClientRect();
  const left = Math.max(8, Math.min(at.left, innerWidth - width - 8));
  const below = at.bottom + 6;
  tip.style.left = `${left}px`;
  tip.style.top = `${below + height > innerHeight - 8 ? Math.max(8, at.top - height - 6) : below}px`;
}

function hideTip() {
  tip.hidden = true;
}

let shownBy = null; // the AnswerText whose token the tooltip describes

function show(text, index) {
  if (shownBy && shownBy !== text) shownBy.show(-1);
  shownBy = index < 0 ? null : text;
  text.show(index);
}

export function beginTips(log) {
  const textOf = (node) => texts.get(node.closest?.(".tokens"));
  const over = (event) => {
    const span = event.target.closest?.(".token");
    if (span) show(textOf(span), Number(span.dataset.index));
    else if (shownBy && document.activeElement !== shownBy.element) show(shownBy, -1);
  };
  log.addEventListener("pointerover", over);
  log.addEventListener("pointerdown", over); // touch screens cannot hover
  log.addEventListener("pointerleave", () => shownBy && show(shownBy, -1));
  log.addEventListener("scroll", () => shownBy && show(shownBy, -1), { passive: true });
  log.addEventListener("focusout", () => shownBy && show(shownBy, -1));
  log.addEventListener("keydown", (event) => {
    const text = textOf(event.target);
    if (!text || !text.spans.length) return;
    const last = text.spans.length - 1;
    const to = {
      ArrowRight: Math.min(text.active + 1, last),
      ArrowLeft: text.active < 0 ? last : Math.max(text.active - 1, 0),
      Home: 0,
      End: last,
      Escape: -1,
    }[event.key];
    if (to === undefined || (event.key === "Escape" && text.active < 0)) return;
    event.preventDefault();
    event.stopPropagation();
    if (to >= 0) text.spans[to].scrollIntoView({ block: "nearest" });
    show(text, to);
  });
}
