// The open conversation. One request runs at a time; it is streamed, and aborted if the user stops it.

import { errorText, events, request } from "./api.js";
import { anyAttached, setAttachments, takeAttachments } from "./attachments.js";
import { markChat } from "./chats.js";
import { Conversation, requestMessages } from "./conversation.js";
import { by, element, say } from "./dom.js";
import { MessageView } from "./message.js";
import { Meter } from "./meter.js";
import { fields } from "./settings.js";
import { remove, save, stored } from "./store.js";
import { addCalls } from "./tools.js";

const SAVE_MS = 3000; // while an answer streams

const log = by("log");
const prompt = by("prompt");

let conversation = new Conversation(); // stored with its first question
let views = [];
let running = null; // AbortController of the current answer

let following = true; // the log scrolls as it grows, until the user scrolls up

const toEnd = () => (log.scrollTop = log.scrollHeight);
const grown = new ResizeObserver(() => following && toEnd());

// ---- the log ---------------------------------------------------------------------------------------

function show() {
  views = [];
  log.querySelectorAll(".turn").forEach((each) => each.remove());
  for (const message of conversation.path()) append(message);
  by("welcome").hidden = views.length > 0;
  document.title = conversation.title ? `${conversation.title} · forge-jax` : "forge-jax";
  markChat(conversation.id);
}

function append(message) {
  const view = new MessageView(conversation, message, ACTIONS);
  by("welcome").hidden = true;
  grown.observe(view.article);
  log.insertBefore(view.article, log.querySelector(".error"));
  views.push(view);
  return view;
}

function open(other) {
  if (other === conversation && views.length) return;
  stop();
  clearErrors();
  conversation = other;
  show();
  toEnd();
  prompt.focus();
}

const ACTIONS = {
  edit: (message, content) => {
    if (running) return;
    const { attachments } = message;
    if (message.role === "user") ask({ role: "user", content, attachments }, message.parent);
    else {
      conversation.add({ role: "assistant", content, meta: "edited" }, message.parent);
      save(conversation);
      show();
    }
  },
  again: (message) => {
    if (!running) regenerate(message);
  },
  answer: () => running || answer(),
  continue: (message) => running || answer(message),
  branch: (message) => {
    const made = conversation.branch(message);
    save(made);
    open(made);
  },
  select: (message) => {
    if (running) return;
    conversation.select(message);
    save(conversation);
    show();
  },
  results: (message, texts) => {
    if (running) return;
    for (const [i, call] of message.calls.entries()) {
      conversation.add({ role: "tool", content: texts[i], call: call.id, name: call.name });
    }
    save(conversation);
    show();
    answer();
  },
};

// ---- questions and answers ---------------------------------------------------------------------------

async function send() {
  const content = prompt.value;
  if (running || (!content.trim() && !anyAttached()) || !fields()) return;
  const attachments = takeAttachments();
  prompt.value = "";
  grow();
  await ask({ role: "user", content, ...(attachments.length ? { attachments } : {}) }, conversation.leaf);
}

/** Add a question and its answer. If there is no answer, remove the question and restore it in the composer. */
async function ask(message, parent) {
  if (!fields()) return;
  const asked = conversation;
  const before = asked.leaf;
  const question = asked.add(message, parent);
  save(asked);
  show();
  if (await answer()) return;
  asked.remove(question);
  asked.leaf = before;
  if (stored(asked.id)) await (asked.messages.length ? save(asked) : forget(asked));
  if (conversation !== asked) return;
  show();
  if (prompt.value || anyAttached()) return;
  prompt.value = question.content;
  setAttachments(question.attachments ?? []);
  grow();
}

/** Delete a conversation without messages. Its next question names it. */
function forget(empty) {
  empty.title = "";
  return remove(empty);
}

/** Request another answer. If none arrives, show the previous one again. */
async function regenerate(message) {
  const asked = conversation;
  const before = asked.leaf;
  asked.leaf = message.parent;
  show();
  if (await answer()) return;
  asked.leaf = before;
  if (conversation === asked) show();
}

