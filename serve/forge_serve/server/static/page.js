// Setup of the page: panels, API key and models.

import { apiKey, request } from "./api.js";
import { beginChat } from "./chat.js";
import { beginEngine } from "./engine.js";
import { beginSettings } from "./settings.js";
import { beginTips } from "./tokens.js";

const RETRY_MS = 1500;

const by = (id) => document.getElementById(id);
const say = (name, detail) => document.dispatchEvent(new CustomEvent(name, { detail }));
const dialog = by("key-dialog");
const besides = matchMedia("(min-width: 761px)"); // same as in page.css
let retry = null;

function showPanel(name) {
  document.body.dataset.view = name;
  press();
  say("panel-shown", name);
}

/** Mark the panel that is shown. On wide windows, the chat view also shows the engine. */
function press() {
  const view = document.body.dataset.view;
  const shown = view === "chat" && besides.matches ? "engine" : view;
  for (const button of document.querySelectorAll("[data-shows]")) {
    button.setAttribute("aria-pressed", String(button.dataset.shows === shown));
  }
}

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
    state(`context ${data[0].max_model_len}`, "ready");
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

by("key-open").addEventListener("click", () => openKey(""));
by("key-cancel").addEventListener("click", () => dialog.close());
by("key-forget").addEventListener("click", () => useKey(""));
by("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(by("key").value.trim());
});
for (const button of document.querySelectorAll("[data-shows]")) {
  button.addEventListener("click", () => showPanel(button.dataset.shows));
}
document.addEventListener("show-panel", (event) => showPanel(event.detail));
document.addEventListener("needs-key", (event) => openKey(event.detail));

besides.addEventListener("change", press);
press();

beginSettings();
beginTips(by("log"));
beginChat();
beginEngine();
connect();
by("prompt").focus();
