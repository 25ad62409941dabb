// Keyboard shortcuts. `Mod` is Ctrl, or Cmd on a Mac.

import { by, element } from "./dom.js";

const MAC = /Mac|iPhone|iPad/.test(navigator.platform);

/** Handle shortcuts, given as [keys, description, action or null if another module handles it]. */
export function beginShortcuts(shortcuts) {
  const acting = new Map(shortcuts.filter(([, , act]) => act).map(([keys, , act]) => [keys, act]));
  document.addEventListener("keydown", (event) => {
    if (document.querySelector("dialog[open]")) return;
    const mod = MAC ? event.metaKey : event.ctrlKey;
    const typing = event.target.matches?.("input, textarea, select");
    if (!mod && (typing || event.altKey)) return;
    const named = mod ? `Mod+${event.shiftKey ? "Shift+" : ""}${event.key.toUpperCase()}` : event.key;
    const act = acting.get(named);
    if (!act) return;
    event.preventDefault();
    act();
  });
  const rows = shortcuts.map(([keys, description]) => {
    const parts = keys.split("+").map((key) => element("kbd", "", key === "Mod" ? (MAC ? "⌘" : "Ctrl") : key));
    return element("tr", "", element("td", "keys", ...parts), element("td", "", description));
  });
  by("shortcut-rows").replaceChildren(...rows);
  by("shortcuts-open").addEventListener("click", showShortcuts);
}

export function showShortcuts() {
  by("shortcuts-dialog").showModal();
}
