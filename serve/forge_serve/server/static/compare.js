// The dialog that compares two models live, or shows a report of `forge-jax compare --json`. Reports stay in the browser.

import { comparisonView, readComparison } from "./comparison.js";
import { by } from "./dom.js";
import { beginLive, openLive, stopLive } from "./live.js";

function note(text, wrong = false) {
  by("comparison-note").textContent = text;
  by("comparison-note").classList.toggle("wrong", wrong);
}

/** Show the live comparison, or the report of a file. */
function showLive(live) {
  by("live").hidden = !live;
  by("comparison-view").hidden = live;
  by("comparison-live").hidden = live;
}

async function open(file) {
  try {
    const view = comparisonView(readComparison(await file.text()), 2);
    stopLive();
    showLive(false);
    by("comparison-view").replaceChildren(view);
    note(file.name);
  } catch (error) {
    note(`${file.name} was not opened. ${error.message}`, true);
  }
}

export function beginComparison() {
  const dialog = by("comparison-dialog");
  beginLive();
  by("comparison-show").addEventListener("click", () => {
    dialog.showModal();
    if (!by("live").hidden) openLive();
  });
  by("comparison-live").addEventListener("click", () => {
    showLive(true);
    note("");
    openLive();
  });
  by("comparison-close").addEventListener("click", () => dialog.close());
  by("comparison-open").addEventListener("click", () => by("comparison-file").click());
  by("comparison-file").addEventListener("change", async () => {
    for (const file of by("comparison-file").files) await open(file);
    by("comparison-file").value = "";
  });
  dialog.addEventListener("dragover", (event) => event.preventDefault());
  dialog.addEventListener("drop", (event) => {
    event.preventDefault();
    const [file] = event.dataTransfer.files;
    if (file) open(file);
  });
}
