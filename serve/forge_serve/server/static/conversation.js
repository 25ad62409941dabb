// A conversation: a tree of messages, of which one path is shown. Editing or regenerating a message adds a
// sibling. This module has no elements and no storage.

const ROLES = ["user", "assistant", "tool"];
const TITLE_CHARS = 60;
export const UNTITLED = "New chat";

export const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(12)), (b) => b.toString(16).padStart(2, "0")).join("");

export class Conversation {
  constructor({ id = newId(), title = "", created = Date.now(), updated = created, messages = [], leaf = null } = {}) {
    this.id = id;
    this.title = title; // "" until the first question
    this.created = created; // milliseconds since 1970, as `updated`
    this.updated = updated;
    this.messages = messages; // parents precede their children
    this.leaf = leaf; // id of the last message on the shown path, or null
  }

  find(id) {
    return this.messages.find((message) => message.id === id);
  }

  /** Return the shown messages, or those up to the message `leaf`. */
  path(leaf = this.leaf) {
    const found = [];
    for (let at = this.find(leaf); at; at = this.find(at.parent)) found.unshift(at);
    return found;
  }

  siblings(message) {
    return this.messages.filter((each) => each.parent === message.parent);
  }

  add(message, parent = this.leaf) {
    const made = { id: newId(), parent, ...message };
    this.messages.push(made);
    this.leaf = made.id;
    this.updated = Date.now();
    if (!this.title && made.role === "user") this.title = titleOf(made);
    return made;
  }

  /** Remove a message without children. Its parent becomes the last shown message. */
  remove(message) {
    this.messages = this.messages.filter((each) => each !== message);
    this.leaf = message.parent;
  }

  /** Show the newest path through a message. */
  select(message) {
    let at = message;
    for (let next = at; next; next = this.messages.findLast((each) => each.parent === at.id)) at = next;
    this.leaf = at.id;
  }

  /** Return a new conversation with copies of the messages up to `message`. */
  branch(message) {
    const path = structuredClone(this.path(message.id));
    return new Conversation({ title: this.title, messages: path, leaf: message.id });
  }

  /** Return the texts of a search: the title and all messages. */
  text() {
    return [this.title, ...this.messages.map((message) => message.content)].join("\n").toLowerCase();
  }

  plain() {
    return structuredClone({ ...this });
  }
}

function titleOf(message) {
  const line = message.content.trim().split("\n")[0] || message.attachments?.[0]?.name || UNTITLED;
  return line.length > TITLE_CHARS ? `${line.slice(0, TITLE_CHARS - 1)}…` : line;
}

/** Return the messages of a chat completion request. */
export function requestMessages(path, system) {
  const messages = path.map((message) => {
    if (message.role === "tool") return { role: "tool", tool_call_id: message.call, content: message.content };
    if (message.role === "user") return { role: "user", content: withAttachments(message) };
    const calls = message.calls?.map(({ id, name, arguments: given }) => ({
      id,
      type: "function",
      function: { name, arguments: given },
    }));
    return { role: "assistant", content: message.content, ...(calls?.length ? { tool_calls: calls } : {}) };
  });
  return system.trim() ? [{ role: "system", content: system }, ...messages] : messages;
}

function withAttachments({ content, attachments = [] }) {
  const files = attachments.map(({ name, text }) => `File ${name}:\n\n${text}`);
  return [...files, content].filter((part) => part !== "").join("\n\n");
}

// ---- reading conversations from a file ----------------------------------------------------------

class Reader {
  constructor(value, where) {
    if (typeof value !== "object" || value === null) throw new TypeError(`${where} must be an object`);
    this._value = value;
    this._where = where;
  }

  _checked(name, holds, kind, otherwise) {
    const value = Object.hasOwn(this._value, name) ? this._value[name] : undefined;
    if ((value === undefined || value === null) && otherwise !== undefined) return otherwise;
    if (!holds(value)) throw new TypeError(`${this._where}.${name} must be ${kind}`);
    return value;
  }

  text(name, otherwise) {
    return this._checked(name, (value) => typeof value === "string", "a string", otherwise);
  }

  number(name, otherwise) {
    return this._checked(name, Number.isFinite, "a number", otherwise);
  }

  choice(name, choices) {
    return this._checked(name, (value) => choices.includes(value), choices.join(", "));
  }

  list(name, read) {
    const values = this._checked(name, Array.isArray, "a list", []);
    return values.map((value, i) => read(new Reader(value, `${this._where}.${name}[${i}]`)));
  }
}

/** Return a conversation with only known, checked fields and new ids. Throws `TypeError` with the field's name. */
export function readConversation(value, where) {
  const reader = new Reader(value, where);
  const ids = new Map([["", null]]); // ids in the file -> new ids
  const messages = reader.list("messages", (of) => {
    const parent = ids.get(of.text("parent", ""));
    if (parent === undefined) throw new TypeError(`${of._where}.parent must be the id of an earlier message`);
    const id = newId();
    ids.set(of.text("id"), id);
    const message = { id, parent, role: of.choice("role", ROLES), content: of.text("content") };
    for (const name of ["reasoning", "call", "name", "meta"]) {
      const text = of.text(name, "");
      if (text) message[name] = text;
    }
    const read = (names) => (each) => Object.fromEntries(names.map((name) => [name, each.text(name)]));
    const calls = of.list("calls", read(["id", "name", "arguments"]));
    const attachments = of.list("attachments", read(["name", "text"]));
    return { ...message, ...(calls.length ? { calls } : {}), ...(attachments.length ? { attachments } : {}) };
  });
  const created = reader.number("created", Date.now());
  return new Conversation({
    title: reader.text("title", ""),
    created,
    updated: reader.number("updated", created),
    messages,
    leaf: ids.get(reader.text("leaf", "")) ?? messages.at(-1)?.id ?? null,
  });
}
