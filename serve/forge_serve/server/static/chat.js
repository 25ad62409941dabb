// The conversation. One request runs at a time; it is streamed, and aborted if the user stops it.

import { events, request } from "./api.js";
import { fields } from "./settings.js";
import { AnswerText } from "./tokens.js";

const by = (id) => document.getElementById(id);
const log = by("log");
const prompt = by("prompt");

let conversation = []; // messages sent to the model; a new chat is a new array
let running = null; // AbortController of the current answer

const say = (name, detail) => document.dispatchEvent(new CustomEvent(name, { detail }));

function turn(role, name) {
  by("welcome").hidden = true;
  const article = document.createElement("article");
  article.className = `turn ${role}`;
  article.setAttribute("aria-label", name);
  const text = document.createElement("div");
  text.className = "text";
  article.append(text);
  log.append(article);
  return { article, text };
}

function line(article, className, text) {
  const made = document.createElement("p");
  made.className = className;
  made.textContent = text;
  article.append(made);
  return made;
}

const atEnd = () => log.scrollHeight - log.scrollTop - log.clientHeight < 48;
const toEnd = () => (log.scrollTop = log.scrollHeight);

async function send() {
  const content = prompt.value;
  if (running || !content.trim()) return;
  const asked = fields();
  if (!asked) return;
  const question = turn("user", "You");
  question.text.textContent = content;
  const system = by("system").value;
  const told = conversation;
  const messages = [...told, { role: "user", content }];
  if (system.trim()) messages.unshift({ role: "system", content: system });
  prompt.value = "";
  grow();
  const answer = new Answer();
  setRunning(new AbortController());
  toEnd();
  try {
    const model = by("model").value;
    const body = { model, messages, stream: true, stream_options: { include_usage: true }, ...asked };
    const response = await request("v1/chat/completions", { body, signal: running.signal });
    for await (const event of events(response)) {
      const follow = atEnd();
      answer.take(event);
      if (follow) toEnd();
    }
    answer.end();
  } catch (error) {
    if (error.name === "AbortError") answer.end("stopped");
    else {
      answer.fail(error);
      if (error.status === 401) say("needs-key", error.message);
    }
  }
  if (answer.failed && !answer.text.text) {
    question.article.classList.add("failed"); // not part of the conversation
    if (!prompt.value) prompt.value = content;
    grow();
  } else {
    told.push({ role: "user", content }, { role: "assistant", content: answer.text.text });
  }
  setRunning(null);
  toEnd();
}

class Answer {
  constructor() {
    const { article, text } = turn("assistant", "Answer");
    this.article = article;
    this.text = new AnswerText(text);
    this.failed = false;
    this._element = text;
    this._reasoning = null;
    this._reason = null;
    this._usage = null;
    this._begin = performance.now();
    this._first = null;
    article.setAttribute("aria-busy", "true");
    text.tabIndex = 0;
    text.setAttribute("aria-describedby", "tip");
  }

  take(event) {
    if (event.id) say("answer-id", event.id);
    if (event.usage) this._usage = event.usage;
    const choice = event.choices[0];
    if (!choice) return;
    const { content, reasoning } = choice.delta;
    if ((content || reasoning) && this._first === null) this._first = performance.now();
    if (reasoning) this._think(reasoning);
    const entries = choice.logprobs?.content ?? [];
    if (content || (entries.length && !reasoning)) this.text.push(content ?? "", entries);
    this._reason = choice.finish_reason ?? this._reason;
  }

  _think(text) {
    if (!this._reasoning) {
      const details = document.createElement("details");
      const summary = document.createElement("summary");
      summary.textContent = "Reasoning";
      this._reasoning = document.createElement("p");
      details.className = "reasoning";
      details.append(summary, this._reasoning);
      this._element.before(details);
    }
    this._reasoning.append(text);
  }

  end(reason = this._reason) {
    const seconds = (performance.now() - this._begin) / 1000;
    const told = [];
    const tokens = this._usage?.completion_tokens;
    if (tokens !== undefined) {
      const since = (performance.now() - this._first) / 1000;
      told.push(`${tokens} tokens`);
      if (tokens > 1 && since > 0) told.push(`${Math.round((tokens - 1) / since)} tokens/s`);
    }
    if (this._first !== null) told.push(`first token after ${Math.round(this._first - this._begin)} ms`);
    told.push(`${seconds.toFixed(1)} s total`);
    const cached = this._usage?.prompt_tokens_details.cached_tokens;
    if (cached) told.push(`${cached} of ${this._usage.prompt_tokens} prompt tokens cached`);
    const accepted = this._usage?.completion_tokens_details.accepted_prediction_tokens;
    if (accepted) told.push(`${accepted} from drafts`);
    if (reason === "length") told.push("cut off at the token limit");
    if (reason === "stopped") told.push("stopped");
    line(this.article, "meta", told.join(" · "));
    this.article.setAttribute("aria-busy", "false");
  }

  fail(error) {
    this.failed = true;
    if (!this.text.text) this._element.remove();
    const named = !error.param || error.message.includes(error.param);
    line(this.article, "error", named ? error.message : `${error.message} (${error.param})`).setAttribute("role", "alert");
    this.article.setAttribute("aria-busy", "false");
  }
}

function setRunning(controller) {
  running = controller;
  by("send").hidden = running !== null;
  by("stop-answer").hidden = running === null;
  say("answering", running !== null);
  // Hiding the focused button would move the focus to the start of the page.
  if (document.activeElement === document.body || document.activeElement?.hidden) prompt.focus();
}

/** Stop the answer. The server aborts the request when the connection closes. */
function stop() {
  running?.abort();
}

function grow() {
  prompt.style.height = "auto";
  prompt.style.height = `${Math.min(prompt.scrollHeight + 2, 240)}px`;
}

export function beginChat() {
  by("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  prompt.addEventListener("input", grow);
  prompt.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running && !by("key-dialog").open) stop();
  });
  by("stop-answer").addEventListener("click", () => {
    stop();
    prompt.focus();
  });
  by("new-chat").addEventListener("click", () => {
    stop();
    conversation = [];
    for (const each of log.querySelectorAll(".turn")) each.remove();
    by("welcome").hidden = false;
    prompt.focus();
  });
}
