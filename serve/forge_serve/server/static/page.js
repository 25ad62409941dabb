// Setup of the page: panels, API key and models.

import { apiKey, request } from "./api.js";
import { beginAttachments } from "./attachments.js";
import { beginChat, newChat } from "./chat.js";
import { beginChats } from "./chats.js";
import { beginComparison } from "./compare.js";
import { by, say } from "./dom.js";
import { beginEngine } from "./engine.js";
import { beginSettings } from "./settings.js";
import { beginShortcuts, showShortcuts } from "./shortcuts.js";
import { openStore } from "./store.js";
import { beginTips } from "./tokens.js";

const RETRY_MS = 1500;
const NOTICE_MS = 8000;

const dialog = by("key-dialog");
const roomy = matchMedia("(min-width: 1000px)"); // same as in page.css: the list does not cover the chat
let retry = null;
let noticed = null;

// ---- panels ------------------------------------------------------------------------------------------

/** Show the panel "settings" or "engine" at the right, or none if `name` is "". */
function showPanel(name) {
  document.body.dataset.panel = name;
  if (name && !roomy.matches) document.body.dataset.list = "closed";
  mark();
  say("panel-shown", name);
}

const togglePanel = (name) => showPanel(document.body.dataset.panel === name ? "" : name);

function showList(open) {
  document.body.dataset.list = open ? "open" : "closed";
  if (open && !roomy.matches) document.body.dataset.panel = "";
  mark();
}

const listOpen = () => document.body.dataset.list === "open";

function mark() {
  for (const button of document.querySelectorAll("[data-shows]")) {
    button.setAttribute("aria-expanded", String(document.body.dataset.panel === button.dataset.shows));
  }
  by("list-open").setAttribute("aria-expanded", String(listOpen()));
}

function searchChats() {
  showList(true);
  by("search").focus();
  by("search").select();
}

// ---- the server ----------------------------------------------------------------------------------------

function state(text, kind) {
  by("state").textContent = text;
  by("state").dataset.state = kind;
}

/** Load the list of models, and retry until the server is ready. */
async function connect() {
  clearTimeout(retry);
  try {
    const { data } = await (await request("v1/models")).json();
    const options = data.map(({ id }) => new Option(id, id));
    by("model").replaceChildren(...options);
    by("model").disabled = false;
    state(`${data[0].max_model_len.toLocaleString("en")} tokens of context`, "ready");
  } catch (error) {
    if (error.status === 401) {
      state("API key required", "locked");
      openKey(error.message);
      return;
    }
    state(error.status === 503 ? "starting" : "unreachable", "starting");
    retry = setTimeout(connect, RETRY_MS);
  }
}

/** Open the key dialog. `why` is the server's message, or "" if the user opened the dialog. */
function openKey(why) {
  if (dialog.open) return;
  by("key-why").textContent = why;
  by("key").value = apiKey.get();
  dialog.showModal();
  by("key").focus();
}

function useKey(key) {
  apiKey.set(key);
  dialog.close();
  say("key-changed");
  connect();
  by("prompt").focus();
}

/** Show a message for some seconds. */
function notice(text) {
  clearTimeout(noticed);
  by("notice").textContent = text;
  by("notice").hidden = false;
  noticed = setTimeout(() => (by("notice").hidden = true), NOTICE_MS);
}

// ---- setup -----------------------------------------------------------------------------------------------

by("key-open").addEventListener("click", () => openKey(""));
by("key-cancel").addEventListener("click", () => dialog.close());
by("key-forget").addEventListener("click", () => useKey(""));
by("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(by("key").value.trim());
});
for (const button of document.querySelectorAll("[data-shows]")) {
  button.addEventListener("click", () => togglePanel(button.dataset.shows));
}
for (const button of document.querySelectorAll("[data-closes]")) {
  button.addEventListener("click", () => {
    const name = button.dataset.closes;
    if (name === "chats") showList(false);
    else showPanel("");
    (name === "chats" ? by("list-open") : document.querySelector(`[data-shows=${name}]`)).focus();
  });
}
by("list-open").addEventListener("click", () => showList(!listOpen()));
document.addEventListener("show-panel", (event) => showPanel(event.detail));
document.addEventListener("needs-key", (event) => openKey(event.detail));
document.addEventListener("failed", (event) => notice(event.detail));
document.addEventListener("open-chat", () => roomy.matches || showList(false));
by("new-chat").addEventListener("click", () => roomy.matches || showList(false));
roomy.addEventListener("change", () => showList(roomy.matches));

beginSettings();
beginTips(by("log"));
openStore();
beginChats();
beginChat();
beginAttachments();
beginEngine();
beginComparison();
beginShortcuts([
  ["Enter", "Send the message", null],
  ["Shift+Enter", "New line", null],
  ["Esc", "Stop the answer", null],
  ["↑", "Edit the last question, if the message is empty", null],
  ["Mod+K", "Search chats", searchChats],
  ["Mod+Shift+O", "New chat", newChat],
  ["Mod+B", "Show or hide the chats", () => showList(!listOpen())],
  ["Mod+E", "Show or hide the engine", () => togglePanel("engine")],
  ["Mod+,", "Show or hide the settings", () => togglePanel("settings")],
  ["?", "Show this list, if no text is being typed", showShortcuts],
]);
showList(roomy.matches);
connect();
by("prompt").focus();
