// One message of the conversation: its text, reasoning, tool calls, files and actions.

import { copyFrom, element, iconButton } from "./dom.js";
import { MarkdownView } from "./markdown.js";
import { AnswerText } from "./tokens.js";
import { callsView } from "./tools.js";

const NAMES = { user: "You", assistant: "Answer", tool: "Tool result" };

// Token probabilities by message. They are large, so they are not stored.
const tokenTexts = new WeakMap(); // message -> AnswerText
const asTokens = new WeakSet(); // messages that show their tokens

export class MessageView {
  /** `actions` has the functions edit, again, continue, branch, select and results. */
  constructor(conversation, message, actions) {
    this.message = message;
    this._conversation = conversation;
    this._actions = actions;
    this._frame = 0;
    this.article = element("article", `turn ${message.role}`);
    this.article.setAttribute("aria-label", NAMES[message.role]);
    this.draw();
  }

  /** Show the message and its actions. */
  draw() {
    cancelAnimationFrame(this._frame);
    this._frame = 0;
    const { message } = this;
    this._text = null;
    this._reasoning = null;
    this.article.replaceChildren();
    if (message.role === "user") this.article.append(this._question());
    else if (message.role === "tool") this.article.append(this._result());
    else this.article.append(element("div", "answer"));
    if (message.role === "assistant") this._update();
    if (message.calls && !this.busy) this._showCalls();
    if (message.meta) this.article.append(element("p", "meta", message.meta));
    if (!this.busy) this.article.append(this._bar());
  }

  get busy() {
    return this.article.getAttribute("aria-busy") === "true";
  }

  set busy(value) {
    this.article.setAttribute("aria-busy", String(value));
    this.draw();
  }

  /** Show the message's new text before the next frame. */
  changed() {
    this._frame ||= requestAnimationFrame(() => {
      this._frame = 0;
      this._update();
    });
  }

  pushTokens(text, entries) {
    const { message } = this;
    if (!tokenTexts.has(message)) {
      if (!entries.length) return;
      // If the answer is continued, this is the text before the continuation.
      const before = message.content.slice(0, message.content.length - text.length);
      tokenTexts.set(message, new AnswerText(tokenBox(), before));
      asTokens.add(message);
    }
    tokenTexts.get(message).push(text, entries);
  }

  _question() {
    const bubble = element("div", "bubble");
    const files = (this.message.attachments ?? []).map(fileView);
    if (files.length) bubble.append(element("div", "files", ...files));
    if (this.message.content) bubble.append(element("div", "text", this.message.content));
    return bubble;
  }

  _result() {
    const title = element("summary", "", "Result of ", element("code", "", this.message.name ?? "a tool"));
    return element("details", "result", title, element("pre", "", this.message.content));
  }

  _update() {
    const { message } = this;
    const box = this.article.querySelector(".answer");
    if (!box) return; // being edited
    if (message.reasoning) this._think(box);
    const tokens = tokenTexts.get(message);
    if (tokens && asTokens.has(message)) {
      if (tokens.element.parentElement !== box) box.append(tokens.element);
      return;
    }
    if (!this._text) {
      this._text = new MarkdownView(element("div", "text markdown"));
      box.append(this._text.element);
    }
    this._text.update(message.content);
  }

  _think(box) {
    if (!this._reasoning) {
      this._reasoning = new MarkdownView(element("div", "markdown"));
      const details = element("details", "reasoning", element("summary", "", "Reasoning"), this._reasoning.element);
      box.prepend(details);
    }
    this._reasoning.update(this.message.reasoning);
  }

  _showCalls() {
    const open = !this._conversation.messages.some((each) => each.parent === this.message.id);
    const answer = open ? (results) => this._actions.results(this.message, results) : null;
    this.article.append(callsView(this.message, answer));
  }

  _bar() {
    const { message, _actions: actions } = this;
    const bar = element("div", "actions");
    const add = (name, label, act) => {
      const button = iconButton(name, label, act);
      bar.append(button);
      return button;
    };
    this._addSiblings(bar);
    if (message.content) add("copy", "Copy", (event) => copyFrom(event.currentTarget, message.content));
    if (message.role !== "tool" && !message.calls) add("edit", "Edit", () => this.edit());
    const last = this._conversation.leaf === message.id;
    if (message.role === "assistant") add("again", "Regenerate", () => actions.again(message));
    else if (last) add("again", "Answer", () => actions.answer());
    if (message.role === "assistant" && last && message.content && !message.calls) {
      add("continue", "Continue", () => actions.continue(message));
    }
    add("branch", "Branch from here", () => actions.branch(message));
    if (tokenTexts.has(message)) {
      const toggle = add("tokens", "Show tokens", () => {
        if (!asTokens.delete(message)) asTokens.add(message);
        this.draw();
      });
      toggle.setAttribute("aria-pressed", String(asTokens.has(message)));
    }
    return bar;
  }

  _addSiblings(bar) {
    const all = this._conversation.siblings(this.message);
    if (all.length < 2) return;
    const at = all.indexOf(this.message);
    const step = (name, label, to) => {
      const button = iconButton(name, label, () => this._actions.select(all[to]));
      button.disabled = to < 0 || to >= all.length;
      return button;
    };
    const count = element("span", "count", `${at + 1}/${all.length}`);
    bar.append(step("back", "Previous version", at - 1), count, step("forth", "Next version", at + 1));
  }

  /** Replace the text by a box. Saving adds a sibling of this message. */
  edit() {
    const { message } = this;
    const box = element("textarea");
    box.value = message.content;
    box.rows = Math.min(12, Math.max(3, message.content.split("\n").length + 1));
    box.setAttribute("aria-label", "Edited message");
    const save = element("button", "main", message.role === "user" ? "Send" : "Save");
    const cancel = element("button", "", "Cancel");
    save.type = cancel.type = "button";
    const keep = () => this._actions.edit(message, box.value);
    save.addEventListener("click", keep);
    cancel.addEventListener("click", () => this.draw());
    box.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        this.draw();
      } else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) keep();
    });
    this.article.replaceChildren(element("div", "editor", box, element("div", "row", cancel, save)));
    box.focus();
  }
}

function tokenBox() {
  const box = element("div", "text tokens");
  box.tabIndex = 0;
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", "Tokens of the answer");
  box.setAttribute("aria-describedby", "tip");
  return box;
}

function fileView({ name, text }) {
  const size = `${text.length.toLocaleString("en")} characters`;
  const title = element("summary", "", element("span", "file-name", name), element("span", "note", size));
  return element("details", "file", title, element("pre", "", text));
}
