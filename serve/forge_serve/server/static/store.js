// Conversations in the browser's IndexedDB. They stay on this computer. If the browser has no database, as
// in some private windows, they last until the page is closed.

import { Conversation, readConversation } from "./conversation.js";
import { say } from "./dom.js";

const NAME = "forge-jax";
const TABLE = "conversations";
const FORMAT = "forge-jax-chats";
const VERSION = 1;

const conversations = new Map(); // id -> Conversation
const tabs = new BroadcastChannel(NAME);
let database = null;
let opened = null; // promise: the database was read

const finished = (request) =>
  new Promise((resolve, reject) => {
    request.addEventListener("success", () => resolve(request.result));
    request.addEventListener("error", () => reject(request.error));
  });

function table(mode) {
  return database.transaction(TABLE, mode).objectStore(TABLE);
}

async function readAll() {
  for (const row of await finished(table("readonly").getAll())) conversations.set(row.id, new Conversation(row));
}

async function open() {
  const opening = indexedDB.open(NAME, VERSION);
  opening.addEventListener("upgradeneeded", () => opening.result.createObjectStore(TABLE, { keyPath: "id" }));
  database = await finished(opening);
  await readAll();
}

/** Open the database and read it. */
export async function openStore() {
  opened = open().catch(() => {
    say("failed", "This browser cannot store chats. They are lost when you close the page.");
  });
  await opened;
  say("conversations-changed", "this tab");
  tabs.addEventListener("message", async () => {
    if (!database) return;
    conversations.clear();
    await readAll();
    say("conversations-changed", "another tab");
  });
}

/** Return the conversations that contain `query`, the latest first. */
export function listed(query = "") {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  const found = [...conversations.values()].filter((each) => {
    const text = words.length ? each.text() : "";
    return words.every((word) => text.includes(word));
  });
  return found.sort((one, other) => other.updated - one.updated);
}

export const stored = (id) => conversations.get(id);

async function write(change) {
  say("conversations-changed", "this tab");
  await opened;
  if (!database) return;
  try {
    await change(table("readwrite"));
    tabs.postMessage("changed");
  } catch (error) {
    say("failed", `The conversation could not be saved: ${error.message}`);
  }
}

export function save(conversation) {
  conversations.set(conversation.id, conversation);
  return write((rows) => finished(rows.put(conversation.plain())));
}

export function remove(conversation) {
  conversations.delete(conversation.id);
  return write((rows) => finished(rows.delete(conversation.id)));
}

/** Return conversations as the text of a file that `importText` reads. */
export function exportText(chosen) {
  const plain = chosen.map((each) => each.plain());
  return JSON.stringify({ format: FORMAT, version: VERSION, conversations: plain }, null, 2);
}

/** Add the conversations of an exported file and return them. Throws `TypeError` or `SyntaxError` and adds nothing
 *  if the file is invalid. */
export async function importText(text) {
  const file = JSON.parse(text);
  if (file?.format !== FORMAT || !Array.isArray(file.conversations)) {
    throw new TypeError(`The file has no "format": "${FORMAT}". Choose a file that this page exported.`);
  }
  if (file.version !== VERSION) throw new TypeError(`version must be ${VERSION}, not ${file.version}`);
  const read = file.conversations.map((each, i) => readConversation(each, `conversations[${i}]`));
  for (const each of read) await save(each);
  return read;
}
