// The list of conversations: search, open, rename, delete, export, import.

import { by, download, element, iconButton, say } from "./dom.js";
import { exportText, importText, listed, remove, save } from "./store.js";
import { UNTITLED } from "./conversation.js";

let shown = null; // id of the open conversation
let renaming = null; // id of the conversation whose name is edited

function show() {
  const found = listed(by("search").value);
  by("chat-list").replaceChildren(...found.map(row));
  by("no-chats").hidden = found.length > 0;
  by("no-chats").textContent = by("search").value ? "No chat contains these words." : "No chats yet.";
  by("chat-list").querySelector("input")?.select();
}

function row(conversation) {
  const { id } = conversation;
  const title = conversation.title || UNTITLED;
  const item = element("li", "chat-row");
  if (id === renaming) {
    item.append(nameBox(conversation));
    return item;
  }
  const open = element("button", "bare open", title);
  open.type = "button";
  open.title = title;
  if (id === shown) open.setAttribute("aria-current", "page");
  open.addEventListener("click", () => say("open-chat", conversation));
  const rename = iconButton("edit", `Rename ${title}`, () => {
    renaming = id;
    show();
  });
  const keep = iconButton("download", `Export ${title}`, () => downloadChats([conversation], title));
  const drop = iconButton("trash", `Delete ${title}`, () => askToDelete(conversation, title));
  item.append(open, element("span", "row-actions", rename, keep, drop));
  return item;
}

function nameBox(conversation) {
  const box = element("input");
  box.value = conversation.title;
  box.setAttribute("aria-label", "Name of the chat");
  const end = (keep) => {
    if (renaming !== conversation.id) return; // ended already
    renaming = null;
    const title = box.value.trim();
    if (keep && title) conversation.title = title;
    if (keep) save(conversation);
    else show();
  };
  box.addEventListener("keydown", (event) => {
    if (event.key === "Escape") event.stopPropagation();
    if (event.key === "Enter" || event.key === "Escape") end(event.key === "Enter");
  });
  box.addEventListener("blur", () => end(true));
  return box;
}

function askToDelete(conversation, title) {
  const dialog = by("delete-dialog");
  by("delete-name").textContent = title;
  dialog.returnValue = "";
  dialog.showModal();
  const deleted = () => {
    if (dialog.returnValue !== "delete") return;
    remove(conversation);
    say("chat-deleted", conversation);
  };
  dialog.addEventListener("close", deleted, { once: true });
}

function downloadChats(conversations, name) {
  const plain = name.replace(/[^\p{L}\p{N} _-]+/gu, "").trim().slice(0, 60) || "chat";
  download(exportText(conversations), `${plain}.json`);
}

async function importFile(file) {
  try {
    const read = await importText(await file.text());
    if (read.length) say("open-chat", read[0]);
  } catch (error) {
    say("failed", `${file.name} was not imported. ${error.message}`);
  }
}

/** Mark the open conversation in the list. */
export function markChat(id) {
  shown = id;
  show();
}

export function beginChats() {
  by("search").addEventListener("input", show);
  by("search").addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !by("search").value) return;
    event.stopPropagation();
    by("search").value = "";
    show();
  });
  by("export-all").addEventListener("click", () => downloadChats(listed(), "forge-jax chats"));
  by("import").addEventListener("click", () => by("import-file").click());
  by("import-file").addEventListener("change", async () => {
    for (const file of by("import-file").files) await importFile(file);
    by("import-file").value = "";
  });
  document.addEventListener("conversations-changed", show);
  show();
}