/** Request an answer to the shown messages, or the rest of the answer `continued`. Returns false if no part of one
 *  arrived. */
async function answer(continued = null) {
  const asked = fields();
  if (!asked) return false;
  clearErrors();
  const told = conversation;
  const messages = requestMessages(told.path(), by("system").value);
  // While the list of models is loading, the server chooses.
  const model = by("model").disabled ? undefined : by("model").value;
  const body = { model, messages, stream: true, stream_options: { include_usage: true }, ...asked };
  if (continued) Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
  const message = continued ?? told.add({ role: "assistant", content: "", model });
  const view = continued ? views.at(-1) : append(message);
  const stream = new Stream(message, view);
  view.busy = true;
  setRunning(new AbortController());
  toEnd();
  let error = null;
  try {
    const response = await request("v1/chat/completions", { body, signal: running.signal });
    let saved = performance.now();
    for await (const event of events(response)) {
      stream.take(event);
      if (performance.now() - saved > SAVE_MS && stored(told.id)) {
        saved = performance.now();
        save(told);
      }
    }
    stream.end();
  } catch (failure) {
    error = failure;
    stream.end(failure.name === "AbortError" ? "stopped" : "interrupted");
  }
  setRunning(null);
  const arrived = stream.arrived || error === null;
  if (!arrived && !continued) {
    told.remove(message);
    if (conversation === told) show();
  } else {
    told.updated = Date.now();
    if (stored(told.id)) save(told);
    view.busy = false;
  }
  if (error && error.name !== "AbortError") {
    if (conversation === told) showError(errorText(error, messages));
    if (error.status === 401) say("needs-key", error.message);
  }
  if (conversation === told) toEnd();
  return arrived;
}

function showError(text) {
  const line = element("p", "error", text);
  line.setAttribute("role", "alert");
  log.append(line);
}

function clearErrors() {
  log.querySelectorAll(".error").forEach((each) => each.remove());
}

/** Adds the events of a stream to a message, and at its end the figures. */
class Stream {
  constructor(message, view) {
    this._message = message;
    this._view = view;
    this._meter = new Meter();
    delete message.meta;
  }

  get arrived() {
    return this._meter.arrived;
  }

  take(event) {
    if (event.id) say("answer-id", event.id);
    this._meter.take(event);
    const choice = event.choices[0];
    if (!choice) return;
    const { content, reasoning, tool_calls: calls } = choice.delta;
    if (reasoning) this._message.reasoning = (this._message.reasoning ?? "") + reasoning;
    if (content) this._message.content += content;
    if (calls) addCalls(this._message, calls);
    const entries = choice.logprobs?.content ?? [];
    if (content || (entries.length && !reasoning)) this._view.pushTokens(content ?? "", entries);
    this._view.changed();
  }

  end(reason) {
    this._message.meta = this._meter.text(reason);
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

/** Open an empty chat. */
export function newChat() {
  open(new Conversation());
}

/** Return the messages of the open chat up to its last question. They are empty if there is none. */
export function question() {
  const path = conversation.path();
  return path.slice(0, path.findLastIndex(({ role }) => role !== "assistant") + 1);
}

/** Edit the last question. */
function editLast() {
  views.findLast((view) => view.message.role === "user")?.edit();
}

export function beginChat() {
  by("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  prompt.addEventListener("input", grow);
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "ArrowUp" && !prompt.value && !running) editLast();
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running && !document.querySelector("dialog[open]")) stop();
  });
  log.addEventListener("scroll", () => {
    following = log.scrollHeight - log.scrollTop - log.clientHeight < 48;
  });
  by("stop-answer").addEventListener("click", () => {
    stop();
    prompt.focus();
  });
  by("new-chat").addEventListener("click", newChat);
  document.addEventListener("open-chat", (event) => open(event.detail));
  document.addEventListener("chat-deleted", (event) => {
    if (event.detail.id === conversation.id) newChat();
  });
  document.addEventListener("conversations-changed", (event) => {
    const other = stored(conversation.id);
    if (event.detail !== "another tab" || running || !other) return;
    conversation = other;
    show();
  });
  show();
}
