// The dialog that shows a report of `forge-jax compare --json`. The report stays in the browser.

import { comparisonView, readComparison } from "./comparison.js";
import { by } from "./dom.js";

function note(text, wrong = false) {
  by("comparison-note").textContent = text;
  by("comparison-note").classList.toggle("wrong", wrong);
}

async function open(file) {
  try {
    const report = readComparison(await file.text());
    by("comparison-view").replaceChildren(comparisonView(report, 2));
    note(file.name);
  } catch (error) {
    note(`${file.name} was not opened. ${error.message}`, true);
  }
}

export function beginComparison() {
  const dialog = by("comparison-dialog");
  by("comparison-show").addEventListener("click", () => dialog.showModal());
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
