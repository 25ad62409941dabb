// Elements of the page. Text is always inserted as text nodes, never as HTML.

const SVG = "http://www.w3.org/2000/svg";

export const by = (id) => document.getElementById(id);
export const say = (name, detail) => document.dispatchEvent(new CustomEvent(name, { detail }));

/** Return a new element with children: nodes, or strings as text. */
export function element(name, className = "", ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

/** Return an icon of icons.svg. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  const use = document.createElementNS(SVG, "use");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  use.setAttribute("href", `static/icons.svg#${name}`);
  svg.append(use);
  return svg;
}

/** Return a button with an icon. `label` is its accessible name and tooltip. */
export function iconButton(name, label, act) {
  const button = element("button", "bare", icon(name));
  button.type = "button";
  button.title = label;
  button.setAttribute("aria-label", label);
  button.addEventListener("click", act);
  return button;
}

/** Let the browser save text as a JSON file. */
export function download(text, name) {
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** Copy text, and show for two seconds on the button, as an icon or a text, that it was copied. */
export async function copyFrom(button, text, done = icon("check")) {
  const label = [...button.childNodes];
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    copyBySelection(text); // the Clipboard API needs HTTPS or localhost
  }
  if (button.dataset.copied) return; // it still shows the last copy
  button.replaceChildren(done);
  button.dataset.copied = "true";
  setTimeout(() => {
    button.replaceChildren(...label);
    delete button.dataset.copied;
  }, 2000);
}

function copyBySelection(text) {
  const area = element("textarea", "unseen");
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}
